"""decode_attention on the CPU against float64 attention over the same bytes."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import paged_cases
import pytest
import torch
import torch.nn.functional as F
from paged_cases import (
    FORMATS,
    Case,
    assert_close,
    attention64,
    expected,
    offsets,
    row_errors,
    visible,
)
from torch import Tensor

from kvarn import Format, ops, reference

K4V2 = Format("kvarn_k4v2_g128", head_dim=64)


def decode(case: Case, q: Tensor, queries: list[int] | None = None, **options: Any) -> Any:
    cu_query_lens = None if queries is None else offsets(queries)
    return ops.decode_attention(
        q, **case.paged, cu_query_lens=cu_query_lens, return_lse=True, **options
    )


def check(
    case: Case, q_heads: int, queries: list[int] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    tokens = len(case.lengths) if queries is None else sum(queries)
    q = torch.randn(tokens, q_heads, case.fmt.head_dim)
    out, lse = decode(case, q, queries, **options)
    options.pop("split_tokens", None)
    assert_close(out, lse, expected(case, q, queries, **options))
    return out, lse


@pytest.fixture
def threads() -> Any:
    """Restores the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# Numbers


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f}-{f.head_dim}")
def test_fault13_every_format(fmt: Format) -> None:
    # A record, a staged tile, and a record of which the sequence has lost the end; all else is
    # poison.
    kv_heads = 2 if fmt.head_dim <= 128 else 1
    case = Case(fmt, [fmt.group + 37, fmt.group], kv_heads=kv_heads, first_staged=False)
    case.lengths[1] -= 3
    case.seq_lens[1] -= 3
    check(case, 3 * kv_heads, [5, 2])


