"""The reference against independent arithmetic: numpy and Python loops that share nothing with
it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import gaussian, relative_error
from torch import Tensor

from kvarn import CanonicalRecords, Format, _host, reference

# --------------------------------------------------------------------------------------------------
# Rotation and normalization


@pytest.mark.parametrize("dim", [1, 2, 16, 64, 512])
def test_hadamard_matrix(dim):
    """Entry (i, j) is (-1)^popcount(i & j)."""
    expected = [[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    assert reference.hadamard_matrix(dim).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_hadamard_transform(dtype):
    x = gaussian(2, 3, 64).to(dtype)
    out = reference.hadamard_transform(x)
    assert out.dtype == dtype
    sign = np.array([[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    expected = torch.from_numpy(x.double().numpy() @ sign / 8)
    tolerance = {
        torch.float16: 1e-3,
        torch.bfloat16: 1e-2,
        torch.float32: 1e-6,
        torch.float64: 1e-14,
    }
    assert relative_error(out, expected) < tolerance[dtype]
    scaled = reference.hadamard_transform(x, scale=2.0)
    assert relative_error(scaled, 16 * expected) < tolerance[dtype]


def naive_sinkhorn(t: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of the paper for one tile, written down one after the other."""

    def imbalance(x: np.ndarray) -> float:
        columns, rows = x.std(0, ddof=1), x.std(1, ddof=1)
        return columns.max() / max(columns.min(), 1e-8) + rows.max() / max(rows.min(), 1e-8)

    log_c, log_r, cur = np.zeros(t.shape[1]), np.zeros(t.shape[0]), t
    best = imbalance(t), np.ones(t.shape[0]), np.ones(t.shape[1])
    for _ in range(iterations):
        log_c = np.clip(log_c + np.log(np.clip(cur.std(0, ddof=1), 1e-3, 1e3)), -0.3, 10)
        cur = t / np.exp(log_c) / np.exp(log_r)[:, None]
        log_r = np.clip(log_r + np.log(np.clip(cur.std(1, ddof=1), 1e-3, 1e3)), -0.3, 10)
        cur = t / np.exp(log_c) / np.exp(log_r)[:, None]
        if imbalance(cur) <= best[0]:
            best = imbalance(cur), np.exp(log_r), np.exp(log_c)
    return best[1], best[2]


@pytest.mark.parametrize("iterations", [0, 1, 4, 16])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_variance_normalize(iterations, scale):
    t = gaussian(6, 32, 48)[:, :, 0].double() * scale
    t[:, 3] *= 50
    t[:, :, 4] *= 30
    balanced, rows, cols = reference.variance_normalize(t, iterations=iterations)
    for i in range(len(t)):
        r, c = naive_sinkhorn(t[i].numpy(), iterations)
        np.testing.assert_allclose(rows[i], r, rtol=1e-9)
        np.testing.assert_allclose(cols[i], c, rtol=1e-9)
    torch.testing.assert_close(balanced * rows[..., None] * cols[:, None], t)


def test_variance_normalize_leading_dimensions():
    t = gaussian(6, 16, 24)[:, :, 0]
    flat = reference.variance_normalize(t, iterations=3)
    nested = reference.variance_normalize(t.view(2, 3, 16, 24), iterations=3)
    single = reference.variance_normalize(t[4], iterations=3)
    for a, b, c in zip(flat, nested, single, strict=True):
        assert torch.equal(a, b.flatten(0, 1))
        assert torch.equal(a[4], c)


# --------------------------------------------------------------------------------------------------
# Packing and the record


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 5, 8, 64, 129])
def test_pack_bits(bits, count):
    rng = np.random.default_rng(bits * count)
    codes = rng.integers(0, 2**bits, (3, count), dtype=np.uint8)
    packed = reference.pack_bits(torch.from_numpy(codes), bits)
    assert packed.shape == (3, math.ceil(count * bits / 8))
    for row, made in zip(codes.tolist(), packed, strict=True):
        number = sum(code << i * bits for i, code in enumerate(row))
        assert bytes(made.numpy()) == number.to_bytes(len(made), "little")
    assert torch.equal(reference.unpack_bits(packed, bits, count), torch.from_numpy(codes))


