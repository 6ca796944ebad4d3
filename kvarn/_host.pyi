from typing import TypedDict

class BuildInfo(TypedDict):
    version: str
    layout_version: int
    compiler: str
    cuda_version: str | None
    cuda_architectures: str

valid_bits: tuple[int, ...]
valid_groups: tuple[int, ...]
valid_head_dims: tuple[int, ...]
layout_version: int
version: str

def record_layout(key_bits: int, value_bits: int, group: int, head_dim: int) -> dict[str, int]: ...
def key_position(token: int, channel: int, head_dim: int) -> tuple[int, int, int, int]: ...
def value_position(token: int, channel: int, head_dim: int) -> tuple[int, int, int, int]: ...
def field_position(index: int, bits: int) -> tuple[int, int]: ...
def word_offset(word: int, lane: int) -> int: ...
def build_info() -> BuildInfo: ...
