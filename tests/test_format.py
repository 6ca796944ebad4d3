"""kvarn.Format: names, sizes, identity, and what it says about names that are none."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

import kvarn
from kvarn import Format

BITS = (2, 3, 4, 8)
GROUPS = (64, 128)
HEAD_DIMS = (64, 128, 256, 512)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_name_parses_to_its_numbers(head_dim: int) -> None:
    for key_bits, value_bits, group in itertools.product(BITS, BITS, GROUPS):
        name = f"kvarn_k{key_bits}v{value_bits}_g{group}"
        fmt = Format(name, head_dim=head_dim)
        assert (fmt.key_bits, fmt.value_bits) == (key_bits, value_bits)
        assert (fmt.group, fmt.head_dim) == (group, head_dim)
        assert str(fmt) == fmt.name == name
        # algorithm.md: codes, two fp16 scales a channel and one a token for K, the reverse for V.
        codes = group * head_dim * (key_bits + value_bits) // 8
        scales = 2 * (2 * head_dim + group) + 2 * (head_dim + 2 * group)
        assert fmt.record_bytes == codes + scales
        assert fmt.bytes_per_token == fmt.record_bytes / group
        assert fmt.compression == 4 * group * head_dim / fmt.record_bytes
        assert fmt.cache_shape(7, 3) == (7, 3, fmt.record_bytes)


def test_default_preset_has_the_published_size() -> None:
    fmt = Format("kvarn_k4v2_g128", head_dim=128)
    assert Format.presets()[0] == fmt.name
    assert fmt.record_bytes == 13824
    assert fmt.bytes_per_token == 108
    assert round(fmt.compression, 2) == 4.74


def test_presets_parse_and_are_distinct() -> None:
    assert len(set(Format.presets())) == len(Format.presets()) == 10
    assert [Format(name, head_dim=128).name for name in Format.presets()] == list(Format.presets())


def test_identity() -> None:
    fmt = Format("kvarn_k4v2_g128", head_dim=128)
    same = Format("kvarn_k4v2_g128", 128)
    others = [
        Format("kvarn_k4v2_g128", 64),
        Format("kvarn_k2v4_g128", 128),
        Format("kvarn_k4v2_g64", 128),
    ]
    assert fmt == same
    assert hash(fmt) == hash(same)
    assert len({fmt, same, *others}) == 4
    assert fmt != fmt.name
    assert repr(fmt) == "kvarn.Format('kvarn_k4v2_g128', head_dim=128)"
    assert pickle.loads(pickle.dumps(fmt)) == copy.deepcopy(fmt) == fmt


def test_immutable() -> None:
    fmt = Format("kvarn_k4v2_g128", head_dim=128)
    with pytest.raises(AttributeError, match="kvarn.Format is immutable: cannot set group"):
        fmt.group = 64
    with pytest.raises(AttributeError, match="kvarn.Format is immutable: cannot set extra"):
        fmt.extra = 1
    with pytest.raises(AttributeError, match="kvarn.Format is immutable: cannot delete name"):
        del fmt.name
    assert fmt == Format("kvarn_k4v2_g128", head_dim=128)


NAME_RULE = (
    "kvarn.Format: name must be kvarn_k{2,3,4,8}v{2,3,4,8}_g{64,128}, for example "
    "kvarn_k4v2_g128, kvarn_k4v4_g128, kvarn_k2v2_g128, kvarn_k3v3_g128, kvarn_k8v4_g128, "
    "kvarn_k4v2_g64, kvarn_k4v4_g64, kvarn_k2v2_g64, kvarn_k3v3_g64, kvarn_k8v4_g64, got "
)


@pytest.mark.parametrize(
    "name",
    [
        "", "kvarn_k5v2_g128", "kvarn_k4v1_g128", "kvarn_k4v2_g32", "kvarn_k4v2", "k4v2_g128",
        "kvarn_k4v2_g128 ", "kvarn_k4v2_g128\n", "KVARN_K4V2_G128", "kvarn_k-4v2_g128",
        "kvarn_k04v2_g128", "kvarn_k4v2_g٦٤", "kvarn_k44v2_g128", None, 4, b"kvarn_k4v2_g128",
    ],
)  # fmt: skip
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(ValueError) as error:
        Format(name, head_dim=128)
    assert str(error.value) == NAME_RULE + repr(name)


@pytest.mark.parametrize("head_dim", [0, -64, 32, 80, 96, 192, 1024, 128.0, "128", None, True])
def test_fault09_other_head_dims_are_refused(head_dim: object) -> None:
    with pytest.raises(ValueError) as error:
        Format("kvarn_k4v2_g128", head_dim=head_dim)
    assert str(error.value) == (
        f"kvarn.Format: head_dim must be 64, 128, 256 or 512, got {head_dim!r}"
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_supported_on_the_cpu(head_dim: int, dtype: torch.dtype) -> None:
    fmt = Format("kvarn_k3v8_g64", head_dim=head_dim)
    assert kvarn.is_supported(fmt, dtype=dtype, device="cpu") == []


def test_unsupported_says_why() -> None:
    fmt = Format("kvarn_k4v2_g128", head_dim=128)
    assert kvarn.is_supported(fmt, dtype=torch.float64, device="cpu") == [
        "dtype must be float16, bfloat16 or float32 on cpu, got torch.float64"
    ]
    assert kvarn.is_supported(fmt, dtype=torch.float16, device="mps") == [
        "kvarn has no kernels for mps"
    ]
    with pytest.raises(ValueError) as error:
        kvarn.is_supported("kvarn_k4v2_g128", dtype=torch.float16, device="cpu")
    assert str(error.value) == (
        "kvarn.is_supported: fmt must be a kvarn.Format, got 'kvarn_k4v2_g128'"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_fault27_cuda_reasons_without_cuda() -> None:
    fmt = Format("kvarn_k4v2_g128", head_dim=512)
    dtype_reason, dim_reason, device_reason = kvarn.is_supported(
        fmt, dtype=torch.float32, device="cuda"
    )
    assert dtype_reason == "dtype must be float16 or bfloat16 on cuda, got torch.float32"
    assert dim_reason == "head_dim must be at most 256 on cuda, got 512"
    assert device_reason
