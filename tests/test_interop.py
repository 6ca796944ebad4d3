"""Records of the published Triton implementations: byte by byte, and there and back."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import gaussian, log_normal, relative_error
from torch import Tensor

from kvarn import Format, ops, reference
from kvarn.formats_interop import from_triton, to_triton, triton_record_bytes

FORMATS = [
    ("kvarn_k4v2_g128", 64),
    ("kvarn_k4v2_g128", 128),
    ("kvarn_k4v4_g64", 128),
    ("kvarn_k4v4_g64", 256),
    ("kvarn_k2v8_g64", 64),
    ("kvarn_k3v3_g128", 128),
]


def triton_values(record: bytes, fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """A naive reader of one Triton record: key, value [G, D] in the rotated basis."""
    group, dim = fmt.group, fmt.head_dim
    position = 0

    def codes(rows: int, columns: int, bits: int) -> list[list[int]]:
        nonlocal position
        out = []
        for _ in range(rows):
            size = columns * bits // 8
            number = int.from_bytes(record[position : position + size], "little")
            position += size
            out.append([number >> i * bits & 2**bits - 1 for i in range(columns)])
        return out

    def halves(count: int) -> np.ndarray:
        nonlocal position
        values = struct.unpack_from(f"<{count}e", record, position)
        position += 2 * count
        return np.array(values)

    key_codes = np.array(codes(dim, group, fmt.key_bits))
    scale, offset, token_scale = halves(dim), halves(dim), halves(group)
    key = (key_codes * scale[:, None] + offset[:, None]) * token_scale
    value_codes = np.array(codes(group, dim, fmt.value_bits))
    channel_scale, scale, offset = halves(dim), halves(group), halves(group)
    value = (value_codes * scale[:, None] + offset[:, None]) * channel_scale
    assert position == fmt.record_bytes
    return key.T, value


def random_triton_record(fmt: Format, seed: int = 0) -> bytes:
    """The bytes of a record, field by field, as those implementations write them."""
    rng = np.random.default_rng(seed)
    group, dim = fmt.group, fmt.head_dim

    def halves(low: float, high: float, count: int) -> bytes:
        return rng.uniform(low, high, count).astype("<f2").tobytes()

    fields = [
        rng.bytes(dim * group * fmt.key_bits // 8),
        halves(0.1, 2, dim), halves(-9, 9, dim), halves(0.5, 2, group),
        rng.bytes(group * dim * fmt.value_bits // 8),
        halves(0.5, 2, dim), halves(0.1, 2, group), halves(-9, 9, group),
    ]  # fmt: skip
    return b"".join(fields).ljust(triton_record_bytes(fmt), b"\0")


def as_tensor(record: bytes) -> Tensor:
    return torch.frombuffer(bytearray(record), dtype=torch.uint8)[None, None]


@pytest.mark.parametrize(
    ("name", "head_dim", "size"),
    [
        ("kvarn_k4v2_g128", 128, 13824),
        ("kvarn_k4v4_g128", 128, 17920),
        ("kvarn_k4v2_g128", 64, 7296),
        ("kvarn_k4v2_g128", 256, 256 * 128),  # 210 bytes a token, and the next power of two
        ("kvarn_k4v2_g64", 512, 512 * 64),
    ],
)
def test_triton_record_bytes(name, head_dim, size):
    assert triton_record_bytes(Format(name, head_dim=head_dim)) == size


@pytest.mark.parametrize(("name", "head_dim"), FORMATS)
def test_from_triton(name, head_dim):
    fmt = Format(name, head_dim=head_dim)
    record = random_triton_record(fmt)
    key, value = triton_values(record, fmt)
    ours = from_triton(as_tensor(record), fmt)
    assert ours.shape == (1, 1, fmt.record_bytes)
    got = ops.dequantize_tiles(ours, fmt, dtype=torch.float32, rotated=True)
    assert relative_error(got[0][0, :, 0], torch.from_numpy(key)) < 5e-4
    assert relative_error(got[1][0, :, 0], torch.from_numpy(value)) < 5e-4


@pytest.mark.parametrize(("name", "head_dim"), FORMATS)
@pytest.mark.parametrize("fit", ["minmax", "unbiased"])
def test_to_triton(name, head_dim, fit):
    fmt = Format(name, head_dim=head_dim)
    key = log_normal(2, fmt.group, head_dim).expand(-1, -1, 3, -1)
    records = ops.quantize_tiles(key, gaussian(2, fmt.group, head_dim).expand_as(key), fmt, fit=fit)
    theirs = to_triton(records, fmt)
    assert theirs.shape == (2, 3, triton_record_bytes(fmt))
    exact = reference.dequantize(ops.unpack_records(records, fmt), fmt, rotated=True)
    key, value = triton_values(bytes(theirs[1, 2].numpy()), fmt)
    assert relative_error(torch.from_numpy(key), exact[0][1, :, 2]) < 1e-3
    assert relative_error(torch.from_numpy(value), exact[1][1, :, 2]) < 1e-3
    assert not theirs[..., fmt.record_bytes :].any()


@pytest.mark.parametrize(("name", "head_dim"), FORMATS)
def test_there_and_back(name, head_dim):
    """Codes and scales survive; zero points within an ulp, since they were rounded twice."""
    fmt = Format(name, head_dim=head_dim)
    x = gaussian(3, fmt.group, head_dim)
    before = ops.quantize_tiles(x, x, fmt)
    after = from_triton(to_triton(before, fmt), fmt)
    a, b = ops.unpack_records(before, fmt), ops.unpack_records(after, fmt)
    for field in a._fields:
        if field.endswith("zero_point"):
            torch.testing.assert_close(getattr(b, field), getattr(a, field), rtol=2**-9, atol=1e-4)
        else:
            assert torch.equal(getattr(b, field), getattr(a, field)), field


def test_golden_file_fields():
    """The golden tiles hold these fields one by one."""
    path = Path(__file__).parent / "data" / "tiles.npz"
    with np.load(path) as arrays:
        for tile in ("syn_ln_D128_k4v2", "real_L14_k3v3", "real_L14_k4v2_g64"):
            get = {f: arrays[f"{tile}/{f}"] for f in ("bits", "K_hat_rot", "V_hat_rot")}
            order = ("K_codes", "K_s", "K_z", "K_c", "V_codes", "V_c", "V_s", "V_z")
            record = b"".join(arrays[f"{tile}/{field}"].tobytes() for field in order)
            group, dim = get["K_hat_rot"].shape
            fmt = Format("kvarn_k{}v{}_g{}".format(*get["bits"], group), head_dim=dim)
            got = from_triton(as_tensor(record.ljust(triton_record_bytes(fmt), b"\0")), fmt)
            key, value = ops.dequantize_tiles(got, fmt, dtype=torch.float32, rotated=True)
            assert relative_error(key[0, :, 0], torch.from_numpy(get["K_hat_rot"])) < 2e-3
            assert relative_error(value[0, :, 0], torch.from_numpy(get["V_hat_rot"])) < 2e-3


@pytest.mark.parametrize("level", [5.0, -6e4, 3e-5, 6e-8, 0.0])
@pytest.mark.parametrize("scale", [0.0, 6e-8, 1e-6])
def test_constant_rows(level, scale):
    """Rows whose scale rounds to nothing next to their offset, as constant tiles have there."""
    fmt = Format("kvarn_k4v8_g64", head_dim=64)
    record = bytearray(random_triton_record(fmt))
    k_scale = 64 * 64 * 4 // 8
    v_scale = k_scale + 2 * 3 * 64 + 64 * 64 + 2 * 64
    for row in range(32):
        for first in (k_scale, v_scale):
            struct.pack_into("<e", record, first + 2 * row, scale)
            struct.pack_into("<e", record, first + 2 * (64 + row), level)
    key, value = triton_values(bytes(record), fmt)
    ours = from_triton(as_tensor(record), fmt)
    got = ops.dequantize_tiles(ours, fmt, dtype=torch.float32, rotated=True)
    for a, b in ((got[0][0, :, 0].T, key.T), (got[1][0, :, 0], value)):
        expected = torch.from_numpy(b)[:32]
        assert ((a[:32] - expected).abs() <= 1e-3 * expected.abs() + 1e-7).all()


def test_bad_tokens_stay_bad():
    fmt = Format("kvarn_k4v2_g128", head_dim=64)
    x = gaussian(1, 128, 64)
    x[0, 5] = float("nan")
    x[0, 6] = 0
    records = ops.quantize_tiles(x, x, fmt)
    theirs = to_triton(records, fmt)
    for ours in (from_triton(theirs, fmt), records):
        for side in ops.dequantize_tiles(ours, fmt):
            assert side[0, 5].isnan().all()
            assert (side[0, 6] == 0).all()
            assert int(side.isnan().any(-1).sum()) == 1


@pytest.mark.parametrize("convert", [from_triton, to_triton])
def test_errors(convert):
    fmt = Format("kvarn_k4v2_g128", head_dim=64)
    name = convert.__name__
    with pytest.raises(
        ValueError,
        match=rf"kvarn.formats_interop.{name}: records must be uint8 \[N, Hkv, 7296\], "
        rf"got torch.uint8 \[1, 1, 7295\]",
    ):
        convert(torch.zeros(1, 1, 7295, dtype=torch.uint8), fmt)
    with pytest.raises(ValueError, match="got torch.int8"):
        convert(torch.zeros(1, 1, 7296, dtype=torch.int8), fmt)
