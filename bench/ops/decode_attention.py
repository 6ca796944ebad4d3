"""decode_attention: must read the packed cache once; the ceiling is a plain read of those bytes."""

from __future__ import annotations

import math

import torch

from bench.harness import Call, input_sets
from bench.peers import torch_sdpa
from bench.routine import Case, Prepared, relative_error
from kvarn import Format, ops, reference

KV_HEADS = 8


class _Routine:
    op = "decode_attention"

    def cases(self, device: torch.device, quick: bool) -> list[Case]:
        if device.type == "cpu":
            shapes = [(1, 4096), (1, 16384), (8, 2048), (1, 65536)]
            groups = [4]
        else:
            shapes = [
                (1, 8192),
                (1, 32768),
                (1, 131072),
                (8, 16384),
                (32, 8192),
                (64, 16384),
            ]
            shapes += [(128, 4096), (256, 2048)]
            groups = [4, 8]
        if quick:
            shapes, groups = shapes[1:2], groups[:1]
        return [
            {
                "batch": b,
                "context": n,
                "group_size": g,
                "head_dim": 128,
                "query_tokens": 1,
            }
            for b, n in shapes
            for g in groups
        ]

    def prepare(self, case: Case, fmt: Format | None, device: torch.device) -> Prepared:
        assert fmt is not None
        batch, context = case["batch"], case["context"]
        heads = KV_HEADS * case["group_size"]
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        per_seq = context // fmt.group
        num_bytes = batch * per_seq * KV_HEADS * fmt.record_bytes
        sets = input_sets(num_bytes, device)
        blocks = batch * per_seq

        # Enough distinct tiles to be random, then repeated: quantizing is not what is timed.
        tiles = min(blocks, 64)
        shape = (tiles, fmt.group, KV_HEADS, fmt.head_dim)
        key, value = (torch.randn(shape, device=device).to(torch.float16) for _ in range(2))
        records = ops.quantize_tiles(key, value, fmt)
        repeat = torch.arange(blocks * sets, device=device) % tiles
        cache = records[repeat].contiguous()
        q = torch.randn(batch, heads, fmt.head_dim, device=device).to(dtype)
        out = torch.full_like(q, math.nan)
        lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        order = torch.randperm(blocks * sets, device=device).to(torch.int32)
        tables = order.view(sets, batch, per_seq)

        def attend(table: torch.Tensor) -> Call:
            return lambda: ops.decode_attention(q, cache, table, lens, fmt, out=out)

        def contiguous() -> tuple[torch.Tensor, torch.Tensor]:
            """K and V of set 0 as [B, Hkv, S, D], for the peers: the same numbers, unpacked."""
            cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * context
            kv = ops.gather_kv(
                cache, tables[0], lens, fmt, staging=None, block_slot=None, cu_seq_lens=cu,
                out=tuple(
                    torch.empty(
                        batch * context, KV_HEADS, fmt.head_dim, dtype=dtype, device=device
                    )
                    for _ in range(2)
                ),
            )  # fmt: skip
            k, v = (
                x.view(batch, context, KV_HEADS, fmt.head_dim).transpose(1, 2).contiguous()
                for x in kv
            )
            return k, v

        def error() -> float:
            out.fill_(math.nan)
            attend(tables[0])()
            want, _ = reference.decode_attention(
                q[:1].double(), cache, tables[0][:1], lens[:1], fmt
            )
            return relative_error(out[:1], want)

        peers: dict[str, list[Call]] = {}
        peer_errors = {}
        result: list[torch.Tensor] = [out]
        key16, value16 = contiguous()
        peer_sets = min(input_sets(2 * key16.numel() * key16.element_size(), device), sets)
        copies = [(key16.clone(), value16.clone()) for _ in range(peer_sets)]
        for name, adapter in (
            (f"sdpa {str(dtype)[6:]}", torch_sdpa.decode),
            (f"sdpa {str(dtype)[6:]}, group as rows", torch_sdpa.decode_grouped),
        ):
            peers[name] = [adapter(q, k, v, result) for k, v in copies]

            def peer_error(call: Call = peers[name][0]) -> float:
                call()
                attend(tables[0])()
                return relative_error(result[0], out)

            peer_errors[name] = peer_error

        return Prepared(
            calls=[attend(table) for table in tables],
            error=error,
            max_error=2e-5 if dtype is torch.float32 else 2e-3,
            bytes=num_bytes,
            ceiling="read",
            peers=peers,
            peer_errors=peer_errors,
        )


ROUTINE = _Routine()
