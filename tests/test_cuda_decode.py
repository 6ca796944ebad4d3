"""decode_attention on CUDA: against float64 attention over the same bytes, and in graphs."""

from __future__ import annotations

import math
from typing import Any

import cuda_helpers
import op_calls
import paged_cases
import pytest
import torch
import torch.nn.functional as F
from paged_cases import FORMATS, Case, attention64, expected, offsets, row_errors, visible
from torch import Tensor

from kvarn import Format, ops, reference

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
K4V2 = Format("kvarn_k4v2_g128", head_dim=128)
ON_CUDA = [fmt for fmt in FORMATS if fmt.head_dim <= 256]
#: Query heads a KV head, query tokens of a sequence: more rows than a warp has.
MANY_ROWS = ((1, 17), (5, 4), (1, 31), (4, 8), (1, 33), (6, 8), (4, 16), (13, 5), (8, 16), (3, 70))
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 33, 71)
#: Whose usual step has a kernel of twelve warps, or one with a ring of one record a warp.
MORE_WARPS = [
    Format(*args)
    for args in [
        ("kvarn_k4v2_g128", 128), ("kvarn_k4v4_g128", 128), ("kvarn_k4v2_g128", 256),
        ("kvarn_k4v2_g128", 64), ("kvarn_k4v2_g64", 128), ("kvarn_k2v2_g128", 128),
        ("kvarn_k3v3_g128", 128),
    ]
]  # fmt: skip

#: Whose usual step has a kernel of its own with splits, and others.
SPLITS = [
    Format(*args)
    for args in [
        ("kvarn_k4v2_g128", 128), ("kvarn_k4v4_g128", 128), ("kvarn_k2v2_g128", 128),
        ("kvarn_k4v2_g64", 64), ("kvarn_k4v2_g128", 256),
    ]
]  # fmt: skip


def on_device(tree: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in tree.items()}


def decode(
    case: Case, q: Tensor, queries: list[int] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    cu_query_lens = None if queries is None else offsets(queries).to(DEVICE)
    out, lse = ops.decode_attention(
        q.to(DEVICE), **on_device(case.paged), cu_query_lens=cu_query_lens, return_lse=True,
        **on_device(options),
    )  # fmt: skip
    return out, lse


def naive16(case: Case, q: Tensor, queries: list[int], **mask: Any) -> Tensor:
    """16-bit attention over the keys and values, rounded to the dtype of q."""
    parts = []
    for rows, (key, value) in zip(q.split(queries), case.contents, strict=True):
        if len(key) == 0 or len(rows) == 0:
            parts.append(torch.zeros_like(rows))
            continue
        seen = visible(len(key), len(rows), **mask)
        out = F.scaled_dot_product_attention(
            rows.transpose(0, 1), key.to(q.dtype).transpose(0, 1),
            value.to(q.dtype).transpose(0, 1), attn_mask=seen, enable_gqa=True,
        )  # fmt: skip
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def assert_near(result: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], eps: float) -> None:
    """Rows within a few roundings of 16-bit queries and probabilities; the LSE likewise."""
    out, lse = result[0].cpu(), result[1].cpu()
    worst = row_errors(out, exact[0])
    assert worst.max() < 4 * eps, f"row {worst.argmax()}: {worst.max():.2e}"
    empty = exact[1].isneginf()
    assert torch.equal(lse.isneginf(), empty)
    difference = (lse.double() - exact[1])[~empty]
    assert difference.numel() == 0 or difference.abs().max() < 8e-3


