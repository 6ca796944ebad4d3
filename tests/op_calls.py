"""A valid call of every operator, by name, for tests that hold for all of them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kvarn
from kvarn import Format, _backends, ops

Call = dict[str, Any]

OPS = _backends.OPS
FMT = Format("kvarn_k4v2_g64", head_dim=64)

#: The arguments that an op writes, in place or as `out`.
WRITTEN = {"append_kv": ("staging",), "seal_blocks": ("cache",)}


def function(op: str) -> Callable[..., Any]:
    return getattr(ops, op)


def parameters(op: str) -> tuple[str, ...]:
    """The names of an op's arguments."""
    return tuple(inspect.signature(function(op)).parameters)


def call(op: str, *, ones: bool = False) -> Call:
    """Every argument of a valid call, `out` included; `ones`: sizes are 1 where they can be."""
    return copy.deepcopy(_call(op, ones))


@functools.cache
def _call(op: str, ones: bool) -> Call:
    torch.manual_seed(1)
    fmt, g, d, rb = FMT, FMT.group, FMT.head_dim, FMT.record_bytes
    n, hkv, hq, b, width, slots = (1,) * 6 if ones else (2, 2, 6, 3, 2, 4)
    t = b
    blocks = b * width
    half, u8, i32, f32 = torch.float16, torch.uint8, torch.int32, torch.float32

    def normal(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return torch.randn(shape).to(dtype)

    def records(*shape: int) -> Tensor:
        count = shape[0] * shape[1]
        packed = ops.quantize_tiles(normal(count, g, 1, d), normal(count, g, 1, d), fmt)
        return packed.view(*shape, rb)

    def paged() -> Call:
        lengths = [width * g] if ones else [width * g, g + 1, 5]
        slot = [-1] if ones else [-1, 3, 0, -1, 1, -1]
        return {
            "cache": records(blocks, hkv),
            "block_table": torch.randperm(blocks).view(b, width).to(i32),
            "seq_lens": torch.tensor(lengths, dtype=i32),
            "fmt": fmt,
            "staging": normal(slots, 2, hkv, g, d),
            "block_slot": torch.tensor(slot, dtype=i32),
        }

    if op == "hadamard_transform":
        return {"x": normal(n, 3, d, dtype=f32), "scale": 0.5, "out": torch.empty(n, 3, d)}
    if op == "variance_normalize":
        return {"tiles": normal(n, hkv, 5, 8, dtype=f32), "iterations": 3}
    if op == "pack_bits":
        codes = torch.randint(0, 8, (n, hkv, 16), dtype=u8)
        return {"codes": codes, "bits": 3, "out": torch.empty(n, hkv, 6, dtype=u8)}
    if op == "unpack_bits":
        packed = torch.randint(0, 256, (n, hkv, 6), dtype=u8)
        out = torch.empty(n, hkv, 16, dtype=u8)
        return {"packed": packed, "bits": 3, "count": 16, "out": out}
    if op == "quantize_tiles":
        return {
            "key": normal(n, g, hkv, d), "value": normal(n, g, hkv, d), "fmt": fmt,
            "fit": "unbiased", "iterations": 2, "rotated": False,
            "out": torch.empty(n, hkv, rb, dtype=u8),
        }  # fmt: skip
    if op == "dequantize_tiles":
        out = (torch.empty(n, g, hkv, d, dtype=half), torch.empty(n, g, hkv, d, dtype=half))
        return {
            "records": records(n, hkv), "fmt": fmt, "dtype": half, "rotated": False, "out": out,
        }  # fmt: skip
    if op == "unpack_records":
        return {"records": records(n, hkv), "fmt": fmt}
    if op == "pack_records":
        canonical = ops.unpack_records(records(n, hkv), fmt)
        return {"canonical": canonical, "fmt": fmt, "out": torch.empty(n, hkv, rb, dtype=u8)}
    if op == "append_kv":
        return {
            "key": normal(t, hkv, d), "value": normal(t, hkv, d),
            "slot_mapping": torch.tensor([7] if ones else [g + 5, -1, 2 * g]),
            "staging": normal(slots, 2, hkv, g, d),
            "block_slot": torch.tensor([0] if ones else [-1, 3, 0], dtype=i32), "fmt": fmt,
        }  # fmt: skip
    if op == "seal_blocks":
        return {
            "staging": normal(slots, 2, hkv, g, d),
            "slots": torch.tensor([0] if ones else [3, -1, 1, 0], dtype=i32),
            "blocks": torch.tensor([0] if ones else [5, 4, 0, 1], dtype=i32),
            "cache": records(blocks, hkv), "fmt": fmt, "fit": "minmax", "iterations": 1,
            "count": torch.tensor([1 if ones else 3], dtype=i32),
        }  # fmt: skip
    if op == "decode_attention":
        out = (torch.empty(t, hq, d, dtype=half), torch.empty(t, hq))
        return {
            "q": normal(t, hq, d), **paged(),
            "cu_query_lens": torch.arange(b + 1, dtype=i32), "causal": True, "sm_scale": 0.1,
            "logits_soft_cap": 30.0, "window_left": 90, "sinks": normal(hq, dtype=f32),
            "max_seq_len": width * g, "split_tokens": g,
            "workspace": torch.empty(1 << 24, dtype=u8), "out": out, "return_lse": True,
        }  # fmt: skip
    if op == "decode_workspace_bytes":
        return {
            "fmt": fmt, "num_seqs": b, "num_q_heads": hq, "num_kv_heads": hkv,
            "max_seq_len": width * g, "num_tokens": t, "split_tokens": g, "device": "cpu",
        }  # fmt: skip
    if op == "gather_kv":
        paged_kv = paged()
        starts = torch.zeros(b + 1, dtype=i32)
        starts[1:] = paged_kv["seq_lens"].cumsum(0)
        total = int(starts[-1])
        out = (torch.empty(total, hkv, d, dtype=half), torch.empty(total, hkv, d, dtype=half))
        return {
            **paged_kv, "cu_seq_lens": starts, "rotated": False, "total_tokens": total,
            "dtype": half, "out": out,
        }  # fmt: skip
    if op == "merge_states":
        return {
            "out_a": normal(t, hq, d), "lse_a": normal(t, hq, dtype=f32),
            "out_b": normal(t, hq, d), "lse_b": normal(t, hq, dtype=f32),
            "out": (torch.empty(t, hq, d, dtype=half), torch.empty(t, hq)),
        }  # fmt: skip
    raise KeyError(op)


def run(op: str, arguments: Call) -> tuple[Any, ...]:
    """Calls an op by the names of its arguments; returns what it wrote or returned."""
    result = function(op)(**arguments)
    written = tuple(arguments[name] for name in WRITTEN.get(op, ()))
    if result is None:
        return written
    return (*result,) if isinstance(result, tuple) else (result,)


def tensors(arguments: Call) -> dict[str, Tensor]:
    """Every tensor among the arguments; those in tuples as `name[i]`."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, tuple):
            found |= {f"{name}[{i}]": part for i, part in enumerate(value)}
    return found


def replace(arguments: Call, name: str, value: Any) -> Call:
    """The arguments with one of them exchanged; `name` may be `name[i]`, or a field of a
    named tuple, `name.field`."""
    if name.endswith("]"):
        name, index = name[:-1].split("[")
        parts = list(arguments[name])
        parts[int(index)] = value
        kind = type(arguments[name])
        return arguments | {name: kind(*parts) if hasattr(kind, "_fields") else tuple(parts)}
    if "." in name:
        name, field = name.split(".")
        return arguments | {name: arguments[name]._replace(**{field: value})}
    return arguments | {name: value}


def raw(op: str) -> Call:
    """The arguments of a valid torch.ops.kvarn call, by the names in its schema."""
    named = call(op)
    fmt = named.pop("fmt", None)
    if fmt is not None:
        named |= {
            "key_bits": fmt.key_bits, "value_bits": fmt.value_bits, "group": fmt.group,
            "head_dim": fmt.head_dim,
        }  # fmt: skip
    out = named.pop("out", None)
    if op == "hadamard_transform":
        pass
    elif op == "variance_normalize":
        *leading, rows, cols = named["tiles"].shape
        named["tiles"] = named["tiles"].flatten(0, 1)
        count = named["tiles"].shape[0]
        named |= {
            "balanced": torch.empty(count, rows, cols), "row_scale": torch.empty(count, rows),
            "col_scale": torch.empty(count, cols),
        }  # fmt: skip
    elif op == "pack_bits":
        named["packed"] = out
    elif op == "unpack_bits":
        named["codes"] = out
    elif op == "quantize_tiles":
        named["records"] = out
    elif op in ("dequantize_tiles", "gather_kv"):
        named["key"], named["value"] = out
    elif op == "unpack_records":
        canonical = ops.unpack_records(named["records"], fmt)
        named |= {k: torch.empty_like(v) for k, v in canonical._asdict().items()}
    elif op == "pack_records":
        named |= named.pop("canonical")._asdict() | {"records": out}
    elif op == "decode_attention":
        named["out"], named["lse"] = out
    elif op == "decode_workspace_bytes":
        named["like"] = torch.empty(0)
    elif op == "merge_states":
        named["out"], named["lse"] = out
    names = [a.name for a in getattr(torch.ops.kvarn, op).default._schema.arguments]
    return {name: named[name] for name in names}


#: Those that write to a tensor of the caller's.
WRITING = [op for op in OPS if op != "decode_workspace_bytes"]


def overlapping(op: str, device: str = "cpu") -> Iterator[tuple[str, str, Tensor, Call]]:
    """Raw calls in which something written lies over another tensor, all but its first 16 bytes:
    the names of both, the memory of both, the arguments."""
    overloads = getattr(torch.ops.kvarn, op)
    function = getattr(overloads, "out", overloads.default)
    plain = raw(op) | ({"out": call(op)["out"]} if function is not overloads.default else {})
    for argument in function._schema.arguments:
        written = argument.name
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for other, tensor in tensors(plain).items():
            if other == written:
                continue
            size = max(plain[written].nbytes, tensor.nbytes + 16)
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
            over = {}
            for name, start in ((other, 16), (written, 0)):
                t = plain[name]
                part = memory[start : start + t.nbytes].view(t.dtype).view(t.shape)
                over[name] = part.copy_(t)
            on_device = {n: t.to(device) for n, t in tensors(plain).items()}
            yield written, other, memory, plain | on_device | over


def call_raw(op: str, arguments: Call) -> None:
    """Calls torch.ops.kvarn.<op>, or its overload `out` if that is the one that writes."""
    overloads = getattr(torch.ops.kvarn, op)
    getattr(overloads, "out", overloads.default)(**arguments)


def canonical_names() -> tuple[str, ...]:
    return kvarn.CanonicalRecords._fields