def naive_code(lanes: list[list[int]], token: int, channel: int, fmt: Format, key: bool) -> int:
    """The code of (token, channel), read as the 32 lanes of a warp hold it: A operands of
    mma.m16n8k16, one 16 x 16 fragment after the other, four half2 a fragment and lane.
    ``lanes``: the 32-bit words of each lane."""
    bits = fmt.key_bits if key else fmt.value_bits
    # Which fragment, and which row and column of it.
    if key:
        fragment_row, fragment_col = (
            token // 64 * 4 + token % 8 // 2,
            channel // 32 * 2 + channel % 8 // 4,
        )
        row = token % 64 // 8 + 8 * (token % 2)
        col = 2 * (channel % 32 // 8) + channel % 2 + 8 * (channel % 4 // 2)
        fragment = fragment_row * (fmt.head_dim // 16) + fragment_col
    else:
        fragment_row, fragment_col = (
            channel // 64 * 4 + channel % 8 // 2,
            token // 64 * 4 + token % 8 // 2,
        )
        row = channel % 64 // 8 + 8 * (channel % 2)
        col = token % 64 // 8 + 8 * (token % 2)
        fragment = fragment_col * (fmt.head_dim // 16) + fragment_row
    # PTX, "Matrix Fragments for mma.m16n8k16": lane of (row, col), register and half.
    words = lanes[row % 8 * 4 + col % 8 // 2]
    index = 4 * fragment + row // 8 + 2 * (col // 8)
    half = col % 2
    if bits != 3:
        shift = index % (16 // bits) * bits + 16 * half
        return words[index // (16 // bits)] >> shift & 2**bits - 1
    unit, field = divmod(index, 16)
    if field < 15:
        return words[3 * unit + field // 5] >> (field % 5 * 3 + 16 * half) & 7
    return sum((words[3 * unit + k] >> (15 + 16 * half) & 1) << k for k in range(3))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group", "head_dim"), [(64, 64), (128, 64), (64, 128), (128, 256)])
def test_fragment_order(bits, group, head_dim):
    fmt = Format(f"kvarn_k{bits}v{bits}_g{group}", head_dim=head_dim)
    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (group, head_dim), dtype=np.uint8))
    for key in (True, False):
        tile = reference.pack_codes(codes, bits, key)
        assert tile.numel() == group * head_dim * bits // 8
        # 512 bytes hold 16 of every lane.
        chunks = np.frombuffer(bytes(tile.numpy()), "<u4").reshape(-1, 32, 4)
        lanes = chunks.transpose(1, 0, 2).reshape(32, -1).tolist()
        read = [
            [naive_code(lanes, token, channel, fmt, key) for channel in range(head_dim)]
            for token in range(group)
        ]
        assert read == codes.tolist()


def random_canonical(fmt: Format, tiles: int, heads: int) -> CanonicalRecords:
    generator = torch.Generator().manual_seed(0)
    group, dim = fmt.group, fmt.head_dim

    def codes(bits: int, *shape: int) -> Tensor:
        high = 2**bits
        return torch.randint(high, (tiles, heads, *shape), generator=generator, dtype=torch.uint8)

    def scales(count: int) -> Tensor:
        return torch.randn(tiles, heads, count, generator=generator).half()

    return CanonicalRecords(
        codes(fmt.key_bits, dim, group), scales(dim), scales(dim), scales(group),
        codes(fmt.value_bits, group, dim), scales(group), scales(group), scales(dim),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["kvarn_k4v2_g128", "kvarn_k3v8_g64"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_records(name, head_dim):
    """Fields in order, and unpack is the inverse of pack."""
    fmt = Format(name, head_dim=head_dim)
    canonical = random_canonical(fmt, 2, 3)
    records = reference.pack_records(canonical, fmt)
    assert records.shape == fmt.cache_shape(2, 3)
    for a, b in zip(reference.unpack_records(records, fmt), canonical, strict=True):
        assert torch.equal(a, b)
    record = bytes(records[1, 2].numpy())
    at = fmt.group * head_dim * fmt.key_bits // 8
    for field in ("key_channel_scale", "key_zero_point", "key_token_scale"):
        expected = getattr(canonical, field)[1, 2].numpy().astype("<f2").tobytes()
        assert record[at : at + len(expected)] == expected
        at += len(expected)
    at += fmt.group * head_dim * fmt.value_bits // 8
    for field in ("value_token_scale", "value_zero_point", "value_channel_scale"):
        expected = getattr(canonical, field)[1, 2].numpy().astype("<f2").tobytes()
        assert record[at : at + len(expected)] == expected
        at += len(expected)
    assert at == len(record)


FORMAT_PAGE = Path(__file__).parents[1] / "docs" / "format.md"


def test_format_page_example():
    """The worked example of docs/format.md, which is Python with assertions."""
    blocks = re.findall(r"```python\n(.*?)```", FORMAT_PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], str(FORMAT_PAGE), "exec"), {})


def test_format_page_sizes():
    """The table of sizes, the version, and the range factors of docs/format.md."""
    page = FORMAT_PAGE.read_text()
    rows = re.findall(r"^\| (kvarn_\w+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for name, cells in rows:
        *sizes, ratio = cells.split(" | ")
        for head_dim, size in zip((64, 128, 256, 512), sizes, strict=True):
            assert Format(name, head_dim=head_dim).record_bytes == int(size)
        assert f"{Format(name, head_dim=128).compression:.2f}" == ratio
    version = re.search(r"Format version \*\*(\d+)\*\*", page)
    assert version is not None
    assert int(version[1]) == _host.layout_version
    factors = re.findall(
        r"^   \| (\d+) \| (\.\d+) \| (\.\d+) \| (\.\d+) \| 1 \|$", page, re.MULTILINE
    )
    table = {
        int(n): dict(zip((2, 3, 4, 8), (*map(float, row), 1.0), strict=True)) for n, *row in factors
    }
    assert table == reference._RANGE_FACTOR


def test_dequantize():
    fmt = Format("kvarn_k4v2_g64", head_dim=128)
    c = random_canonical(fmt, 1, 2)
    key, value = reference.dequantize(c, fmt, rotated=True, dtype=torch.float64)
    numbers = [field.double().numpy() for field in c]
    for head, g, d in ((0, 0, 0), (1, 63, 127), (0, 5, 100), (1, 40, 2)):
        q, s, z, t = (x[0, head] for x in numbers[:4])
        assert float(key[0, g, head, d]) == pytest.approx((q[d, g] + z[d]) * s[d] * t[g], rel=1e-12)
        q, s, z, ch = (x[0, head] for x in numbers[4:])
        assert float(value[0, g, head, d]) == pytest.approx(
            (q[g, d] + z[g]) * s[g] * ch[d], rel=1e-12
        )
    back, _ = reference.dequantize(c, fmt, dtype=torch.float64)
    torch.testing.assert_close(reference.hadamard_transform(back), key)


# --------------------------------------------------------------------------------------------------
# The encoder, one value tile by hand


def naive_unbiased(t: np.ndarray, c: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and values after steps 2-6 of the unbiased fit, for one value tile [64, 64] with fp16
    column scales c."""
    n, factor = 2**bits - 1, {2: 0.65, 3: 0.86, 4: 0.955, 8: 1.0}[bits]

    def weights(c: np.ndarray) -> np.ndarray:
        w = np.minimum(c**2, 16)
        return w / w.sum()

    def codes(y: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(y), 0, n)

    def moments(x: np.ndarray, q: np.ndarray, w: np.ndarray) -> tuple[float, ...]:
        mx, mq = (w * x).sum(), (w * q).sum()
        return (
            mx,
            mq,
            *((w * a * b).sum() for a, b in ((x - mx, x - mx), (x - mx, q - mq), (q - mq, q - mq))),
        )

    w = weights(c)
    fits = []
    for row in t / c:
        s = factor * (row.max() - row.min()) / n
        z = (row.max() + row.min()) / 2 - s * n / 2
        for _ in range(2):
            q = codes((row - z) / s)
            mx, mq, xx, xq, qq = moments(row, q, w)
            s = xq / qq
            z = mx - s * mq
        fits.append((s, z, q * s + z, 1 / xx))
    y, v = np.array([f[2] for f in fits]), np.array([f[3] for f in fits])[:, None]
    ratio = (v * (t / c) * y).sum(0) / (v * y * y).sum(0)
    c = (c * np.clip(ratio, 0.5, 2)).astype(np.float16).astype(float)
    x, w = t / c, weights(c)
    rows = []
    for row, (s, z, _, _) in zip(x, fits, strict=True):
        q = codes((row - z) / s)
        mx, mq, xx, xq, qq = moments(row, q, w)
        s = xq / qq
        z = mx - s * mq
        q = codes((row - z) / s)
        mx, mq, xx, xq, qq = moments(row, q, w)
        rows.append((s, z, q, xx / xq, mx - xx / xq * mq))
    error = [
        np.clip((row - z2) / s2 - q, -1, 1) for row, (_, _, q, s2, z2) in zip(x, rows, strict=True)
    ]
    u = np.mean(error, 0)
    all_codes, values = [], []
    for row, (s, z, *_) in zip(x, rows, strict=True):
        q = codes((row - z) / s + u)
        mx, mq, xx, xq, qq = moments(row, q, w)
        all_codes.append(q)
        values.append((q * xx / xq + mx - xx / xq * mq) * c)
    return np.array(all_codes), np.array(values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unbiased_value_tile(bits):
    """All steps of the unbiased fit, in closed form, against loops over the rows."""
    fmt = Format(f"kvarn_k{bits}v{bits}_g64", head_dim=64)
    tokens = gaussian(1, 64, 64, seed=bits).double()
    t = reference.hadamard_transform(tokens)[0, :, 0].numpy()
    y = t / t.std(1, ddof=1, keepdims=True)
    ms, mu = (y**2).mean(0), y.mean(0)
    c = ((np.maximum(ms - mu**2, ms / 64) * ms) ** 0.25).astype(np.float16).astype(float)
    codes, expected = naive_unbiased(t, c, bits)
    made = reference.quantize(tokens, tokens, fmt, iterations=0, dtype=torch.float64)
    assert made.value_codes[0, 0].tolist() == codes.tolist()
    _, value = reference.dequantize(made, fmt, rotated=True, dtype=torch.float64)
    assert relative_error(value[0, :, 0], torch.from_numpy(expected)) < 1e-3  # 16-bit scales


# --------------------------------------------------------------------------------------------------
# Cache and attention


class Paged:
    """A small cache with records, staged blocks and NaN wherever nobody may look."""

    def __init__(self, fmt: Format, lengths: list[int], kv_heads: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        group, dim = fmt.group, fmt.head_dim
        counts = [-(-length // group) for length in lengths]
        blocks = sum(counts) + 2
        self.fmt, self.lengths, self.kv_heads = fmt, lengths, kv_heads
        self.cache = torch.full(fmt.cache_shape(blocks, kv_heads), 255, dtype=torch.uint8)
        self.staging = torch.full((blocks, 2, kv_heads, group, dim), math.nan, dtype=torch.float16)
        self.block_slot = torch.full((blocks,), -1, dtype=torch.int32)
        order = torch.randperm(blocks, generator=generator).tolist()
        self.table = torch.full((len(lengths), max([*counts, 1]) + 1), 10**6, dtype=torch.int32)
        #: exact and read-back keys and values of each sequence, [2, length, Hkv, D]
        self.raw: list[Tensor] = []
        self.read: list[Tensor] = []
        for b, length in enumerate(lengths):
            raw = torch.randn(2, length, kv_heads, dim, generator=generator).half()
            read = raw.double()
            for i in range(counts[b]):
                block = order.pop()
                self.table[b, i] = block
                rows = slice(i * group, min((i + 1) * group, length))
                tile = torch.full((2, group, kv_heads, dim), math.nan, dtype=torch.float16)
                tile[:, : rows.stop - rows.start] = raw[:, rows]
                if i % 2 == 1 and (i + 1) * group <= length:
                    made = reference.quantize(*tile[:, None], fmt)
                    self.cache[block] = reference.pack_records(made, fmt)[0]
                    both = reference.dequantize(made, fmt, dtype=torch.float64)
                    read[:, rows] = torch.stack([side[0] for side in both])
                else:
                    self.staging[block] = tile.transpose(1, 2)
                    self.block_slot[block] = block
            self.raw.append(raw)
            self.read.append(read)

    def attend(self, q: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return reference.decode_attention(
            q, self.cache, self.table, lengths, self.fmt,
            staging=self.staging, block_slot=self.block_slot, **options,
        )  # fmt: skip


def naive_attention(
    q: Tensor, key: Tensor, value: Tensor, position: int, *, causal: bool = True,
    window_left: int = -1, cap: float = 0.0, sink: float | None = None, scale: float | None = None,
) -> tuple[list[float], float]:  # fmt: skip
    """One query and head over the keys [length, D], with Python numbers."""
    scale = len(q) ** -0.5 if scale is None else scale
    logits, rows = [], []
    for j in range(len(key)):
        if causal and j > position or 0 <= window_left < position - j:
            continue
        score = scale * math.fsum((q * key[j]).tolist())
        logits.append(cap * math.tanh(score / cap) if cap else score)
        rows.append(value[j].tolist())
    everything = logits + ([sink] if sink is not None else [])
    if not everything:
        return [0.0] * len(q), -math.inf
    top = max(everything)
    lse = top + math.log(math.fsum(math.exp(x - top) for x in everything))
    weights = [math.exp(x - lse) for x in logits]
    out = [
        math.fsum(w * row[d] for w, row in zip(weights, rows, strict=True)) for d in range(len(q))
    ]
    return out, lse


OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window_left": 70},
    "window of one": {"window_left": 0},
    "soft cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "scale": {"sm_scale": 0.5},
    "all": {"window_left": 100, "logits_soft_cap": 3.0, "sinks": torch.ones(4), "sm_scale": 0.3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [3, 1, 0, 5]])
def test_decode_attention(name, queries):
    fmt = Format("kvarn_k4v2_g64", head_dim=64)
    paged = Paged(fmt, [130, 64, 0, 200], kv_heads=2)
    options = OPTIONS[name]
    starts = [0, *np.cumsum(queries).tolist()]
    q = torch.randn(starts[-1], 4, 64, generator=torch.Generator().manual_seed(1)).double()
    extra = {} if max(queries) == 1 else {"cu_query_lens": torch.tensor(starts)}
    out, lse = paged.attend(q, **options, **extra)
    for b, length in enumerate(paged.lengths):
        for i in range(queries[b]):
            for head in range(4):
                t = starts[b] + i
                if length == 0:
                    assert (out[t] == 0).all()
                    assert (lse[t] == -math.inf).all()
                    continue
                key, value = (side[:, head // 2] for side in paged.read[b])
                expected, expected_lse = naive_attention(
                    q[t, head], key, value, length - queries[b] + i,
                    causal=options.get("causal", True), window_left=options.get("window_left", -1),
                    cap=options.get("logits_soft_cap", 0.0), scale=options.get("sm_scale"),
                    sink=float(options["sinks"][head]) if "sinks" in options else None,
                )  # fmt: skip
                assert relative_error(out[t, head], torch.tensor(expected)) < 1e-6
                assert float(lse[t, head]) == pytest.approx(expected_lse, abs=1e-6)


def test_decode_attention_sees_nothing():
    """More queries than tokens: the first ones see no key."""
    fmt = Format("kvarn_k4v2_g64", head_dim=64)
    paged = Paged(fmt, [2], kv_heads=1)
    q = torch.randn(4, 1, 64, dtype=torch.float64)
    out, lse = paged.attend(q, cu_query_lens=torch.tensor([0, 4]))
    assert (out[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    assert out[2:].isfinite().all()
    torch.testing.assert_close(out[2, 0], paged.read[0][1, 0, 0])
    out, lse = paged.attend(q, cu_query_lens=torch.tensor([0, 4]), sinks=torch.tensor([2.0]))
    assert (out[:2] == 0).all()
    assert (lse[:2] == 2.0).all()


def test_decode_attention_nan_reaches_only_who_sees_it():
    fmt = Format("kvarn_k4v2_g64", head_dim=64)
    paged = Paged(fmt, [100], kv_heads=1)
    last = paged.table[0, 1].item()
    paged.staging[last, 1, 0, 35] = math.nan  # the value of the last token
    q = torch.randn(2, 1, 64, dtype=torch.float64)
    out, _ = paged.attend(q, cu_query_lens=torch.tensor([0, 2]))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("rotated", [False, True])
def test_gather_kv(rotated):
    fmt = Format("kvarn_k4v4_g64", head_dim=64)
    paged = Paged(fmt, [130, 0, 64, 7], kv_heads=2)
    cu_seq_lens = torch.tensor([0, 130, 130, 194, 201])
    key, value = reference.gather_kv(
        paged.cache, paged.table, torch.tensor(paged.lengths), fmt, staging=paged.staging,
        block_slot=paged.block_slot, cu_seq_lens=cu_seq_lens, rotated=rotated,
    )  # fmt: skip
    expected = torch.cat(paged.read, 1)
    if rotated:
        expected = reference.hadamard_transform(expected)
    torch.testing.assert_close(key, expected[0])
    torch.testing.assert_close(value, expected[1])


def test_append_and_seal():
    fmt = Format("kvarn_k4v2_g64", head_dim=64)
    staging = torch.full((3, 2, 2, 64, 64), -1.0, dtype=torch.float16)
    block_slot = torch.tensor([-1, 2, 0], dtype=torch.int32)
    key = torch.randn(66, 2, 64).half()
    value = torch.randn(66, 2, 64).half()
    slots = torch.cat([torch.arange(64, 128), torch.tensor([-1, 2 * 64 + 5])])
    reference.append_kv(key, value, slots, staging, block_slot, fmt)
    assert torch.equal(staging[2, 0], key[:64].transpose(0, 1))
    assert torch.equal(staging[2, 1], value[:64].transpose(0, 1))
    assert torch.equal(staging[0, 0, :, 5], key[65])
    assert int((staging != -1).sum()) == int((staging[2] != -1).sum()) + 2 * 2 * 64

    cache = torch.zeros(fmt.cache_shape(4, 2), dtype=torch.uint8)
    rest = {"fit": "minmax", "iterations": 3}
    slots, blocks = torch.tensor([2, -1, 0]), torch.tensor([3, 1, 0])
    reference.seal_blocks(staging, slots, blocks, cache, fmt, **rest, count=torch.tensor([2]))
    expected = reference.quantize_tiles(key[None, :64], value[None, :64], fmt, **rest)
    assert torch.equal(cache[3], expected[0])
    assert not cache[:3].any()


def test_merge_states():
    """Two halves of the keys make the whole; a part with LSE -inf is not read."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(3, 2, 40, generator=generator, dtype=torch.float64) * 4
    value = torch.randn(2, 40, 16, generator=generator, dtype=torch.float64)

    def attend(part: slice) -> tuple[Tensor, Tensor]:
        out = torch.einsum("thk,hkd->thd", score[..., part].softmax(-1), value[:, part])
        return out, score[..., part].logsumexp(-1)

    whole, first, second = attend(slice(None)), attend(slice(13)), attend(slice(13, None))
    for a, b in zip(reference.merge_states(*first, *second), whole, strict=True):
        torch.testing.assert_close(a, b)
    empty = torch.full_like(first[0], math.nan), torch.full_like(first[1], -math.inf)
    for a, b in zip(reference.merge_states(*empty, *whole), whole, strict=True):
        torch.testing.assert_close(a, b)
    out, lse = reference.merge_states(*empty, *empty)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