def check(
    case: Case, q_heads: int, queries: list[int] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    tokens = len(case.lengths) if queries is None else sum(queries)
    q = torch.randn(tokens, q_heads, case.fmt.head_dim).to(case.dtype)
    result = decode(case, q, queries, **options)
    options.pop("split_tokens", None)
    exact = expected(case, q, queries, **options)
    assert_near(result, exact, torch.finfo(case.dtype).eps)
    return result


# Numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fmt", ON_CUDA, ids=lambda f: f"{f}-{f.head_dim}")
def test_fault13_every_format(fmt: Format, dtype: torch.dtype) -> None:
    # A record, a staged tile, and a record of which the sequence has lost the end; all else is
    # poison.
    case = Case(fmt, [fmt.group + 37, fmt.group], kv_heads=2, first_staged=False, dtype=dtype)
    case.lengths[1] -= 3
    case.seq_lens[1] -= 3
    check(case, 6, [5, 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["kvarn_k4v2_g128", "kvarn_k8v4_g64"])
@pytest.mark.parametrize("most", [8, 20, 40])  # query tokens
def test_twice_the_error_of_16_bit_attention(
    most: int, name: str, head_dim: int, dtype: torch.dtype
) -> None:
    case = Case(Format(name, head_dim=head_dim), [700, 64, 1000], kv_heads=2, dtype=dtype)
    queries = [most, 1, 2]
    q = torch.randn(sum(queries), 8, head_dim).to(dtype)
    out, _ = decode(case, q, queries)
    exact, _ = expected(case, q, queries)
    naive = naive16(case, q, queries)
    assert out.dtype == dtype
    assert (out.cpu().double() - exact).norm() <= 2 * (naive.double() - exact).norm()


@pytest.mark.parametrize("staging", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("query", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 7, 12, 30])
def test_staging_and_queries_of_any_two_dtypes(
    count: int, query: torch.dtype, staging: torch.dtype
) -> None:
    case = Case(K4V2, [300], dtype=staging)
    q = torch.randn(count, 2, 128).to(query)
    eps = max(torch.finfo(query).eps, torch.finfo(staging).eps)
    assert_near(decode(case, q, [count]), expected(case, q, [count]), eps)


@pytest.mark.parametrize("scale", [2.0**-12, 1.0, 2.0**12])
def test_fault02_scales_of_any_size(scale: float) -> None:
    # Keys scaled up, queries down: the same scores.
    key, value = torch.randn(2, 4, 128, 1, 128).unbind()
    q = torch.randn(1, 8, 128)
    table = torch.arange(4, dtype=torch.int32)[None]
    lens = torch.tensor([500], dtype=torch.int32)
    cache = ops.quantize_tiles(key * scale, value * scale, K4V2)
    half = (q / scale).half()
    exact, exact_lse = reference.decode_attention(half.double(), cache, table, lens, K4V2)
    out, lse = ops.decode_attention(
        half.to(DEVICE), cache.to(DEVICE), table.to(DEVICE), lens.to(DEVICE), K4V2, return_lse=True
    )
    assert row_errors(out.cpu(), exact).max() < 4e-3
    assert (lse.cpu() - exact_lse).abs().max() < 8e-3


def test_fault04_nothing_to_see() -> None:
    case = Case(K4V2, [0, 2, 128, 0, 300], dtype=torch.float16)
    q = torch.randn(11, 2, 128).half()
    queries = [1, 4, 2, 3, 1]  # the first two of the second sequence stand before its start
    blind = [0, 1, 2, 7, 8, 9]
    out, lse = decode(case, q, queries)
    assert_near((out, lse), expected(case, q, queries), 1e-3)
    assert (out[blind] == 0).all() and lse[blind].isneginf().all()
    sinks = torch.tensor([0.5, -math.inf])
    out, lse = decode(case, q, queries, sinks=sinks)
    assert_near((out, lse), expected(case, q, queries, sinks=sinks), 1e-3)
    assert (out[blind] == 0).all() and lse[[0, 7, 8, 9]].isneginf().all()
    torch.testing.assert_close(lse[[1, 2]].cpu(), sinks.expand(2, 2))  # only the sink


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [4, 16, 32])
def test_fault04_large_logits(size: float, causal: bool, queries: int) -> None:
    key = torch.randn(1, 128, 1, 128) * 0.1
    key[..., 0] = torch.linspace(0.5, 1.0, 128)[None, :, None]
    cache = ops.quantize_tiles(key, torch.randn(1, 128, 1, 128), K4V2)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([128], dtype=torch.int32)
    q = torch.zeros(queries, 2, 128, dtype=torch.float16)
    q[..., 0] = size
    call: dict[str, Any] = {"cu_query_lens": offsets([queries]), "causal": causal, "sm_scale": 1.0}
    args: dict[str, Any] = {
        "cache": cache,
        "block_table": table,
        "seq_lens": lens,
        "fmt": K4V2,
        **call,
    }
    out, lse = ops.decode_attention(q.to(DEVICE), **on_device(args), return_lse=True)
    _, exact_lse = reference.decode_attention(q, **args)
    assert out.isfinite().all() and lse.isfinite().all()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=2e-3, atol=0)


@pytest.mark.parametrize("size", [3e3, 5e3, 2e4, 6e4])
@pytest.mark.parametrize(
    ("heads", "queries", "seqs"),
    [(1, 1, 1), (4, 1, 1), (8, 1, 1), (8, 1, 400), (3, 2, 1), (16, 1, 1), (16, 1, 400), (4, 4, 1),
     (20, 1, 1), (32, 1, 1), (8, 8, 1), (71, 1, 1)],
)  # fmt: skip
@pytest.mark.parametrize("split_tokens", [None, 256])
def test_fault04_logits_whose_roundings_are_large(
    size: float, heads: int, queries: int, seqs: int, split_tokens: int | None
) -> None:
    # From 2^27 on, neighbouring fp32 numbers are 16 apart: what a reference of the exponentials is
    # rounded by must not look like growth, nor be a power of two that a probability is off by. The
    # softmax is nearly always that of one token.
    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * size).clamp(-6e4, 6e4).half()

    key, value = numbers(8, 128, 1, 128), torch.randn(8, 128, 1, 128).half()
    args: dict[str, Any] = {
        "cache": ops.quantize_tiles(key, value, K4V2),
        "block_table": torch.arange(8, dtype=torch.int32)[None],
        "seq_lens": torch.tensor([1024], dtype=torch.int32),
        "fmt": K4V2,
    }
    q = numbers(queries, heads, 128)
    exact, exact_lse = reference.decode_attention(q, **args, cu_query_lens=offsets([queries]))
    args["block_table"] = args["block_table"].repeat(seqs, 1)  # of the same rows, all of them
    args["seq_lens"] = args["seq_lens"].repeat(seqs)
    if queries > 1:
        args["cu_query_lens"] = offsets([queries])
    out, lse = ops.decode_attention(
        q.repeat(seqs, 1, 1).to(DEVICE), **on_device(args), return_lse=True,
        split_tokens=split_tokens,
    )  # fmt: skip
    assert out.isfinite().all()
    torch.testing.assert_close(lse.cpu().double(), exact_lse.repeat(seqs, 1), rtol=2e-3, atol=0)
    same = (out.cpu().double() - exact.repeat(seqs, 1, 1)).abs().amax(-1) < 0.02
    assert same.double().mean() > 0.8
    if split_tokens is not None and queries == 1:  # another kernel, or none of its own
        again = ops.decode_attention(
            q.repeat(seqs, 1, 1).to(DEVICE), **on_device(args), split_tokens=split_tokens,
            cu_query_lens=offsets([1] * seqs).to(DEVICE),
        )  # fmt: skip
        assert torch.equal(again, out)