def test_reference_agrees_with_attention_over_gathered_tokens() -> None:
    case = Case(K4V2, [300, 1, 128], kv_heads=2)
    q = torch.randn(7, 4, 64)
    options: dict[str, Any] = {"window_left": 150, "logits_soft_cap": 3.0, "sinks": torch.randn(4)}
    out, lse = reference.decode_attention(
        q, **case.paged, cu_query_lens=offsets([4, 1, 2]), **options
    )
    exact = expected(case, q, [4, 1, 2], **options)
    assert row_errors(out, exact[0]).max() < 1e-12
    torch.testing.assert_close(lse, exact[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_16_bit_queries(dtype: torch.dtype, head_dim: int) -> None:
    # At most twice the error of 16-bit attention over the same keys and values, and the LSE of the
    # rounded queries to float32 accuracy.
    case = Case(Format("kvarn_k4v2_g128", head_dim=head_dim), [700], kv_heads=2, dtype=dtype)
    q = torch.randn(8, 8, head_dim).to(dtype)
    out, lse = decode(case, q, [8])
    exact, exact_lse = expected(case, q, [8])
    (key, value), seen = case.contents[0], visible(700, 8)
    naive = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        key.to(dtype).transpose(0, 1),
        value.to(dtype).transpose(0, 1),
        attn_mask=seen,
        enable_gqa=True,
    ).transpose(0, 1)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= 2 * (naive.double() - exact).norm()
    assert (lse - exact_lse).abs().max() < 2e-5


@pytest.mark.parametrize("staging", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("query", [torch.float16, torch.bfloat16, torch.float32])
def test_staging_and_queries_of_any_two_dtypes(query: torch.dtype, staging: torch.dtype) -> None:
    case = Case(K4V2, [300], dtype=staging)
    q = torch.randn(3, 2, 64).to(query)
    out, lse = decode(case, q, [3])
    exact, exact_lse = expected(case, q, [3])
    assert row_errors(out, exact).max() < max(2e-5, torch.finfo(query).eps)
    assert (lse - exact_lse).abs().max() < 2e-5


@pytest.mark.parametrize("bias", [10.0, 300.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_fault05_channel_biases(bits: int, bias: float) -> None:
    # Zero points far beyond the codes: their part of a score must not drown the rest.
    fmt = Format(f"kvarn_k{bits}v{bits}_g128", head_dim=64)
    key, value = torch.randn(2, 4, 128, 1, 64).unbind()
    key[..., :4] += bias
    value[..., 7] += bias
    cache = ops.quantize_tiles(key, value, fmt)
    q, table, lens = torch.randn(1, 4, 64), torch.arange(4)[None], torch.tensor([500])
    out, lse = ops.decode_attention(q, cache, table, lens, fmt, return_lse=True)
    assert_close(out, lse, reference.decode_attention(q, cache, table, lens, fmt))


@pytest.mark.parametrize("size", [1e4, -1e4, 1e5, -1e5])
@pytest.mark.parametrize("causal", [True, False])
def test_fault04_large_logits(size: float, causal: bool) -> None:
    # Logits of `size` times the tokens' own keys, all of one sign in the first channel: differences
    # of 1e4 between neighbours, no infinity minus infinity.
    fmt = K4V2
    key = torch.randn(1, 128, 1, 64) * 0.1
    key[..., 0] = torch.linspace(0.5, 1.0, 128)[None, :, None]
    value = torch.randn(1, 128, 1, 64)
    cache = ops.quantize_tiles(key, value, fmt)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([128], dtype=torch.int32)
    q = torch.zeros(4, 2, 64)
    q[..., 0] = size
    call: dict[str, Any] = {
        "cu_query_lens": offsets([4]), "causal": causal, "sm_scale": 1.0
    }  # fmt: skip
    out, lse = ops.decode_attention(q, cache, table, lens, fmt, **call, return_lse=True)
    exact, exact_lse = reference.decode_attention(q, cache, table, lens, fmt, **call)
    assert out.isfinite().all() and lse.isfinite().all()
    # A logit of 1e5 has an error of about 1e-2 in float32.
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


def test_fault04_nothing_to_see() -> None:
    fmt = K4V2
    case = Case(fmt, [0, 2, 128, 0, 300])
    q = torch.randn(11, 2, 64)
    queries = [1, 4, 2, 3, 1]  # the first two of the second sequence stand before its start
    out, lse = decode(case, q, queries)
    assert_close(out, lse, expected(case, q, queries))
    blind = [0, 1, 2, 7, 8, 9]
    assert (out[blind] == 0).all() and lse[blind].isneginf().all()
    seeing = [i for i in range(11) if i not in blind]
    assert lse[seeing].isfinite().all()

    sinks = torch.tensor([0.5, -math.inf])
    out, lse = decode(case, q, queries, sinks=sinks)
    assert_close(out, lse, expected(case, q, queries, sinks=sinks))
    assert (out[blind] == 0).all()
    assert lse[[0, 7, 8, 9]].isneginf().all()  # length 0
    assert (lse[[1, 2]] == sinks).all()  # only the sink


def test_fault04_infinite_sinks() -> None:
    case = Case(K4V2, [300])
    q = torch.randn(1, 2, 64)
    out, lse = decode(case, q, sinks=torch.tensor([math.inf, -math.inf]))
    plain, plain_lse = decode(case, q)
    assert (out[0, 0] == 0).all() and lse[0, 0] == math.inf
    assert torch.equal(out[0, 1], plain[0, 1]) and lse[0, 1] == plain_lse[0, 1]


def test_fault03_nan_reaches_only_those_who_see_it() -> None:
    fmt, group = K4V2, 128
    length = 3 * group + 10
    key, value = torch.randn(2, 1, length, 1, 64).unbind()
    bad_key, bad_value = [130, 385], [140, 390]  # in a record and in the staged tile, each
    key[0, bad_key, 0, 3] = math.nan
    value[0, bad_value, 0, 5] = math.inf
    cache = torch.full(fmt.cache_shape(4, 1), 0xFF, dtype=torch.uint8)
    full = (1, 3, group, 1, 64)
    cache[:3] = ops.quantize_tiles(key[:, : 3 * group].view(full)[0],
                                   value[:, : 3 * group].view(full)[0], fmt)  # fmt: skip
    staging = torch.full((1, 2, 1, group, 64), math.nan)
    staging[0, 0, 0, :10], staging[0, 1, 0, :10] = key[0, 3 * group :, 0], value[0, 3 * group :, 0]
    slots = torch.tensor([-1, -1, -1, 0], dtype=torch.int32)
    queries = 300  # in row blocks, the ones that see a bad token stand beside others that do not
    q = torch.randn(queries, 3, 64)
    table = torch.arange(4, dtype=torch.int32)[None]
    lens = torch.tensor([length], dtype=torch.int32)
    for window in (-1, 3):
        out, lse = ops.decode_attention(
            q, cache, table, lens, fmt, staging=staging, block_slot=slots, return_lse=True,
            cu_query_lens=offsets([queries]), window_left=window,
        )  # fmt: skip
        seen = visible(length, queries, window_left=window)
        assert torch.equal(lse.isnan().any(1), seen[:, bad_key].any(1))
        sees_bad = seen[:, bad_key + bad_value].any(1)
        assert torch.equal((~out.isfinite()).any(-1).any(-1), sees_bad)
        assert 0 < sees_bad.sum() < queries


def test_fault07_run_to_run() -> None:
    case = Case(K4V2, [500, 3, 1100, 128], kv_heads=2)
    q = torch.randn(30, 6, 64)
    first = decode(case, q, [8, 1, 20, 1])
    for _ in range(5):
        again = decode(case, q, [8, 1, 20, 1])
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("split", [128, 384])
def test_fault07_fixed_split_is_independent_of_the_batch(threads: None, split: int) -> None:
    lengths, queries = [1500, 1, 129, 0, 700], [3, 1, 17, 2, 1]
    case = Case(K4V2, lengths, kv_heads=2)
    q = torch.randn(sum(queries), 6, 64)
    options: dict[str, Any] = {"split_tokens": split, "window_left": 1300, "sinks": torch.randn(6)}
    together = decode(case, q, queries, **options)
    options.pop("split_tokens")
    assert_close(*together, expected(case, q, queries, **options))
    options["split_tokens"] = split
    start = offsets(queries)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        whole = decode(case, q, queries, **options)
        for b, n in enumerate(queries):
            paged = case.paged | {
                "block_table": case.block_table[b : b + 1], "seq_lens": case.seq_lens[b : b + 1]
            }  # fmt: skip
            rows = slice(int(start[b]), int(start[b]) + n)
            alone = ops.decode_attention(
                q[rows], **paged, cu_query_lens=offsets([n]), return_lse=True, **options
            )
            for x, y, z in zip(together, whole, alone, strict=True):
                assert torch.equal(x[rows], y[rows]) and torch.equal(x[rows], z)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_threads(threads: None, count: int) -> None:
    torch.set_num_threads(count)
    check(Case(K4V2, [1100, 260, 5], kv_heads=2), 6, [3, 1, 2])


# Shapes


@pytest.mark.parametrize("name", ["kvarn_k4v2_g128", "kvarn_k3v4_g64"])
def test_fault08_every_length(name: str) -> None:
    # Lengths 1..300 with 1..16 query tokens each, in one call. Tile i of every sequence holds the
    # same tokens: quantized in block i, or, if it is the last one and incomplete, raw in a page
    # that goes with the length.
    fmt = Format(name, head_dim=64)
    group, longest, most = fmt.group, 300, 16
    tiles = -(-longest // group)
    raw_key, raw_value = torch.randn(2, tiles * group, 1, 64).unbind()
    records = ops.quantize_tiles(
        raw_key.view(tiles, group, 1, 64), raw_value.view(tiles, group, 1, 64), fmt
    )
    canonical = reference.unpack_records(records, fmt)
    exact = reference.dequantize(canonical, fmt, dtype=torch.float64)
    key, value = (x.reshape(tiles * group, 1, 64) for x in exact)

    cache = torch.full(fmt.cache_shape(tiles + longest + 1, 1), 0xFF, dtype=torch.uint8)
    cache[:tiles] = records
    slots = torch.cat([torch.full((tiles,), -1), torch.arange(longest + 1)]).to(torch.int32)
    staging = torch.full((longest + 1, 2, 1, group, 64), math.nan)
    table = torch.full((longest + 1, tiles), paged_cases.POISON_BLOCK, dtype=torch.int32)
    for length in range(1, longest + 1):
        full, rest = divmod(length, group)
        table[length, :full] = torch.arange(full)
        if rest:
            table[length, full] = tiles + length
            staging[length, 0, 0, :rest] = raw_key[full * group : length, 0]
            staging[length, 1, 0, :rest] = raw_value[full * group : length, 0]

    lengths = torch.arange(1, longest + 1).repeat_interleave(most)
    queries = torch.arange(1, most + 1).repeat(longest)
    q = torch.randn(int(queries.sum()), 2, 64)
    out, lse = ops.decode_attention(
        q, cache, table[lengths], lengths.to(torch.int32), fmt, staging=staging, block_slot=slots,
        cu_query_lens=offsets(queries.tolist()), return_lse=True,
    )  # fmt: skip

    seq = torch.arange(len(lengths)).repeat_interleave(queries)
    index = torch.arange(len(q)) - offsets(queries.tolist())[:-1][seq]
    end = lengths[seq] - queries[seq] + index + 1  # tokens that a query sees
    for full in range(tiles + 1):
        rows = lengths[seq] // group == full
        if not rows.any():
            continue
        k = torch.cat([key[: full * group], raw_key[full * group : longest].double()])
        v = torch.cat([value[: full * group], raw_value[full * group : longest].double()])
        seen = torch.arange(len(k))[None] < end[rows][:, None]
        assert_close(out[rows], lse[rows], attention64(q[rows], k, v, seen))


@pytest.mark.parametrize("ratio", [*range(1, 17), 20, 32, 33, 71])
def test_fault09_every_ratio_of_heads(ratio: int) -> None:
    for kv_heads in (1, 3):
        check(Case(K4V2, [200, 31], kv_heads=kv_heads), kv_heads * ratio, [2, 1])


def test_fault10_addresses_beyond_2_to_the_31() -> None:
    # Virtual memory, of which only the few pages that are used come to exist.
    fmt = K4V2
    case = Case(fmt, [420, 300], kv_heads=2, dtype=torch.float16)
    q = torch.randn(2, 4, 64, dtype=torch.float16)
    plain = decode(case, q)

    def spread(t: Tensor, stride: int) -> Tensor:
        """A copy whose first dimension has the given stride, in elements."""
        inner = t[0].numel()
        wide = torch.empty(stride * (len(t) - 1) + inner, dtype=t.dtype)
        copy = wide.as_strided(t.shape, (stride, *t[0].contiguous().stride()))
        return copy.copy_(t)

    used = (case.block_slot < 0) & (case.cache != 0xFF).flatten(1).any(1)
    record, page = int(used.nonzero().max()), int(case.block_slot.max())
    cache = spread(case.cache, 2**31 // record + 1)
    staging = spread(case.staging, 2**31 // page + 1)
    rows, out = spread(q, 2**31), spread(q, 2**31 + 8)
    paged = case.paged | {"cache": cache, "staging": staging}
    _, lse = ops.decode_attention(rows, **paged, out=out, return_lse=True)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_fault10_70000_sequences() -> None:
    fmt = Format("kvarn_k2v2_g64", head_dim=64)
    cache = ops.quantize_tiles(torch.randn(4, 64, 1, 64), torch.randn(4, 64, 1, 64), fmt)
    count, period = 70_000, 8
    index = torch.arange(count)
    table, lens = (index % 4)[:, None], index % period * 8 + 8
    q = torch.randn(period, 1, 64)[index % period]
    out, lse = ops.decode_attention(q, cache, table, lens, fmt, return_lse=True)
    exact, exact_lse = reference.decode_attention(
        q[:period], cache, table[:period], lens[:period], fmt
    )
    assert_close(out, lse, (exact[index % period], exact_lse[index % period]))


@pytest.mark.parametrize("split", [None, 4096])
def test_fault11_a_million_tokens(split: int | None) -> None:
    # The table repeats four blocks, so every token counts 2^11 times.
    fmt = K4V2
    cache = ops.quantize_tiles(torch.randn(4, 128, 1, 64), torch.randn(4, 128, 1, 64), fmt)
    length, period = 2**20, 512
    table = torch.arange(4, dtype=torch.int32).repeat(length // period)[None]
    q = torch.randn(1, 2, 64)
    out, lse = ops.decode_attention(
        q, cache, table, torch.tensor([length]), fmt, split_tokens=split, return_lse=True
    )
    once, once_lse = reference.decode_attention(q, cache, table[:, :4], torch.tensor([period]), fmt)
    assert_close(out, lse, (once, once_lse + math.log(length // period)))


def test_fault12_views() -> None:
    fmt = K4V2
    case = Case(fmt, [300, 0, 77], kv_heads=2, dtype=torch.bfloat16)
    tokens, q_heads = 6, 4
    fused = torch.randn(tokens, q_heads + 5, 64, dtype=torch.bfloat16)
    q = fused[:, 3 : 3 + q_heads]
    queries = [4, 1, 1]
    plain = decode(case, q.contiguous(), queries)

    blocks, slots = len(case.cache), len(case.staging)
    padded = torch.full((blocks * 2 * (fmt.record_bytes + 48) + 9,), 0xFF, dtype=torch.uint8)
    cache = padded[9:].view(blocks, 2, -1)[:, :, : fmt.record_bytes]  # an odd address
    cache.copy_(case.cache)
    by_token = torch.full((slots, 128, 2, 2, 64), math.nan, dtype=torch.bfloat16)
    staging = by_token.permute(0, 3, 2, 1, 4)  # [slots, 2, heads, G, D]
    staging.copy_(case.staging)
    table = case.block_table.t().contiguous().t().long()  # transposed, int64
    lens = torch.stack([case.seq_lens, case.seq_lens], 1)[:, 1]  # stride 2
    fused_out = torch.full((tokens, 2, q_heads, 64), 7.0, dtype=torch.bfloat16)
    lse_out = torch.full((q_heads, tokens), 7.0).t()
    out, lse = ops.decode_attention(
        q, cache, table, lens, fmt, staging=staging, block_slot=case.block_slot.long(),
        cu_query_lens=offsets(queries).long(), out=(fused_out[:, 1], lse_out), return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    assert (fused_out[:, 0] == 7).all()
    # Expanded: all sequences the same; dimensions of size 1 with any stride.
    one = ops.decode_attention(
        q[:1].expand(5, -1, -1), case.cache, case.block_table[:1].expand(5, -1),
        case.seq_lens[:1].expand(5), fmt, staging=case.staging, block_slot=case.block_slot,
    )  # fmt: skip
    strange = q[:1].as_strided((1, q_heads, 64), (3, 64, 1), q[:1].storage_offset())
    alone = ops.decode_attention(
        strange, case.cache, case.block_table[:1].as_strided((1, 3), (12345, 1)),
        case.seq_lens[:1].as_strided((1,), (999,)), fmt, staging=case.staging,
        block_slot=case.block_slot,
    )  # fmt: skip
    for row in one:
        torch.testing.assert_close(row, alone[0], rtol=1e-2, atol=1e-3)


# Life of a block


def test_fault15_query_tokens_alternate_from_step_to_step() -> None:
    # Verify steps of 1..16 tokens over a growing sequence, in which a rejected draft is
    # overwritten: the same as one token at a time.
    fmt, group, length = K4V2, 128, 290
    key, value = torch.randn(2, length, 1, 64).unbind()
    q = torch.randn(length, 3, 64)
    staging = torch.full((3, 2, 1, group, 64), math.nan)
    cache = torch.full(fmt.cache_shape(3, 1), 0xFF, dtype=torch.uint8)
    slots = torch.arange(3, dtype=torch.int32)
    table = torch.arange(3, dtype=torch.int32)[None]
    position, step, parts = 0, 0, []
    while position < length:
        count = min(1 + step * 7 % 16, length - position)
        rejected = torch.arange(position, min(position + 16, length))
        ops.append_kv(
            torch.full((len(rejected), 1, 64), 1e4), torch.full((len(rejected), 1, 64), math.nan),
            rejected, staging, slots, fmt,
        )  # fmt: skip
        span = torch.arange(position, position + count)
        ops.append_kv(key[span], value[span], span, staging, slots, fmt)
        parts.append(
            ops.decode_attention(
                q[span], cache, table, torch.tensor([position + count]), fmt, staging=staging,
                block_slot=slots, cu_query_lens=offsets([count]),
            )
        )  # fmt: skip
        position, step = position + count, step + 1
    exact, _ = attention64(q, key, value, visible(length, length))
    assert row_errors(torch.cat(parts), exact).max() < 2e-5


class Prefill(NamedTuple):
    case: Case
    q: Tensor
    exact: tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    case, q = Case(K4V2, [560], staged=(0, 1)), torch.randn(560, 2, 64)
    return Prefill(case, q, expected(case, q, [560]))


@pytest.mark.parametrize("chunk", [1, 64, 127, 128, 129, 512])
def test_fault17_chunked_prefill(prefill: Prefill, chunk: int) -> None:
    # The chunk's own tokens by plain attention, what is in the cache by gather and plain attention,
    # both merged; and all of it by decode_attention.
    case, q, (exact, exact_lse) = prefill
    key, value = case.contents[0]
    length = len(key)
    starts = range(0, length, chunk) if chunk > 1 else range(length - 20, length)
    for start in starts:
        rows = q[start : start + chunk]
        end = start + len(rows)
        itself = visible(len(rows), len(rows))
        own = attention64(rows, key[start:end], value[start:end], itself)
        past = ops.gather_kv(
            **case.paged | {"seq_lens": torch.tensor([start])},
            cu_seq_lens=torch.tensor([0, start]),
        )
        before = attention64(rows, *past, torch.ones(len(rows), start, dtype=torch.bool))
        merged = ops.merge_states(*(t.float() for t in own + before))
        whole = ops.decode_attention(
            rows, **case.paged | {"seq_lens": torch.tensor([end])},
            cu_query_lens=offsets([len(rows)]), return_lse=True,
        )  # fmt: skip
        for result in (merged, whole):
            assert_close(*result, (exact[start:end], exact_lse[start:end]))


def test_fault20_two_formats_in_one_process() -> None:
    cases = [
        Case(Format(name, head_dim=dim), [300, 65], kv_heads=2)
        for name, dim in (("kvarn_k4v2_g128", 64), ("kvarn_k8v3_g64", 128))
    ]
    queries = [torch.randn(2, 4, case.fmt.head_dim) for case in cases]
    alone = [decode(case, q)[0] for case, q in zip(cases, queries, strict=True)]
    for _ in range(3):
        for case, q, before in zip(cases, queries, alone, strict=True):
            assert torch.equal(decode(case, q)[0], before)


# Options


@pytest.fixture(scope="module")
def several() -> Case:
    return Case(K4V2, [700, 3, 0, 260, 129], kv_heads=2, staged=(1,))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 1, 100, 128, 200, 1000])
def test_window(several: Case, causal: bool, window: int) -> None:
    check(several, 2, [40, 3, 1, 2, 1], causal=causal, window_left=window)


@pytest.mark.parametrize("cap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("window", [-1, 150])
@pytest.mark.parametrize("sinks", [None, torch.float32, torch.float16])
@pytest.mark.parametrize("split", [None, 128])
def test_options_together(
    several: Case, cap: float, window: int, sinks: torch.dtype | None, split: int | None
) -> None:
    options: dict[str, Any] = {"logits_soft_cap": cap, "window_left": window, "sm_scale": 0.3}
    if sinks is not None:
        options["sinks"] = torch.randn(6).to(sinks)
    if split is not None:
        options["split_tokens"] = split
    check(several, 6, [20, 3, 1, 2, 1], **options)


def test_fault26_every_option_acts() -> None:
    case = Case(K4V2, [400], kv_heads=1)
    q = torch.randn(4, 2, 64)
    plain = decode(case, q, [4])
    for option in (
        {"causal": False},
        {"sm_scale": 0.2},
        {"logits_soft_cap": 1.0},
        {"window_left": 50},
        {"sinks": torch.full((2,), 5.0)},
    ):
        out, lse = decode(case, q, [4], **option)
        assert (out - plain[0]).abs().max() > 1e-3, option
        assert (lse - plain[1]).abs().max() > 1e-3, option
    large = decode(case, q, [4], logits_soft_cap=1e5)
    torch.testing.assert_close(large, plain, rtol=1e-3, atol=1e-4)


def test_blocks_outside_the_window_are_not_read() -> None:
    # Their table entries may say anything, as may those of a sequence without query tokens.
    case = Case(K4V2, [700, 300])
    q = torch.randn(3, 2, 64)
    options: dict[str, Any] = {"window_left": 100}
    plain = decode(case, q, [3, 0], **options)
    # The 103 newest tokens are in tiles 4 and 5.
    case.block_table[0, :4] = paged_cases.POISON_BLOCK
    case.block_table[1] = -5
    again = decode(case, q, [3, 0], **options)
    assert torch.equal(plain[0], again[0]) and torch.equal(plain[1], again[1])
    with pytest.raises(RuntimeError, match="block_table must be block numbers below"):
        decode(case, q, [3, 0], window_left=200)


# Memory


def workspace_bytes(**changes: Any) -> int:
    sizes = {"num_seqs": 2, "num_q_heads": 8, "num_kv_heads": 2, "max_seq_len": 1024}
    return ops.decode_workspace_bytes(K4V2, **sizes | changes)


def test_fault23_workspace_is_enough_and_exact(threads: None) -> None:
    case = Case(K4V2, [1000, 500], kv_heads=2)
    q = torch.randn(40, 8, 64)
    exact = expected(case, q, [39, 1])
    for count, split in itertools.product((1, 2, 3, 7), (None, 128, 512)):
        torch.set_num_threads(count)
        width = case.block_table.shape[1] * 128
        needed = workspace_bytes(num_tokens=40, max_seq_len=width, split_tokens=split)
        assert (needed > 0) == (count > 1)
        memory = torch.full((needed + 256,), 171, dtype=torch.uint8)
        result = decode(case, q, [39, 1], workspace=memory[:needed], split_tokens=split)
        assert_close(*result, exact)
        assert (memory[needed:] == 171).all()
        if needed:
            with pytest.raises(RuntimeError, match=f"of at least {needed} bytes"):
                decode(case, q, [39, 1], workspace=memory[: needed - 1], split_tokens=split)


def test_fault25_workspace_does_not_grow_with_context(threads: None) -> None:
    torch.set_num_threads(2)
    assert workspace_bytes(max_seq_len=2**20) == workspace_bytes(max_seq_len=1024)
    assert workspace_bytes(num_seqs=70_000) <= 2 * 32 * 65 * 4  # 32 rows of 64 channels and an LSE
    # With a fixed split, a state per split of one block of rows and thread border.
    assert workspace_bytes(max_seq_len=2**20, split_tokens=4096) == 256 * 8 * 65 * 4
