"""append_kv: new tokens to rows of the staging pool; the ceiling is a copy.

256 tokens are a decode step, one row in each of 256 pages; more are a chunk of a prompt, whose
tokens fill whole pages.
"""

from __future__ import annotations

import math

import torch

from bench.harness import input_sets
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops

HEADS = 8
DECODE = 256


class _Routine:
    op = "append_kv"
    packed = True

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        return [{"tokens": n, "head_dim": 128} for n in ([DECODE] if quick else [DECODE, 8192])]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        tokens, group = case["tokens"], fmt.group
        num_bytes = 2 * 2 * 2 * tokens * HEADS * fmt.head_dim
        sets = input_sets(num_bytes, device)
        if tokens <= DECODE:
            # Every set has rows of its own in the same pages.
            pages = tokens * -(-sets // group)
            place = torch.arange(sets).view(-1, 1)
            slots = (place // group * tokens + torch.arange(tokens)) * group + place % group
        else:
            pages = sets * -(-tokens // group)
            slots = torch.arange(sets).view(-1, 1) * (pages // sets * group) + torch.arange(tokens)
        slots = slots.to(device)
        shape = (pages, 2, HEADS, group, fmt.head_dim)
        staging = torch.full(shape, math.nan, dtype=torch.float16, device=device)
        block_slot = torch.randperm(pages, device=device).to(torch.int32)
        inputs = [
            torch.randn(2, tokens, HEADS, fmt.head_dim, device=device).to(torch.float16)
            for _ in range(sets)
        ]
        calls = [
            lambda kv=kv, s=s: ops.append_kv(kv[0], kv[1], s, staging, block_slot, fmt)
            for kv, s in zip(inputs, slots, strict=True)
        ]

        def error() -> float:
            calls[0]()
            page = block_slot[slots[0] // group].long()
            return relative_error(staging[page, :, :, slots[0] % group], inputs[0].transpose(0, 1))

        return Prepared(calls=calls, error=error, max_error=0.0, bytes=num_bytes, ceiling="copy")


ROUTINE = _Routine()