def test_fault03_nan_reaches_only_those_who_see_it() -> None:
    fmt, group = K4V2, 128
    length = 3 * group + 10
    key, value = torch.randn(2, 1, length, 1, 128).unbind()
    bad_key, bad_value = [130, 385], [140, 390]  # in a record and in the staged tile, each
    key[0, bad_key, 0, 3] = math.nan
    value[0, bad_value, 0, 5] = math.inf
    cache = torch.full(fmt.cache_shape(4, 1), 0xFF, dtype=torch.uint8)
    full = (1, 3, group, 1, 128)
    cache[:3] = ops.quantize_tiles(key[:, : 3 * group].view(full)[0],
                                   value[:, : 3 * group].view(full)[0], fmt)  # fmt: skip
    staging = torch.full((1, 2, 1, group, 128), math.nan, dtype=torch.float16)
    staging[0, 0, 0, :10], staging[0, 1, 0, :10] = key[0, 3 * group :, 0], value[0, 3 * group :, 0]
    queries = 300  # in row blocks, the ones that see a bad token stand beside others that do not
    q = torch.randn(queries, 3, 128, dtype=torch.float16)
    args: dict[str, Any] = {
        "cache": cache, "block_table": torch.arange(4, dtype=torch.int32)[None],
        "seq_lens": torch.tensor([length], dtype=torch.int32), "fmt": fmt, "staging": staging,
        "block_slot": torch.tensor([-1, -1, -1, 0], dtype=torch.int32),
        "cu_query_lens": offsets([queries]),
    }  # fmt: skip
    for window in (-1, 3):
        out, lse = ops.decode_attention(
            q.to(DEVICE), **on_device(args), return_lse=True, window_left=window
        )
        seen = visible(length, queries, window_left=window)
        assert torch.equal(lse.cpu().isnan().any(1), seen[:, bad_key].any(1))
        sees_bad = seen[:, bad_key + bad_value].any(1)
        assert torch.equal((~out.cpu().isfinite()).any(-1).any(-1), sees_bad)
        assert 0 < sees_bad.sum() < queries


@pytest.mark.parametrize("split", [None, 128, 384])
@pytest.mark.parametrize("ratio", [3, 8, 20])
def test_fault07_run_to_run_and_batch(ratio: int, split: int | None) -> None:
    lengths, queries = [1500, 1, 129, 0, 700], [3, 1, 5, 2, 1]
    case = Case(K4V2, lengths, kv_heads=2, dtype=torch.float16)
    heads = 2 * ratio
    q = torch.randn(sum(queries), heads, 128).half()
    sinks = torch.randn(heads)
    options: dict[str, Any] = {"split_tokens": split, "window_left": 1300, "sinks": sinks}
    together = decode(case, q, queries, **options)
    for _ in range(3):
        again = decode(case, q, queries, **options)
        assert torch.equal(together[0], again[0]) and torch.equal(together[1], again[1])
    if split is None:
        return
    start = offsets(queries)
    for b, n in enumerate(queries):
        rows = slice(int(start[b]), int(start[b]) + n)
        one = on_device(case.paged | {
            "block_table": case.block_table[b : b + 1], "seq_lens": case.seq_lens[b : b + 1]
        })  # fmt: skip
        alone = ops.decode_attention(
            q[rows].to(DEVICE), **one, cu_query_lens=offsets([n]).to(DEVICE), return_lse=True,
            **on_device(options),
        )  # fmt: skip
        for x, y in zip(together, alone, strict=True):
            assert torch.equal(x[rows], y)


@pytest.mark.parametrize("split", [128, 384, 2048])
@pytest.mark.parametrize("fmt", SPLITS, ids=lambda f: f"{f}-{f.head_dim}")
def test_fault07_a_usual_step_and_others(fmt: Format, split: int) -> None:
    # The usual step of some formats has a kernel of its own for splits, and what else is in the
    # batch decides whether it is one: how many query tokens others have, and the type of indices.
    lengths, kv_heads = [*range(1, 700, 53), 1024, 0, 2176, 9000, 4096, 6145], 3
    case = Case(fmt, lengths, kv_heads=kv_heads, dtype=torch.float16, staged=(1, 5))
    n = len(lengths)
    q = torch.randn(n, 4 * kv_heads, fmt.head_dim).half()
    usual = decode(case, q, split_tokens=split)
    assert_near(usual, expected(case, q, None), torch.finfo(torch.float16).eps)
    # The last sequence with other query tokens: warps with rows of a sequence of their own, or that
    # share the bytes.
    for queries in (1, 5, 16 * n):
        more = torch.cat([q[:-1], torch.randn(queries, *q.shape[1:]).half()])
        out = decode(case, more, [*[1] * (n - 1), queries], split_tokens=split)
        assert all(torch.equal(x[: n - 1], y[: n - 1]) for x, y in zip(out, usual, strict=True))
    paged = on_device({"q": q, **case.paged, "split_tokens": split})
    wide = paged | {k: paged[k].long() for k in ("block_table", "seq_lens", "block_slot")}
    out = ops.decode_attention(**wide, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(out, usual, strict=True))
    # Alone, and among so many that each warp has several splits, as they come and shuffled.
    for b in range(n):
        alone = paged | {k: paged[k][b : b + 1] for k in ("q", "block_table", "seq_lens")}
        out = ops.decode_attention(**alone, return_lse=True)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(out, usual, strict=True))
    for order in (torch.arange(n).repeat(40), torch.randint(n, (900,))):
        order = order.to(DEVICE)
        many = paged | {k: paged[k][order] for k in ("q", "block_table", "seq_lens")}
        for _ in range(2):
            out = ops.decode_attention(**many, return_lse=True)
            assert all(torch.equal(x, y[order]) for x, y in zip(out, usual, strict=True))


