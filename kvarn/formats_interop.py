"""Records of the published Triton implementations <-> records of this library.

The KVarN authors' vLLM fork and its ports keep one record per (block, KV head), G tokens to a block
(`KVarNConfig` there)::

    K codes [D, G*bk/8] | K scale [D] | K offset [D] | K token scale [G] |
    V codes [G, D*bv/8] | V channel scale [D] | V scale [G] | V offset [G] | padding

    key[g, d]   = (q[d, g] * scale[d] + offset[d]) * token_scale[g]
    value[g, d] = (q[g, d] * scale[g] + offset[g]) * channel_scale[d]

in the same rotated basis. Three things differ from a record of this library (docs/format.md):

- Codes lie in natural order, row by row, element i of a row at bit ``i*bits`` of it, low bits first
  (what `kvarn.ops.pack_bits` makes), not in fragment order.
- The offset is stored in units of the data, ``scale * zero_point``, and V's channel scale comes
  first.
- The record is padded: for D <= 128 to a multiple of 8 bytes; for D >= 256 to G times the power of
  two that holds the bytes of one token.

Codes go over unchanged. The products that become offsets or zero points are rounded to fp16 once
more, which moves a dequantized value by at most 2^-10 of its row's offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvarn import ops
from kvarn.format import CanonicalRecords, Format

_HALF_MAX = 65504.0
_HALF_TINY = 2.0**-24  # the smallest fp16 above 0

# Zero points stay below this when a scale has to be raised: 2^10 is where fp16 still counts in
# ones.
_LARGEST_ZERO_POINT = 1024.0


def triton_record_bytes(fmt: Format) -> int:
    """Bytes of a Triton record of this format, padding included."""
    if fmt.head_dim < 256:
        return -(-fmt.record_bytes // 8) * 8
    bytes_per_token = -(-fmt.record_bytes // fmt.group)
    return fmt.group * (1 << (bytes_per_token - 1).bit_length())


def from_triton(records: Tensor, fmt: Format) -> Tensor:
    """Triton records -> records of this library.

    Args:
        records: uint8 ``[N, Hkv, triton_record_bytes(fmt)]``.
        fmt: the format, whose name both have in common.

    Returns:
        Records, uint8 ``[N, Hkv, fmt.record_bytes]``.

    Raises:
        ValueError: records has another dtype or shape.
    """
    _check("from_triton", records, triton_record_bytes(fmt))
    group, dim = fmt.group, fmt.head_dim
    key_bytes, value_bytes = (group * dim * b // 8 for b in (fmt.key_bits, fmt.value_bits))
    sizes = [key_bytes, 2 * dim, 2 * dim, 2 * group, value_bytes, 2 * dim, 2 * group, 2 * group]
    key, *key_scales, value, value_channel, value_scale, value_offset = records[
        ..., : fmt.record_bytes
    ].split(sizes, -1)
    scale, offset, token_scale = map(_halves, key_scales)
    key_codes = ops.unpack_bits(key.unflatten(-1, (dim, -1)), fmt.key_bits, group)
    key_codes, scale, zero_point = _zero_points(key_codes, scale, offset, fmt.key_bits)
    value_codes = ops.unpack_bits(value.unflatten(-1, (group, -1)), fmt.value_bits, dim)
    value_codes, v_scale, v_zero = _zero_points(
        value_codes, _halves(value_scale), _halves(value_offset), fmt.value_bits
    )
    canonical = CanonicalRecords(
        key_codes, scale, zero_point, token_scale,
        value_codes, v_scale, v_zero, _halves(value_channel),
    )  # fmt: skip
    return ops.pack_records(canonical, fmt)


def to_triton(records: Tensor, fmt: Format) -> Tensor:
    """Records of this library -> Triton records, the inverse of `from_triton` up to rounding.

    Args:
        records: uint8 ``[N, Hkv, fmt.record_bytes]``.
        fmt: the format.

    Returns:
        Triton records, uint8 ``[N, Hkv, triton_record_bytes(fmt)]``; padding is 0.

    Raises:
        ValueError: records has another dtype or shape.
    """
    _check("to_triton", records, fmt.record_bytes)
    c = ops.unpack_records(records, fmt)
    fields = [
        ops.pack_bits(c.key_codes, fmt.key_bits).flatten(-2),
        _bytes(c.key_channel_scale),
        _bytes(_offsets(c.key_channel_scale, c.key_zero_point)),
        _bytes(c.key_token_scale),
        ops.pack_bits(c.value_codes, fmt.value_bits).flatten(-2),
        _bytes(c.value_channel_scale),
        _bytes(c.value_token_scale),
        _bytes(_offsets(c.value_token_scale, c.value_zero_point)),
    ]
    padding = triton_record_bytes(fmt) - fmt.record_bytes
    return torch.nn.functional.pad(torch.cat(fields, -1), (0, padding))


def _check(op: str, records: Tensor, size: int) -> None:
    if records.dtype != torch.uint8 or records.dim() != 3 or records.shape[-1] != size:
        raise ValueError(
            f"kvarn.formats_interop.{op}: records must be uint8 [N, Hkv, {size}], "
            f"got {records.dtype} {list(records.shape)}"
        )


def _offsets(scale: Tensor, zero_point: Tensor) -> Tensor:
    product = scale.float() * zero_point.float()
    return product.clamp(-_HALF_MAX, _HALF_MAX).half()


def _zero_points(
    codes: Tensor, scale: Tensor, offset: Tensor, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, zero point) of rows given with an offset in units of the data.

    A row that is constant up to its offset's precision (scale 0, or an offset beyond what a zero
    point can hold in code units) gets the scale |offset|/1024 and its codes in units of that.
    """
    s, z = scale.float(), offset.float()
    constant = s.isfinite() & (z.abs() > _HALF_MAX * s)
    raised = (z.abs() / _LARGEST_ZERO_POINT).clamp(min=_HALF_TINY).half().float()
    ratio = torch.where(constant, s / raised, 1.0)
    codes = (codes * ratio[..., None]).round().clamp(max=2**bits - 1).to(torch.uint8)
    s = torch.where(constant, raised, s)
    usable = s.isfinite() & (s > 0)
    zero_point = torch.where(usable, z / torch.where(usable, s, 1.0), 0.0)
    return codes, s.half(), zero_point.half()


def _halves(field: Tensor) -> Tensor:
    """fp16 numbers from their bytes, which may lie at any address."""
    return field.contiguous().view(torch.float16)


def _bytes(field: Tensor) -> Tensor:
    return field.contiguous().view(torch.uint8)
