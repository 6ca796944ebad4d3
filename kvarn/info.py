"""What this installation is, what is missing in it, and whether each operator computes what
`kvarn.reference` says: the material of ``python -m kvarn info``."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvarn import _backends, _host, _load, ops, reference
from kvarn.format import CanonicalRecords, Format

_FORMAT = Format("kvarn_k4v2_g128", head_dim=64)
_KV_HEADS, _Q_HEADS = 2, 6


@dataclass(frozen=True)
class Check:
    """One operator on one device.

    Attributes:
        op: its name in kvarn.ops.
        device: "cpu", "cuda:0", ...
        state: "ok", "wrong" (the result is not the reference's), "failed" (it raised) or "absent".
        detail: the error and its bound, or what was raised, or why it is absent.
    """

    op: str
    device: str
    state: str
    detail: str


def devices() -> list[torch.device]:
    """Those on which kvarn might run here: the CPU and every CUDA device that torch sees."""
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in cuda)]


def facts() -> dict[str, str]:
    """Versions, devices, instruction set and compiled architectures, in words."""
    build = _host.build_info()
    found = {
        "kvarn": f"{build['version']} (record format {build['layout_version']})",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'not built in'})",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "compiler": build["compiler"],
        "CPU": f"{_cpu_name()}, {torch.get_num_threads()} threads, {_host.cpu_isa()} kernels",
        "CUDA library": _cuda_library(build),
    }
    for device in devices()[1:]:
        properties = torch.cuda.get_device_properties(device)
        found[str(device)] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return found


def missing() -> list[str]:
    """What does not work here and why, one sentence each; empty if all of kvarn runs."""
    found = [f"{name}: {state}" for name, state in _load.status().items() if state != "loaded"]
    if not found:
        cuda = devices()[1:] or [torch.device("cuda", 0)]
        found += [reason for device in cuda if (reason := _backends.why_missing(device))]
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def _cuda_library(build: _host.BuildInfo) -> str:
    if build["cuda_version"] is None:
        return "not built"
    return f"built by nvcc {build['cuda_version']} for {build['cuda_architectures']}"


def self_check(device: torch.device) -> Iterator[Check]:
    """Runs each operator once on small inputs and compares it with `kvarn.reference`."""
    reason = _load.why_unavailable(device.type)
    present = frozenset[str]() if reason else _backends.ops_of(device.type.upper())
    for op, compare in _CHECKS.items():
        if op not in present:
            why = reason or f"no {device.type.upper()} kernel in this version"
            yield Check(op, str(device), "absent", why)
            continue
        try:
            error, bound = compare(device)
        except Exception as raised:
            words = f"{type(raised).__name__}: {raised}".splitlines()[0]
            yield Check(op, str(device), "failed", words)
        else:
            state = "ok" if error <= bound else "wrong"
            allowed = f"error {error:.0e}, allowed {bound:.0e}"
            yield Check(op, str(device), state, allowed if error or bound else "exact")


def as_dict(checks: list[Check]) -> dict[str, Any]:
    return {"facts": facts(), "missing": missing(), "checks": [asdict(check) for check in checks]}


# --------------------------------------------------------------------------------------------------
# One check per operator: device -> (relative error, bound); 0 is bit for bit.

_Error = tuple[float, float]
_EXACT = 0.0
_FP32 = 1e-5
_HALF = 2e-3
#: Between two correct encoders: a value near a rounding tie may get the other code, and with 2 bits
#: one such value in 10,000 is an error of 1e-2.
_CODES = 3e-2


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.cpu().double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def _mismatch(actual: Tensor, expected: Tensor) -> float:
    """Share of elements that differ."""
    return float((actual.cpu() != expected).double().mean())


def _tiles() -> tuple[Tensor, Tensor]:
    shape = (3, _FORMAT.group, _KV_HEADS, _FORMAT.head_dim)
    return _normal(*shape, seed=1).half(), _normal(*shape, seed=2).half()


def _records() -> Tensor:
    return reference.quantize_tiles(*_tiles(), _FORMAT)


def _check_hadamard(device: torch.device) -> _Error:
    x = _normal(3, 5, 128)
    return _relative(ops.hadamard_transform(x.to(device)), reference.hadamard_transform(x)), _FP32


def _check_normalize(device: torch.device) -> _Error:
    tiles = _normal(2, 64, 128) * torch.logspace(-1, 1, 64)[:, None]
    actual = ops.variance_normalize(tiles.to(device))
    expected = reference.variance_normalize(tiles)
    return max(map(_relative, actual, expected)), 1e-4


def _check_pack(device: torch.device) -> _Error:
    return max(
        _mismatch(ops.pack_bits(codes.to(device), bits), reference.pack_bits(codes, bits))
        for bits, codes in _codes()
    ), _EXACT


def _check_unpack(device: torch.device) -> _Error:
    return max(
        _mismatch(
            ops.unpack_bits(reference.pack_bits(codes, bits).to(device), bits, codes.shape[-1]),
            codes,
        )
        for bits, codes in _codes()
    ), _EXACT


def _codes() -> Iterator[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for bits in _host.valid_bits:
        yield bits, torch.randint(2**bits, (3, 96), generator=generator, dtype=torch.uint8)


def _check_quantize(device: torch.device) -> _Error:
    key, value = _tiles()
    errors = []
    for fit in ("unbiased", "minmax"):
        records = ops.quantize_tiles(key.to(device), value.to(device), _FORMAT, fit=fit)
        expected = reference.quantize_tiles(key, value, _FORMAT, fit=fit)
        errors.append(_record_error(records, expected))
    return max(errors), _CODES


def _record_error(actual: Tensor, expected: Tensor) -> float:
    """Between the tiles that two sets of records stand for."""
    pairs = (
        reference.dequantize_tiles(records.cpu(), _FORMAT, dtype=torch.float32)
        for records in (actual, expected)
    )
    return max(_relative(a, e) for a, e in zip(*pairs, strict=True))


def _check_dequantize(device: torch.device) -> _Error:
    records = _records()
    actual = ops.dequantize_tiles(records.to(device), _FORMAT, dtype=torch.float32)
    expected = reference.dequantize_tiles(records, _FORMAT, dtype=torch.float32)
    return max(map(_relative, actual, expected)), _FP32


def _check_unpack_records(device: torch.device) -> _Error:
    records = _records()
    actual = ops.unpack_records(records.to(device), _FORMAT)
    return max(map(_mismatch, actual, reference.unpack_records(records, _FORMAT))), _EXACT


def _check_pack_records(device: torch.device) -> _Error:
    records = _records()
    canonical = reference.unpack_records(records, _FORMAT)
    moved = CanonicalRecords(*(field.contiguous().to(device) for field in canonical))
    return _mismatch(ops.pack_records(moved, _FORMAT), records), _EXACT


@dataclass
class _Pages:
    """Two sequences: block 0 is a record, blocks 1 and 2 are staged in slots 1 and 0."""

    cache: Tensor
    staging: Tensor
    block_slot: Tensor
    table: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> _Pages:
        return _Pages(*(tensor.to(device) for tensor in vars(self).values()))

    @property
    def arguments(self) -> dict[str, Any]:
        return {"staging": self.staging, "block_slot": self.block_slot}


def _pages() -> _Pages:
    key, value = _tiles()
    staging = torch.stack([key[1:], value[1:]], 1).transpose(2, 3).contiguous().flip(0)
    return _Pages(
        cache=_records(),
        staging=staging,
        block_slot=torch.tensor([-1, 1, 0], dtype=torch.int32),
        table=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        lengths=torch.tensor([200, 77], dtype=torch.int32),
    )


def _check_append(device: torch.device) -> _Error:
    key, value = _normal(2, 4, _KV_HEADS, _FORMAT.head_dim, seed=4).half()
    slots = torch.tensor([130, -1, 383, 256])
    expected, pages = _pages(), _pages().to(device)
    reference.append_kv(key, value, slots, expected.staging, expected.block_slot, _FORMAT)
    key, value, slots = key.to(device), value.to(device), slots.to(device)
    ops.append_kv(key, value, slots, pages.staging, pages.block_slot, _FORMAT)
    return _mismatch(pages.staging, expected.staging), _EXACT


def _check_seal(device: torch.device) -> _Error:
    slots, blocks = torch.tensor([0, 1]), torch.tensor([2, 1])
    expected, pages = _pages(), _pages().to(device)
    pages.cache[1:] = 0
    reference.seal_blocks(expected.staging, slots, blocks, expected.cache, _FORMAT)
    ops.seal_blocks(pages.staging, slots.to(device), blocks.to(device), pages.cache, _FORMAT)
    return _record_error(pages.cache, expected.cache), _CODES


def _check_attention(device: torch.device) -> _Error:
    q = _normal(5, _Q_HEADS, _FORMAT.head_dim, seed=5).half()
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    expected = _pages()
    out, lse = reference.decode_attention(
        q, expected.cache, expected.table, expected.lengths, _FORMAT,
        cu_query_lens=starts, **expected.arguments,
    )  # fmt: skip
    pages = expected.to(device)
    actual = ops.decode_attention(
        q.to(device), pages.cache, pages.table, pages.lengths, _FORMAT,
        cu_query_lens=starts.to(device), return_lse=True, **pages.arguments,
    )  # fmt: skip
    return max(_relative(actual[0], out), _relative(actual[1], lse)), _HALF


def _check_workspace(device: torch.device) -> _Error:
    """The stated number of bytes is enough: the result is the same as without a workspace."""
    q = _normal(2, _Q_HEADS, _FORMAT.head_dim, seed=5).half().to(device)
    pages = _pages().to(device)
    arguments = (q, pages.cache, pages.table, pages.lengths, _FORMAT)
    size = ops.decode_workspace_bytes(
        _FORMAT, num_seqs=2, num_tokens=2, num_q_heads=_Q_HEADS, num_kv_heads=_KV_HEADS,
        max_seq_len=256, split_tokens=128, device=device,
    )  # fmt: skip
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    same: dict[str, Any] = {"split_tokens": 128, "max_seq_len": 256, **pages.arguments}
    with_it = ops.decode_attention(*arguments, workspace=workspace, **same)
    return _mismatch(with_it, ops.decode_attention(*arguments, **same).cpu()), _EXACT


def _check_gather(device: torch.device) -> _Error:
    starts = torch.tensor([0, 200, 277], dtype=torch.int32)
    expected = _pages()
    pages = expected.to(device)
    actual = ops.gather_kv(
        pages.cache, pages.table, pages.lengths, _FORMAT,
        cu_seq_lens=starts.to(device), total_tokens=277, **pages.arguments,
    )  # fmt: skip
    return max(map(_relative, actual, reference.gather_kv(
        expected.cache, expected.table, expected.lengths, _FORMAT,
        cu_seq_lens=starts, **expected.arguments,
    ))), _HALF  # fmt: skip


def _check_merge(device: torch.device) -> _Error:
    out_a, out_b = _normal(2, 5, _Q_HEADS, 64, seed=6)
    lse_a, lse_b = _normal(2, 5, _Q_HEADS, seed=7)
    parts = (out_a.half(), lse_a, out_b.half(), lse_b)
    actual = ops.merge_states(*(part.to(device) for part in parts))
    return max(map(_relative, actual, reference.merge_states(*parts))), _HALF


_CHECKS: dict[str, Callable[[torch.device], _Error]] = {
    "hadamard_transform": _check_hadamard,
    "variance_normalize": _check_normalize,
    "pack_bits": _check_pack,
    "unpack_bits": _check_unpack,
    "quantize_tiles": _check_quantize,
    "dequantize_tiles": _check_dequantize,
    "unpack_records": _check_unpack_records,
    "pack_records": _check_pack_records,
    "append_kv": _check_append,
    "seal_blocks": _check_seal,
    "decode_attention": _check_attention,
    "decode_workspace_bytes": _check_workspace,
    "gather_kv": _check_gather,
    "merge_states": _check_merge,
}
