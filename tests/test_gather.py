"""gather_kv on the CPU: packed pages and staged rows -> contiguous keys and values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_cases import FORMATS, Case, offsets, row_errors
from torch import Tensor

from kvarn import Format, ops, reference

K4V2 = Format("kvarn_k4v2_g128", head_dim=64)


def gather(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.gather_kv(**case.paged, **{"cu_seq_lens": case.cu_seq_lens} | options)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f}-{f.head_dim}")
def test_fault13_every_format(fmt: Format) -> None:
    case = Case(fmt, [fmt.group + 37, 0, fmt.group], first_staged=False)
    case.lengths[2] -= 3  # a record of which the sequence has lost the end
    case.seq_lens[2] -= 3
    exact = reference.gather_kv(**case.paged, cu_seq_lens=case.cu_seq_lens)
    for rotated in (False, True):
        for result, wanted in zip(gather(case, rotated=rotated), exact, strict=True):
            assert result.dtype == torch.float32
            if rotated:
                wanted = reference.hadamard_transform(wanted)
            assert row_errors(result, wanted).max() < 1e-6


@pytest.mark.parametrize("out", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("staging", [torch.float16, torch.bfloat16, torch.float32])
def test_rounded_once(staging: torch.dtype, out: torch.dtype) -> None:
    case = Case(K4V2, [300], kv_heads=2, dtype=staging)
    for rotated in (False, True):
        exact = reference.gather_kv(**case.paged, cu_seq_lens=case.cu_seq_lens, rotated=rotated)
        for result, wanted in zip(gather(case, dtype=out, rotated=rotated), exact, strict=True):
            assert row_errors(result, wanted).max() < torch.finfo(out).eps
            # What is computed in float32 is rarely rounded to the other 16-bit neighbour; a value
            # that is rounded to 16 bits twice often is.
            if out != torch.float32:
                assert (result != wanted.to(out)).float().mean() < 1e-2
            if not rotated:
                for staged in (slice(0, 128), slice(256, 300)):
                    assert torch.equal(result[staged], wanted[staged].to(out))


def test_large_rows_rotate_without_overflow() -> None:
    # |x| * sqrt(D) beyond 65504 on the way; the same channel back.
    case = Case(K4V2, [100], dtype=torch.float16)
    slot = int(case.block_slot.max())
    case.staging[slot, :, :, :100] = 60000.0
    key, _ = gather(case, rotated=True, dtype=torch.float32)
    assert (key[:, 0, 0] - 60000.0 * 8).abs().max() < 1 and key[:, 0, 1:].abs().max() < 1


def test_fault08_every_length() -> None:
    # One sequence of each length 1..300, in one call.
    group, lengths = 128, list(range(301))
    case = Case(K4V2, [3 * group], first_staged=False, staged=(1,))  # record, staged, record
    exact = reference.gather_kv(**case.paged, cu_seq_lens=case.cu_seq_lens)
    table = case.block_table[:, :3].expand(301, 3).clone()
    for length in lengths:
        table[length, -(-length // group) :] = -1
    starts = offsets([n + 1 for n in lengths])  # a row between the sequences
    total = int(starts[-1])
    out = (torch.full((total, 1, 64), math.nan), torch.full((total, 1, 64), math.nan))
    ops.gather_kv(
        case.cache, table, torch.tensor(lengths), K4V2, staging=case.staging,
        block_slot=case.block_slot, cu_seq_lens=starts, out=out,
    )  # fmt: skip
    for result, wanted in zip(out, exact, strict=True):
        for length in lengths:
            rows = result[starts[length] : starts[length + 1]]
            assert length == 0 or row_errors(rows[:length], wanted[:length]).max() < 1e-6
            assert rows[length].isnan().all()


def test_fault03_bad_token_is_read_back_as_nan_and_no_other() -> None:
    key, value = torch.randn(2, 1, 128, 2, 64).unbind()
    key[0, 5, 1, 3], value[0, 9, 0, 4] = math.nan, math.inf
    cache = ops.quantize_tiles(key, value, K4V2)
    key, value = ops.gather_kv(
        cache, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([100]), K4V2,
        cu_seq_lens=torch.tensor([0, 100]),
    )  # fmt: skip
    assert key.isnan().any(-1).nonzero().tolist() == [[5, 1]] and key[5, 1].isnan().all()
    assert value.isnan().any(-1).nonzero().tolist() == [[9, 0]] and value[9, 0].isnan().all()


def test_fault12_views() -> None:
    case = Case(K4V2, [300, 0, 77], kv_heads=2, dtype=torch.bfloat16)
    plain = gather(case)
    blocks, slots = len(case.cache), len(case.staging)
    padded = torch.full((blocks * 2 * (K4V2.record_bytes + 48) + 9,), 0xFF, dtype=torch.uint8)
    cache = padded[9:].view(blocks, 2, -1)[:, :, : K4V2.record_bytes]  # an odd address
    cache.copy_(case.cache)
    by_token = torch.full((slots, 128, 2, 2, 64), math.nan, dtype=torch.bfloat16)
    staging = by_token.permute(0, 3, 2, 1, 4)
    staging.copy_(case.staging)
    fused = torch.full((377, 3, 2, 64), 7.0, dtype=torch.bfloat16)
    result = ops.gather_kv(
        cache, case.block_table.t().contiguous().t().long(), case.seq_lens.long(), K4V2,
        staging=staging, block_slot=case.block_slot.long(), cu_seq_lens=case.cu_seq_lens.long(),
        out=(fused[:, 2], fused[:, 0]),
    )  # fmt: skip
    assert torch.equal(result[0], plain[0]) and torch.equal(result[1], plain[1])
    assert (fused[:, 1] == 7).all()


def test_fault10_70000_sequences() -> None:
    fmt = Format("kvarn_k2v2_g64", head_dim=64)
    cache = ops.quantize_tiles(torch.randn(4, 64, 1, 64), torch.randn(4, 64, 1, 64), fmt)
    count = 70_000
    index = torch.arange(count)
    lens = index % 2 + 1
    starts = offsets(lens.tolist())
    key, value = ops.gather_kv(
        cache, (index % 4)[:, None], lens, fmt, cu_seq_lens=starts, dtype=torch.float32
    )
    for result, tiles in zip((key, value), ops.dequantize_tiles(cache, fmt), strict=True):
        first = result[starts[:-1].long(), 0]
        torch.testing.assert_close(first, tiles.float()[index % 4, 0, 0], rtol=1e-3, atol=1e-3)


def test_fault10_addresses_beyond_2_to_the_31() -> None:
    # Virtual memory, of which only the few pages that are used come to exist.
    case = Case(K4V2, [420], kv_heads=2, dtype=torch.float16)
    plain = gather(case)
    stride = 2**31 // (len(plain[0]) - 1) + 1
    out = [torch.empty(stride * 420, dtype=torch.float16).as_strided((420, 2, 64), (stride, 64, 1))
           for _ in range(2)]  # fmt: skip
    gather(case, out=tuple(out))
    assert torch.equal(out[0], plain[0]) and torch.equal(out[1], plain[1])


def test_run_to_run_and_any_number_of_threads() -> None:
    case = Case(K4V2, [700, 3, 0, 260], kv_heads=2)
    plain, before = gather(case), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 16):
            torch.set_num_threads(count)
            for result, first in zip(gather(case), plain, strict=True):
                assert torch.equal(result, first)
    finally:
        torch.set_num_threads(before)


def test_table_entries_beyond_the_length_and_the_room_of_others_are_left_alone() -> None:
    case = Case(K4V2, [130, 5])  # the table has a column of poison
    starts = torch.tensor([2, 135, 143])
    out = (torch.full((150, 1, 64), 7.0), torch.full((150, 1, 64), 7.0))
    gather(case, cu_seq_lens=starts, out=out)
    exact = reference.gather_kv(**case.paged, cu_seq_lens=case.cu_seq_lens)
    for result, wanted in zip(out, exact, strict=True):
        rows = torch.cat([torch.arange(2, 132), torch.arange(135, 140)])
        assert row_errors(result[rows], wanted).max() < 1e-6
        others = torch.ones(150, dtype=torch.bool)
        others[rows] = False
        assert (result[others] == 7).all()
