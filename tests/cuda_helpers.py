"""What the tests of the CUDA kernels share: where, on what, and how an op is captured."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import op_calls
import torch
from torch import Tensor

from kvarn import Format

DEVICE = torch.device("cuda")
ANOTHER_DEVICE = torch.device("cpu")

#: The writing side of the cache.
OPS = (
    "hadamard_transform", "variance_normalize", "pack_bits", "unpack_bits", "quantize_tiles",
    "dequantize_tiles", "pack_records", "unpack_records", "append_kv", "seal_blocks",
)  # fmt: skip

BITS = (2, 3, 4, 8)
GROUPS = (64, 128)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Every way to choose codes: (fit, iterations).
FITS = (
    ("unbiased", 0), ("unbiased", 1), ("unbiased", 4),
    ("minmax", 0), ("minmax", 1), ("minmax", 4), ("minmax", 8),
)  # fmt: skip


def format_of(bits: tuple[int, int], group: int = 64, head_dim: int = 64) -> Format:
    return Format(f"kvarn_k{bits[0]}v{bits[1]}_g{group}", head_dim=head_dim)


def on_device(x: Any) -> Any:
    """Tensors, also those in tuples and dicts, as tensors of the GPU."""
    if isinstance(x, Tensor):
        return x.to(DEVICE)
    if isinstance(x, dict):
        return {name: on_device(value) for name, value in x.items()}
    if isinstance(x, tuple):
        parts = [on_device(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def call(op: str, *, ones: bool = False) -> op_calls.Call:
    """`op_calls.call` on the GPU."""
    return on_device(op_calls.call(op, ones=ones))


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """Made on the CPU, so that it is the same on every GPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@functools.cache
def uneven(fmt: Format, tiles: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """fp32 keys and values on the CPU whose tokens and channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, tiles, fmt.group, heads, fmt.head_dim)
    x = torch.randn(shape, generator=generator)
    x *= (0.5 * torch.randn(2, tiles, fmt.group, heads, 1, generator=generator)).exp()
    x *= (0.5 * torch.randn(2, 1, 1, heads, fmt.head_dim, generator=generator)).exp()
    return x[0], x[1]


def random_records(fmt: Format, tiles: int, heads: int, seed: int = 0) -> Tensor:
    """Any bytes make a record."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tiles, heads, fmt.record_bytes)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)


def poison(t: Tensor) -> Tensor:
    """Fills a tensor, of any strides, with bytes 0xFF: NaN, -1 or 255."""
    if t.is_floating_point():
        return t.fill_(float("nan"))
    return t.fill_(255 if t.dtype == torch.uint8 else -1)


def synchronize() -> None:
    torch.cuda.synchronize()


def captured(fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """fn as a CUDA graph: the function that replays it, and what fn returned, whose tensors every
    replay overwrites. fn runs once before it is captured."""
    warm_up(fn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn()
    return graph.replay, result


def warm_up(fn: Callable[[], Any]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)


def graph_nodes(fn: Callable[[], Any]) -> list[int]:
    """The kinds of the nodes of the graph that fn is (cuda.h, CUgraphNodeType): 0 is a kernel."""
    warm_up(fn)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = fn()
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    del result
    return kinds


def keep_busy() -> torch.cuda.Event:
    """Gives the current stream about a tenth of a second of work; the event follows it."""
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    done.record()
    return done


def other_streams(count: int) -> Iterator[torch.cuda.Stream]:
    """Streams that begin after what has been launched so far."""
    synchronize()
    for _ in range(count):
        yield torch.cuda.Stream()