@pytest.mark.parametrize("fmt", SPLITS, ids=lambda f: f"{f}-{f.head_dim}")
def test_fault07_a_staged_tile_that_some_rows_do_not_see(fmt: Format) -> None:
    # Of four query tokens the last one or two see the open tile, others end in a record. How many
    # rows are worked on together is a matter of the average; what a row does not see must not
    # change its basis.
    lengths, kv_heads = [fmt.group * tiles + more for tiles in (5, 6, 7) for more in (1, 2)], 8
    n = len(lengths)
    case = Case(fmt, lengths + [100] * 3 * n, kv_heads=kv_heads, dtype=torch.float16)
    queries = [4] * n + [1] * 3 * n
    q = torch.randn(sum(queries), 4 * kv_heads, fmt.head_dim).half()
    together = decode(case, q, queries, split_tokens=4 * fmt.group)
    paged = on_device(case.paged | {"split_tokens": 4 * fmt.group})
    few = paged | {k: paged[k][:n] for k in ("block_table", "seq_lens")}
    among_themselves = ops.decode_attention(
        q[: 4 * n].to(DEVICE), **few, cu_query_lens=offsets([4] * n).to(DEVICE), return_lse=True
    )
    for x, y in zip(together, among_themselves, strict=True):
        assert torch.equal(x[: 4 * n], y)


# Shapes


@pytest.mark.parametrize(
    ("name", "heads"), [("kvarn_k4v2_g128", 2), ("kvarn_k4v2_g128", 4), ("kvarn_k3v4_g64", 2)]
)
def test_fault08_every_length(name: str, heads: int) -> None:
    # Lengths 1..300, each with 1..16 query tokens, in one call for each number of query tokens.
    fmt, longest = Format(name, head_dim=128), 300
    case = Case(fmt, list(range(1, longest + 1)), dtype=torch.float16, first_staged=False)
    for count in range(1, 17):
        check(case, heads, [count] * longest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("ratio", "tokens"), MANY_ROWS)
def test_many_rows(ratio: int, tokens: int, dtype: torch.dtype) -> None:
    # Equal and ragged ones: the kernel is chosen by the mean. A sequence is shorter than its
    # queries, one is empty.
    lengths = [700, 128, 15, 0, 1025]
    case = Case(K4V2, lengths, kv_heads=2, dtype=dtype, staged=(2,), first_staged=False)
    for queries in ([tokens] * 5, [2 * tokens, 1, tokens, 0, 2 * tokens - 1]):
        check(case, 2 * ratio, queries)
        check(case, 2 * ratio, queries, window_left=200, logits_soft_cap=20.0, causal=False)


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_rows_of_very_different_size(tokens: int) -> None:
    case = Case(K4V2, [515, 130], kv_heads=1, dtype=torch.float16)
    size = 2.0 ** -(torch.arange(2 * tokens) % 17)
    q = (torch.randn(2 * tokens, 1, 128) * size[:, None, None]).half()
    q[3] = 0
    result = decode(case, q, [tokens, tokens])
    assert_near(result, expected(case, q, [tokens, tokens]), 1e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 600])
def test_batches_of_any_size(count: int, head_dim: int) -> None:
    # Ragged, with more tiles than warps, so that items count as more than their tiles. How many
    # sequences a thread looks at depends on the count.
    fmt, kv_heads = Format("kvarn_k4v2_g128", head_dim), 4
    mean = 1200 * fmt.group // (kv_heads * count)
    lengths = [0 if i % 7 == 3 else 1 + (i * 7919 + 5) % (2 * mean) for i in range(count)]
    lengths[0] = 2 * mean
    case = Case(fmt, lengths, kv_heads=kv_heads, dtype=torch.float16)
    check(case, kv_heads)
    check(case, 8 * kv_heads, [(i + 2) % 4 for i in range(count)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first_staged", [True, False])
@pytest.mark.parametrize("fmt", MORE_WARPS, ids=lambda f: f"{f}-{f.head_dim}")
def test_batches_that_fill_the_device(fmt: Format, first_staged: bool, dtype: torch.dtype) -> None:
    # So many items that there are kernels for that. Each length from nothing on; some are long.
    lengths, kv_heads = [*range(301), *range(700, 3000, 100)], 5
    case = Case(fmt, lengths, kv_heads=kv_heads, dtype=dtype, first_staged=first_staged)
    for ratio in (3, 8):
        q = torch.randn(len(lengths), kv_heads * ratio, fmt.head_dim).to(dtype)
        result = decode(case, q)
        assert_near(result, expected(case, q, None), torch.finfo(dtype).eps)
        again = decode(case, q)
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))


