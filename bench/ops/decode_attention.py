"""decode_attention: must read the packed cache once; the ceiling is a plain read of those bytes."""

from __future__ import annotations

import math
from typing import Any

import torch

from bench.harness import Call, input_sets
from bench.problems import Attention, Packed
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops

#: What one GPU attends with: Qwen3-8B, Qwen3-32B on two, Llama-3-70B on four. The scaling model of
#: kvarn.scaling is fitted without these cases, and compared with them.
MODELS = [{"group_size": 4, "kv_heads": 8}, {"group_size": 8, "kv_heads": 4},
          {"group_size": 8, "kv_heads": 2}]  # fmt: skip


class _Routine:
    op = "decode_attention"
    packed = True

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        if device.type == "cpu":
            return _cpu_cases()[1:2] if quick else _cpu_cases()
        return _cuda_cases()[2:3] if quick else _cuda_cases()

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        lengths = sequence_lengths(case["batch"], case["context"])
        kv_heads, count = case.get("kv_heads", 8), case["query_tokens"]
        blocks = sum(-(-length // fmt.group) for length in lengths)
        sets = input_sets(blocks * kv_heads * fmt.record_bytes, device)
        packed = Packed(fmt, lengths, kv_heads, sets, device)
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        shape = (len(lengths) * count, kv_heads * case["group_size"], fmt.head_dim)
        problem = Attention(packed, torch.randn(shape, device=device).to(dtype), count)
        out = torch.full_like(problem.q, math.nan)
        options: dict[str, Any] = {
            "max_seq_len": max(lengths),
            "split_tokens": case.get("split_tokens"),
        }
        num_bytes = packed.record_bytes
        if "staged_tiles" in case:
            options["staging"], options["block_slot"], num_bytes = packed.stage(
                case["staged_tiles"], dtype
            )
        if count > 1:
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
            options["cu_query_lens"] = starts * count

        def attend(table: torch.Tensor) -> Call:
            return lambda: ops.decode_attention(
                problem.q, packed.cache, table, packed.seq_lens, fmt, out=out, **options
            )

        calls = [attend(table) for table in packed.tables]

        def error() -> float:
            out.fill_(math.nan)
            calls[0]()
            return relative_error(out, problem.exact())

        def peer_error(result: torch.Tensor) -> float:
            calls[0]()
            return relative_error(result, out)

        return Prepared(
            calls=calls,
            error=error,
            max_error=2e-5 if dtype is torch.float32 else 2e-3,
            bytes=num_bytes,
            ceiling="read",
            flops=problem.flops,
            bytes_16bit=packed.bytes_16bit,
            problem=problem,
            peer_error=peer_error,
        )


def sequence_lengths(batch: int, context: int | str) -> list[int]:
    """``batch`` lengths; of a context "low-high" log-uniform ones, always the same."""
    if isinstance(context, int):
        return [context] * batch
    low, high = (math.log(int(end)) for end in context.split("-"))
    uniform = torch.rand(batch, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [round(math.exp(low + u * (high - low))) for u in uniform.tolist()]


def _case(batch: int, context: int | str, group_size: int = 4, head_dim: int = 128,
          query_tokens: int = 1, **more: int) -> Case:  # fmt: skip
    return {
        "batch": batch,
        "context": context,
        "group_size": group_size,
        "head_dim": head_dim,
        "query_tokens": query_tokens,
        **more,
    }


def _cpu_cases() -> list[Case]:
    return [
        *(_case(b, n) for b, n in [(1, 4096), (1, 16384), (8, 2048), (1, 65536)]),
        _case(16, "1-8192"),
        _case(1, 16384, group_size=8),
        *(_case(1, 16384, query_tokens=n) for n in (2, 4, 8)),
        *(_case(1, 16384, head_dim=d) for d in (64, 256)),
        _case(8, 2048, split_tokens=1024),
        _case(8, 2040, staged_tiles=2),
    ]


def _cuda_cases() -> list[Case]:
    shapes: list[tuple[int, int | str]] = [
        (1, 8192), (1, 32768), (1, 131072), (8, 16384), (32, 8192), (64, 16384), (128, 4096),
        (256, 2048), (64, "1-32768"), (64, "8000-8300"), (64, "16000-16384"),
    ]  # fmt: skip
    return [
        *(_case(b, n, g) for b, n in shapes for g in (4, 8)),
        *(_case(64, 3172, g) for g in (4, 8)),  # as many tokens as the ragged batch has
        *(_case(8, 16384, g, query_tokens=n) for g in (4, 8) for n in (2, 3, 4, 8, 16)),
        *(_case(64, 16384, g, query_tokens=n) for g, n in [(8, 2), (8, 4), (8, 8)]),
        *(_case(b, n, g) for b, n, g in [(64, 16384, 1), (64, 16384, 7), (64, 16384, 16)]),
        *(_case(64, 16384, head_dim=d) for d in (64, 256)),
        *(_case(64, n, staged_tiles=k) for n, k in [(8128, 1), (16320, 1), (16320, 3)]),
        *(_case(b, n, split_tokens=2048) for b, n in [(8, 16384), (64, 16384), (64, "1-32768")]),
        *(_case(32, n, **model) for n in (4096, 16384) for model in MODELS),
    ]


ROUTINE = _Routine()