@pytest.mark.parametrize(
    ("fmt", "heads"),
    [(fmt, 4) for fmt in MORE_WARPS] + [(K4V2, heads) for heads in (8, 12, 16, 32, 64)],
    ids=str,
)
def test_long_sequences_that_fill_the_device(fmt: Format, heads: int) -> None:
    # A warp has more tiles of a sequence than it looks up at once. All sequences have the same, and
    # every twentieth the same query.
    count, distinct, length = 420, 20, 17_000
    case = Case(fmt, [length], dtype=torch.float16)
    some = torch.randn(distinct, heads, fmt.head_dim).half()
    q = some.repeat(count // distinct, 1, 1)
    paged = on_device(case.paged)
    paged["block_table"] = paged["block_table"].repeat(count, 1)
    paged["seq_lens"] = paged["seq_lens"].repeat(count)
    result = ops.decode_attention(q.to(DEVICE), **paged, return_lse=True)
    exact = expected(case, some, [distinct], causal=False)
    exact = (exact[0].repeat(count // distinct, 1, 1), exact[1].repeat(count // distinct, 1))
    assert_near(result, exact, torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("staged", [None, (), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("shortest", [896, 1000, 1022])
def test_nearly_equal_lengths(shortest: int, staged: tuple[int, ...] | None, kv_heads: int) -> None:
    # Divided as if all were as long as the longest, unless they differ by an open tile. Two
    # kernels, by the number of items; one is without tokens, as rows of padding are.
    lengths = [shortest + i % 6 for i in range(50)]
    lengths[37] = 0
    case = Case(
        K4V2, lengths, kv_heads=kv_heads, dtype=torch.float16, staged=staged or (),
        first_staged=staged is not None,
    )  # fmt: skip
    check(case, 4 * kv_heads)
    check(case, kv_heads, window_left=500)
    check(case, kv_heads, [3 if length > 0 else 0 for length in lengths])


@pytest.mark.parametrize("invalid", [-1, 123_456_789, -123_456_789])
def test_blocks_of_sequences_without_queries_are_not_read(invalid: int) -> None:
    case = Case(K4V2, [700, 400, 128, 1300], kv_heads=2, dtype=torch.float16, staged=(1,))
    queries = [1, 0, 0, 3]
    q = torch.randn(4, 8, 128).half()
    exact = expected(case, q, queries)
    case.block_table[1:3] = invalid
    assert_near(decode(case, q, queries), exact, torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("kv_heads", [1, 5])
@pytest.mark.parametrize("staged", [None, (), (1,), (0, 1), (1, 2)], ids=str)
def test_staged_tiles_count_by_their_bytes(staged: tuple[int, ...] | None, kv_heads: int) -> None:
    # Also where the oldest is the newest. With one head some shares are parts of such a tile.
    case = Case(
        K4V2, [*range(1, 131), *range(250, 260), *range(380, 388), 640, 700], kv_heads=kv_heads,
        dtype=torch.float16, staged=staged or (), first_staged=staged is not None,
    )  # fmt: skip
    check(case, 4 * kv_heads)


@pytest.mark.parametrize("ratio", RATIOS)
def test_fault09_every_ratio_of_heads(ratio: int) -> None:
    for kv_heads in (1, 3):
        case = Case(K4V2, [200, 31, 400], kv_heads=kv_heads, dtype=torch.float16)
        check(case, kv_heads * ratio, [2, 1, 9])
        check(case, kv_heads * ratio)


def test_fault10_addresses_beyond_2_to_the_31() -> None:
    case = Case(K4V2, [420, 300], kv_heads=2, dtype=torch.float16)
    q = torch.randn(2, 4, 128).half()
    plain = decode(case, q)
    paged = on_device(case.paged)

    def spread(t: Tensor, stride: int) -> Tensor:
        """A copy whose first dimension has the given stride, in elements."""
        wide = torch.empty(stride * (len(t) - 1) + t[0].numel(), dtype=t.dtype, device=t.device)
        copy = wide.as_strided(t.shape, (stride, *t[0].contiguous().stride()))
        return copy.copy_(t)

    blocks = len(case.cache)
    paged["cache"] = spread(paged["cache"], 2**32 // blocks // 16 * 16 + 16)
    paged["staging"] = spread(paged["staging"], 2**31 // len(case.staging) // 8 * 8 + 8)
    rows = spread(q.to(DEVICE), 2**31)
    out, lse = ops.decode_attention(
        rows, **paged, out=spread(q.to(DEVICE), 2**31 + 8), return_lse=True
    )
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_fault10_70000_sequences() -> None:
    fmt = Format("kvarn_k2v2_g64", head_dim=64)
    cache = ops.quantize_tiles(torch.randn(4, 64, 1, 64), torch.randn(4, 64, 1, 64), fmt)
    count, period = 70_000, 8
    index = torch.arange(count)
    table, lens = (index % 4)[:, None], index % period * 8 + 8
    q = torch.randn(period, 1, 64).half()[index % period]
    out, lse = ops.decode_attention(
        q.to(DEVICE), cache.to(DEVICE), table.to(DEVICE), lens.to(DEVICE), fmt, return_lse=True
    )
    exact, exact_lse = reference.decode_attention(
        q[:period].double(), cache, table[:period], lens[:period], fmt
    )
    assert_near((out, lse), (exact[index % period], exact_lse[index % period]), 1e-3)


@pytest.mark.parametrize(
    ("length", "q_heads", "split"),
    [(2**20, 2, None), (2**20, 2, 4096), (2**22, 8, None), (2**22, 16, None), (2**22, 32, None),
     (2**22, 64, None), (2**22, 100, None)],
)  # fmt: skip
def test_fault11_millions_of_tokens(length: int, q_heads: int, split: int | None) -> None:
    # The table repeats four blocks, so every token counts thousands of times. A warp works through
    # dozens of records, one like the other.
    cache = ops.quantize_tiles(torch.randn(4, 128, 1, 128), torch.randn(4, 128, 1, 128), K4V2)
    period = 512
    table = torch.arange(4, dtype=torch.int32).repeat(length // period)[None]
    q = torch.randn(1, q_heads, 128).half()
    out, lse = ops.decode_attention(
        q.to(DEVICE), cache.to(DEVICE), table.to(DEVICE), torch.tensor([length]).to(DEVICE), K4V2,
        split_tokens=split, return_lse=True,
    )  # fmt: skip
    once, once_lse = reference.decode_attention(
        q.double(), cache, table[:, :4], torch.tensor([period]), K4V2
    )
    assert_near((out, lse), (once, once_lse + math.log(length // period)), 1e-3)


@pytest.mark.parametrize("q_heads", [4, 16, 40])
def test_fault12_views(q_heads: int) -> None:
    fmt = K4V2
    case = Case(fmt, [300, 0, 77], kv_heads=2, dtype=torch.bfloat16)
    tokens, queries = 6, [4, 1, 1]
    fused = torch.randn(tokens, q_heads + 5, 128).bfloat16()
    plain = decode(case, fused[:, 3 : 3 + q_heads], queries)
    q = fused.to(DEVICE)[:, 3 : 3 + q_heads]
    blocks, slots = len(case.cache), len(case.staging)
    for start in (9, 32):  # an odd address, and an aligned one
        size = blocks * 2 * (fmt.record_bytes + 48) + start
        padded = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
        cache = padded[start:].view(blocks, 2, -1)[:, :, : fmt.record_bytes]
        cache.copy_(case.cache)
        by_token = torch.full((slots, 128, 2, 2, 128), math.nan).bfloat16().to(DEVICE)
        staging = by_token.permute(0, 3, 2, 1, 4)  # [slots, 2, heads, G, D]
        staging.copy_(case.staging)
        table = case.block_table.to(DEVICE).t().contiguous().t().long()  # transposed, int64
        lens = torch.stack([case.seq_lens, case.seq_lens], 1).to(DEVICE)[:, 1]  # stride 2
        fused_out = torch.full((tokens, 2, q_heads, 128), 7.0, device=DEVICE).bfloat16()
        lse_out = torch.full((q_heads, tokens), 7.0, device=DEVICE).t()
        out, lse = ops.decode_attention(
            q, cache, table, lens, fmt, staging=staging,
            block_slot=case.block_slot.to(DEVICE).long(),
            cu_query_lens=offsets(queries).to(DEVICE).long(), out=(fused_out[:, 1], lse_out),
            return_lse=True,
        )  # fmt: skip
        if q_heads == 16 and start % 16 != 0:  # not the kernel of whole records
            torch.testing.assert_close(out, plain[0], rtol=2**-7, atol=1e-3)
            torch.testing.assert_close(lse, plain[1], rtol=0, atol=1e-4)
        else:
            assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
        assert (fused_out[:, 0] == 7).all()
        odd = torch.empty(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape)
        odd.copy_(q)
        odd_out = torch.empty(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape)
        ops.decode_attention(
            odd, cache, table, lens, fmt, staging=staging,
            block_slot=case.block_slot.to(DEVICE).long(),
            cu_query_lens=offsets(queries).to(DEVICE), out=odd_out,
        )  # fmt: skip
        assert torch.equal(odd_out, out)


@pytest.mark.parametrize("chunk", [1, 64, 127, 128, 129, 512])
def test_fault17_chunked_prefill(chunk: int) -> None:
    # The chunk's own tokens by plain attention, what is in the cache by gather and plain attention,
    # both merged; and all of it by decode_attention.
    case = Case(K4V2, [560], staged=(0, 1), dtype=torch.float16)
    q = torch.randn(560, 2, 128).half()
    exact, exact_lse = expected(case, q, [560])
    key, value = case.contents[0]
    paged = on_device(case.paged)
    starts = range(0, 560, chunk) if chunk > 1 else range(540, 560)
    for start in starts:
        rows = q[start : start + chunk]
        end = start + len(rows)
        own = attention64(rows, key[start:end], value[start:end], visible(len(rows), len(rows)))
        past = ops.gather_kv(
            **paged | {"seq_lens": torch.tensor([start], device=DEVICE)},
            cu_seq_lens=torch.tensor([0, start], device=DEVICE), total_tokens=start,
        )  # fmt: skip
        everything = torch.ones(len(rows), start, dtype=torch.bool)
        before = attention64(rows, past[0].cpu(), past[1].cpu(), everything)
        parts = [t.to(DEVICE) for t in (own[0].half(), own[1].float())]
        parts += [t.to(DEVICE) for t in (before[0].half(), before[1].float())]
        merged = ops.merge_states(*parts)
        whole = ops.decode_attention(
            rows.to(DEVICE), **paged | {"seq_lens": torch.tensor([end], device=DEVICE)},
            cu_query_lens=offsets([len(rows)]).to(DEVICE), return_lse=True,
        )  # fmt: skip
        for result in (merged, whole):
            assert_near(result, (exact[start:end], exact_lse[start:end]), 1e-3)


# Options


@pytest.fixture(scope="module")
def several() -> Case:
    return Case(K4V2, [700, 3, 0, 260, 129], kv_heads=2, staged=(1,), dtype=torch.float16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 1, 100, 128, 200, 1000])
@pytest.mark.parametrize("q_heads", [2, 6, 14])
@pytest.mark.parametrize("queries", [40, 8])  # in all row blocks of 16 rows and more; 16 at once
def test_window(several: Case, causal: bool, window: int, q_heads: int, queries: int) -> None:
    check(several, q_heads, [queries, 3, 1, 2, 1], causal=causal, window_left=window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [300, 2**31 - 4, 2**31 - 1, 2**40])
def test_fault10_a_window_beyond_the_context_is_none(window: int, causal: bool) -> None:
    # More query tokens than the first sequence is long: positions before its start.
    case = Case(K4V2, [2, 300], kv_heads=2, dtype=torch.float16)
    q = torch.randn(19, 4, 128).half()
    want = decode(case, q, [15, 4], causal=causal)
    got = decode(case, q, [15, 4], causal=causal, window_left=window)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("cap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("window", [-1, 150])
@pytest.mark.parametrize("sinks", [None, torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("split", "q_heads", "queries"),
    [(None, 4, 20), (None, 6, 20), (None, 16, 20), (None, 6, 8), (None, 10, 5), (128, 6, 20)],
)
def test_options_together(
    several: Case, cap: float, window: int, sinks: torch.dtype | None, split: int | None,
    q_heads: int, queries: int,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"logits_soft_cap": cap, "window_left": window, "sm_scale": 0.2}
    if sinks is not None:
        options["sinks"] = torch.randn(q_heads).to(sinks)
    if split is not None:
        options["split_tokens"] = split
    check(several, q_heads, [queries, 3, 1, 2, 1], **options)


def test_fault26_every_option_acts() -> None:
    case = Case(K4V2, [400], dtype=torch.float16)
    q = torch.randn(4, 2, 128).half()
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


def test_fault20_two_formats_and_streams() -> None:
    cases = [
        Case(Format(name, head_dim=dim), [300, 65], kv_heads=2, dtype=torch.float16)
        for name, dim in (("kvarn_k4v2_g128", 128), ("kvarn_k8v3_g64", 64))
    ]
    queries = [torch.randn(2, 4, case.fmt.head_dim).half() for case in cases]
    alone = [decode(case, q)[0] for case, q in zip(cases, queries, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(3):
        results = []
        for case, q, stream in zip(cases, queries, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(decode(case, q)[0])
        torch.cuda.synchronize()
        for result, before in zip(results, alone, strict=True):
            assert torch.equal(result, before)


# Execution


@pytest.mark.parametrize("op", ["decode_attention", "gather_kv", "merge_states"])
def test_opcheck(op: str) -> None:
    arguments = cuda_helpers.on_device(op_calls.raw(op))
    if "workspace" in arguments:
        arguments["workspace"] = None  # opcheck would compare what is left in it
    overload = getattr(torch.ops.kvarn, op).default
    results = torch.library.opcheck(overload, tuple(arguments.values()))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("split", [None, 256])
@pytest.mark.parametrize("q_heads", [16, 64, 128])
def test_fault21_graph_equals_eager(q_heads: int, split: int | None) -> None:
    # Captured for four rows; replayed with other lengths, blocks and queries, and with fewer live
    # rows, whose table entries are then out of range.
    case = Case(K4V2, [900, 300, 129, 1], kv_heads=2, dtype=torch.float16, staged=(1,))
    other = Case(K4V2, [128, 1000, 5, 640], kv_heads=2, dtype=torch.float16, seed=1)
    q = torch.randn(4, q_heads, 128).half().to(DEVICE)
    width = max(case.block_table.shape[1], other.block_table.shape[1])
    blocks = max(len(case.cache), len(other.cache))
    slots = max(len(case.staging), len(other.staging))
    cache = torch.zeros(blocks, *case.cache.shape[1:], dtype=torch.uint8, device=DEVICE)
    staging = torch.zeros(slots, *case.staging.shape[1:], dtype=torch.float16, device=DEVICE)
    block_slot = torch.full((blocks,), -1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(4, width, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(4, dtype=torch.int32, device=DEVICE)

    def load(new: Case) -> None:
        cache[: len(new.cache)] = new.cache.to(DEVICE)
        staging[: len(new.staging)] = new.staging.to(DEVICE)
        block_slot.fill_(-1)
        block_slot[: len(new.block_slot)] = new.block_slot.to(DEVICE)
        table.fill_(paged_cases.POISON_BLOCK)
        table[:, : new.block_table.shape[1]] = new.block_table.to(DEVICE)
        lens.copy_(new.seq_lens)

    def call() -> tuple[Tensor, Tensor]:
        return ops.decode_attention(
            q, cache, table, lens, K4V2, staging=staging, block_slot=block_slot,
            split_tokens=split, return_lse=True,
        )  # fmt: skip

    load(case)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for step in range(4):
        load(case if step % 2 else other)
        q.copy_(torch.randn(4, q_heads, 128))
        if step >= 2:
            lens[2:] = 0
            table[2:] = paged_cases.POISON_BLOCK
        graph.replay()
        replayed = [t.clone() for t in captured]
        for x, y in zip(replayed, call(), strict=True):
            assert torch.equal(x, y)
        if step >= 2:
            assert (replayed[0][2:] == 0).all() and replayed[1][2:].isneginf().all()


@pytest.mark.parametrize("split", [None, 128, 512])
def test_fault23_workspace_is_enough_and_exact(split: int | None) -> None:
    case = Case(K4V2, [1000, 500], kv_heads=2, dtype=torch.float16)
    q = torch.randn(40, 8, 128).half()
    exact = expected(case, q, [39, 1])
    width = case.block_table.shape[1] * 128
    needed = ops.decode_workspace_bytes(
        K4V2, num_seqs=2, num_q_heads=8, num_kv_heads=2, num_tokens=40, max_seq_len=width,
        split_tokens=split, device=DEVICE,
    )  # fmt: skip
    assert needed > 0
    memory = torch.full((needed + 256,), 171, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):  # the second call finds what the first left
        result = decode(case, q, [39, 1], workspace=memory[:needed], split_tokens=split)
        assert_near(result, exact, 1e-3)
        assert (memory[needed:] == 171).all()
    with pytest.raises(RuntimeError, match=f"of at least {needed} bytes"):
        decode(case, q, [39, 1], workspace=memory[: needed - 1], split_tokens=split)


@pytest.mark.parametrize("split", [None, 128])
def test_fault23_one_workspace_for_graphs_and_calls_of_any_shape(split: int | None) -> None:
    # What other launches, or anyone else, left in the workspace must not be taken for parts of the
    # own result.
    cases = [Case(K4V2, lengths, kv_heads=2, dtype=torch.float16, seed=i) for i, lengths in
             enumerate(([3000], [1, 700, 2000], [128] * 40, [5000, 1]))]  # fmt: skip
    queries = [torch.randn(len(c.lengths), 8, 128).half() for c in cases]
    alone = [decode(c, q, split_tokens=split)[0] for c, q in zip(cases, queries, strict=True)]
    memory = torch.empty(16 << 20, dtype=torch.uint8, device=DEVICE)
    on_gpu = [
        on_device({"q": q, **c.paged, "workspace": memory, "split_tokens": split})
        for c, q in zip(cases, queries, strict=True)
    ]
    graphs = []
    for arguments in on_gpu:
        ops.decode_attention(**arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, ops.decode_attention(**arguments)))
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        i = int(torch.randint(len(cases), (), generator=generator))
        if step % 7 == 3:
            memory.fill_(0xFF)
        elif step % 7 == 5:
            memory.random_()
        if step % 2:
            graphs[i][0].replay()
            assert torch.equal(graphs[i][1], alone[i])
        else:
            assert torch.equal(ops.decode_attention(**on_gpu[i]), alone[i])


@pytest.mark.parametrize("q_heads", [4, 8, 12])
@pytest.mark.parametrize("tiles", [2, 5, 16, 17, 70])
def test_an_item_in_many_blocks(tiles: int, q_heads: int) -> None:
    # Of one head, each block has a tile or a few; the last one adds up what all have.
    case = Case(K4V2, [tiles * 128 - 5], kv_heads=1, dtype=torch.float16, first_staged=False)
    check(case, q_heads)
    q = torch.randn(1, q_heads, 128).half()
    first = decode(case, q)
    for _ in range(2):
        for x, y in zip(decode(case, q), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("q_heads", [3, 8, 16])
def test_fault23_items_in_many_blocks_of_a_graph(q_heads: int, head_dim: int) -> None:
    # What a replay leaves in the workspace is of other queries, and other shares: none of it may be
    # taken for new.
    fmt = Format("kvarn_k4v2_g128", head_dim=head_dim)
    case = Case(fmt, [70 * 128 - 5], kv_heads=1, dtype=torch.float16, first_staged=False)
    q = torch.randn(1, q_heads, head_dim).half().to(DEVICE)
    arguments = {"q": q, **on_device(case.paged), "return_lse": True}
    ops.decode_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.decode_attention(**arguments)
    lengths = torch.randint(1, 70 * 128 - 4, (50,), generator=torch.Generator().manual_seed(0))
    for step in range(100):
        q.copy_(torch.randn(1, q_heads, head_dim))
        arguments["seq_lens"].fill_(int(lengths[step // 2]))
        graph.replay()
        replayed = [t.clone() for t in captured]
        for x, y in zip(replayed, ops.decode_attention(**arguments), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("longest", [300, 700])
@pytest.mark.parametrize("seqs", [1, 32, 33])
def test_sequences_for_the_lanes_of_a_warp(seqs: int, longest: int) -> None:
    # Up to 32 sequences are divided by each warp for itself, more by the block.
    lengths = [1 + 7919 * (i + 1) % longest for i in range(seqs)]
    check(Case(K4V2, lengths, kv_heads=2, dtype=torch.float16), 8)
    check(Case(K4V2, [longest] * seqs, kv_heads=2, dtype=torch.float16, first_staged=False), 8)


def test_fault23_rows_come_and_go_in_a_graph() -> None:
    # A replay has the number of the launch before: no row may be left for it in the workspace.
    case = Case(K4V2, [2500, 1800], kv_heads=1, dtype=torch.float16)
    q = torch.randn(24, 4, 128).half().to(DEVICE)
    cu = offsets([1, 23]).to(DEVICE)
    arguments = {"q": q, **on_device(case.paged), "cu_query_lens": cu, "return_lse": True}
    ops.decode_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.decode_attention(**arguments)
    for first in (1, 23, 12, 24, 0, 5):
        cu.copy_(offsets([first, 24 - first]))
        q.copy_(torch.randn(24, 4, 128))
        graph.replay()
        replayed = [t.clone() for t in captured]
        for x, y in zip(replayed, ops.decode_attention(**arguments), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("split", [None, 1024])
def test_fault25_workspace_does_not_grow_with_context(split: int | None) -> None:
    sizes = [
        ops.decode_workspace_bytes(
            K4V2, num_seqs=8, num_q_heads=16, num_kv_heads=2, max_seq_len=length,
            split_tokens=split, device=DEVICE,
        )
        for length in (2**17, 2**20, 2**21)
    ]  # fmt: skip
    assert sizes[0] == sizes[1] == sizes[2]


def test_fault19_checked_mode_names_the_offender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_CHECKED", "1")
    case = Case(K4V2, [300, 64], dtype=torch.float16)
    q = torch.randn(2, 2, 128).half()
    decode(case, q)
    case.block_table[0, 1] = 10**6
    with pytest.raises(RuntimeError, match=r"block_table must be block numbers below .* at \[0, 1"):
        decode(case, q)
    case.block_table[0, 1] = case.block_table[0, 0]
    case.seq_lens[1] = -2
    with pytest.raises(RuntimeError, match="seq_lens must be from 0 to .* got -2 at index 1"):
        decode(case, q)


@pytest.mark.parametrize("window", [-1, 0, 100, 200, 2**63 - 1])
@pytest.mark.parametrize("queries", [None, [1, 1], [3, 0], [0, 140], [2, 300]])
def test_fault19_checked_mode_asks_for_what_is_read(
    monkeypatch: pytest.MonkeyPatch, queries: list[int] | None, window: int
) -> None:
    monkeypatch.setenv("KVARN_CHECKED", "1")
    case = Case(K4V2, [700, 300], dtype=torch.float16)
    counts = queries or [1, 1]
    q = torch.randn(sum(counts), 2, 128).half()
    seen = torch.zeros(case.block_table.shape, dtype=torch.bool)
    for seq, (length, count) in enumerate(zip([700, 300], counts, strict=True)):
        oldest = max(length - count - window, 0) if window >= 0 else 0
        if count:
            seen[seq, oldest // 128 : -(-length // 128)] = True
    plain = decode(case, q, queries, window_left=window)
    table = case.block_table
    table[~seen] = -7
    again = decode(case, q, queries, window_left=window)
    assert torch.equal(plain[0], again[0]) and torch.equal(plain[1], again[1])
    for seq, tile in seen.nonzero().tolist():
        block = int(table[seq, tile])
        table[seq, tile] = -7
        with pytest.raises(RuntimeError, match=rf"block_table must .* -7 at \[{seq}, {tile}\]"):
            decode(case, q, queries, window_left=window)
        table[seq, tile] = block
