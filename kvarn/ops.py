"""The operators: stateless, on the caller's tensors.

Every op runs where its tensors are (CPU, or CUDA on the current stream), refuses tensors of two
devices, and never waits for the device. Inputs may be strided views at any storage offset whose
last dimension is contiguous; index tensors may have any strides and be int32 or int64. What an op
writes (``out=``, staging pools, caches) must not overlap itself. Without ``out=`` results are new,
contiguous tensors.

Symbols in shapes: T tokens, B sequences, N tiles, Hq query heads, Hkv key/value heads, D head
dimension, G tokens per tile (= per block). D, G and the size of a record come from a
`kvarn.Format`. Floating point means float16 or bfloat16, and on the CPU float32.

Bad arguments raise a ValueError that names op, argument, rule and value, a RuntimeError where only
the kernel can see them (block ids, lengths); nothing is written then. Except for
`hadamard_transform`, no op is differentiable.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from kvarn._backends import FLOATS, model_dtypes
from kvarn._checks import INDICES, Arguments
from kvarn.format import CanonicalRecords, Format

__all__ = [
    "append_kv",
    "decode_attention",
    "decode_workspace_bytes",
    "dequantize_tiles",
    "gather_kv",
    "hadamard_transform",
    "merge_states",
    "pack_bits",
    "pack_records",
    "quantize_tiles",
    "seal_blocks",
    "unpack_bits",
    "unpack_records",
    "variance_normalize",
]

_MAX_CUDA_TRANSFORM = 1024
_MIN_CUDA_TRANSFORM = 16


def _numbers(fmt: Format) -> tuple[int, int, int, int]:
    """A format as it crosses into torch.ops.kvarn."""
    return fmt.key_bits, fmt.value_bits, fmt.group, fmt.head_dim


def _wrote(*tensors: Tensor | None) -> None:
    """Tells autograd that a caller's tensors have changed, as torch's own in-place ops do."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def hadamard_transform(
    x: Tensor, *, scale: float | None = None, out: Tensor | None = None
) -> Tensor:
    """``scale * x @ W``, W the Walsh-Hadamard matrix in Sylvester order; differentiable.

    Args:
        x: float16, bfloat16 or float32 ``[..., D]``, D a power of two (CUDA: from 16 to 1024).
        scale: None for ``1/sqrt(D)``, which makes the transform orthonormal and its own inverse.
        out: where the result goes, like ``x``; may be ``x`` itself. Not with tensors that need a
            gradient.

    Returns:
        The transformed tensor, shape and dtype of ``x``; computed in float32.
    """
    args = Arguments("hadamard_transform", "x", x)
    args.tensor("x", x, FLOATS, ("...", "D"))
    dim = x.shape[-1]
    if dim <= 0 or dim & (dim - 1):
        args.fail("x", "a power of two in its last dimension", dim)
    if x.is_cuda and not _MIN_CUDA_TRANSFORM <= dim <= _MAX_CUDA_TRANSFORM:
        limits = f"{_MIN_CUDA_TRANSFORM} to {_MAX_CUDA_TRANSFORM}"
        args.fail("x", f"of {limits} in its last dimension on CUDA", dim)
    if scale is not None:
        args.number("scale", scale)
    if out is None:
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = torch.ops.kvarn.hadamard_transform(x, scale)
            return result
        out = x.new_empty(x.shape)
    else:
        args.output("out", out, x.dtype, x.shape)
        if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
            args.fail("out", "None for tensors that require a gradient", "a tensor")
    torch.ops.kvarn.hadamard_transform.out(x, scale, out)
    _wrote(out)
    return out


def variance_normalize(tiles: Tensor, *, iterations: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Sinkhorn-like balancing: rows and columns of a tile get nearly equal standard deviations.

    ``tiles = balanced * row_scale[..., None] * col_scale[..., None, :]``, with the scales of the
    round that was best balanced (arXiv 2606.03458; algorithm.md, step 2).

    Args:
        tiles: float16, bfloat16 or float32 ``[..., R, C]``, R and C at least 2.
        iterations: rounds; 0 leaves the tiles as they are.

    Returns:
        balanced ``[..., R, C]``, row_scale ``[..., R]``, col_scale ``[..., C]``, all float32.
    """
    args = Arguments("variance_normalize", "tiles", tiles)
    args.tensor("tiles", tiles, FLOATS, ("...", "R", "C"))
    *leading, rows, cols = tiles.shape
    if rows < 2 or cols < 2:
        args.fail("tiles", "at least 2 in its last two dimensions", list(tiles.shape))
    args.integer("iterations", iterations, 0)
    flat = tiles.flatten(0, -3) if leading else tiles[None]
    balanced = flat.new_empty(flat.shape, dtype=torch.float32)
    row_scale = flat.new_empty((flat.shape[0], rows), dtype=torch.float32)
    col_scale = flat.new_empty((flat.shape[0], cols), dtype=torch.float32)
    torch.ops.kvarn.variance_normalize(flat, iterations, balanced, row_scale, col_scale)
    return (
        balanced.view(tiles.shape),
        row_scale.view(*leading, rows),
        col_scale.view(*leading, cols),
    )


def _packed_bytes(args: Arguments, count: int, bits: int) -> int:
    args.integer("bits", bits, 1, 8)
    return (count * bits + 7) // 8


def pack_bits(codes: Tensor, bits: int, *, out: Tensor | None = None) -> Tensor:
    """Packs codes densely: element i lies at bit ``i*bits`` of its row, low bits first.

    Args:
        codes: uint8 ``[..., n]``, each below ``2**bits``.
        bits: 1 to 8.
        out: uint8 ``[..., ceil(n*bits/8)]``.

    Returns:
        uint8 ``[..., ceil(n*bits/8)]``; spare bits of the last byte are 0.
    """
    args = Arguments("pack_bits", "codes", codes)
    args.tensor("codes", codes, (torch.uint8,), ("...", "n"))
    shape = (*codes.shape[:-1], _packed_bytes(args, codes.shape[-1], bits))
    if out is None:
        out = codes.new_empty(shape)
    else:
        args.output("out", out, torch.uint8, shape)
    torch.ops.kvarn.pack_bits(codes, bits, out)
    _wrote(out)
    return out


def unpack_bits(packed: Tensor, bits: int, count: int, *, out: Tensor | None = None) -> Tensor:
    """The inverse of `pack_bits`.

    Args:
        packed: uint8 ``[..., ceil(count*bits/8)]``.
        bits: 1 to 8.
        count: codes in a row.
        out: uint8 ``[..., count]``.

    Returns:
        uint8 ``[..., count]``, one code a byte.
    """
    args = Arguments("unpack_bits", "packed", packed)
    args.tensor("packed", packed, (torch.uint8,), ("...", "bytes"))
    args.integer("count", count, 0, 2**63 - 1)
    leading = packed.shape[:-1]
    packed_shape = (*leading, _packed_bytes(args, count, bits))
    args.tensor("packed", packed, (torch.uint8,), packed_shape)
    if out is None:
        out = packed.new_empty((*leading, count))
    else:
        args.output("out", out, torch.uint8, (*leading, count))
    torch.ops.kvarn.unpack_bits(packed, bits, out)
    _wrote(out)
    return out


def quantize_tiles(
    key: Tensor,
    value: Tensor,
    fmt: Format,
    *,
    fit: str = "unbiased",
    iterations: int | None = None,
    rotated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Packs whole tiles of keys and values into records.

    Args:
        key, value: float16, bfloat16 or float32 ``[N, G, Hkv, D]``, as the model made them.
        fmt: the format.
        fit: "unbiased" (no shrinkage, smaller error) or "minmax" (the paper's, for parity).
        iterations: rounds of the normalization; None for the default of ``fit``; with "unbiased"
            0 takes the column scales in closed form.
        rotated: whether key and value are in the rotated (Hadamard) basis already.
        out: uint8 ``[N, Hkv, record_bytes]``, for example a slice of a cache.

    Returns:
        Records, uint8 ``[N, Hkv, record_bytes]``. A token with a NaN or an infinity reads back as
        NaN and touches no other; an all-zero token reads back as zeros.
    """
    args = Arguments("quantize_tiles", "key", key)
    args.format(fmt)
    args.tensor("key", key, FLOATS, ("N", fmt.group, "Hkv", fmt.head_dim))
    args.tensor("value", value, (key.dtype,), key.shape)
    rounds = args.fit(fit, iterations)
    args.flag("rotated", rotated)
    shape = (key.shape[0], key.shape[2], fmt.record_bytes)
    if out is None:
        out = key.new_empty(shape, dtype=torch.uint8)
    else:
        args.output("out", out, torch.uint8, shape)
    torch.ops.kvarn.quantize_tiles(key, value, *_numbers(fmt), fit, rounds, rotated, out)
    _wrote(out)
    return out


def dequantize_tiles(
    records: Tensor,
    fmt: Format,
    *,
    dtype: torch.dtype | None = None,
    rotated: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of whole tiles from their records.

    Args:
        records: uint8 ``[N, Hkv, record_bytes]``.
        fmt: the format.
        dtype: of the result: float16 (None), bfloat16 or float32; with ``out`` its dtype.
        rotated: whether to leave the result in the rotated basis.
        out: (key, value), each ``[N, G, Hkv, D]``.

    Returns:
        key, value ``[N, G, Hkv, D]``.
    """
    args = Arguments("dequantize_tiles", "records", records)
    args.format(fmt)
    args.tensor("records", records, (torch.uint8,), ("N", "Hkv", fmt.record_bytes))
    args.flag("rotated", rotated)
    shape = (records.shape[0], fmt.group, records.shape[1], fmt.head_dim)
    key, value = _key_value(args, records, FLOATS, shape, dtype, torch.float16, out)
    torch.ops.kvarn.dequantize_tiles(records, *_numbers(fmt), rotated, key, value)
    _wrote(key, value)
    return key, value


def _key_value(
    args: Arguments,
    like: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    default: torch.dtype,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The key and value that an op writes: ``out``, or new tensors of ``shape``."""
    if dtype is not None:
        args.dtype("dtype", dtype, dtypes)
    if out is None:
        dtype = dtype or default
        return like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=dtype)
    key, value = args.pair("out", out, "(key, value)")
    args.tensor("out[0]", key, (dtype,) if dtype else dtypes, shape)
    args.output("out[0]", key, key.dtype, shape)
    args.output("out[1]", value, key.dtype, key.shape)
    return key, value


def unpack_records(records: Tensor, fmt: Format) -> CanonicalRecords:
    """Codes and scales of records in natural order: for tests, tools and other engines.

    Args:
        records: uint8 ``[N, Hkv, record_bytes]``.
        fmt: the format.

    Returns:
        A `kvarn.CanonicalRecords`, which says what each tensor holds.
    """
    args = Arguments("unpack_records", "records", records)
    args.format(fmt)
    args.tensor("records", records, (torch.uint8,), ("N", "Hkv", fmt.record_bytes))
    canonical = CanonicalRecords(
        *(
            records.new_empty(shape, dtype=dtype)
            for dtype, shape in _canonical(fmt, records.shape[0], records.shape[1])
        )
    )
    torch.ops.kvarn.unpack_records(records, *_numbers(fmt), *canonical)
    return canonical


def pack_records(canonical: CanonicalRecords, fmt: Format, *, out: Tensor | None = None) -> Tensor:
    """The inverse of `unpack_records`, bit for bit.

    Args:
        canonical: codes (each below ``2**bits``) and scales, as `unpack_records` returns them.
        fmt: the format.
        out: uint8 ``[N, Hkv, record_bytes]``.

    Returns:
        Records, uint8 ``[N, Hkv, record_bytes]``.
    """
    if not isinstance(canonical, CanonicalRecords):
        raise ValueError(
            "kvarn::pack_records: canonical must be a kvarn.CanonicalRecords,"
            f" got {type(canonical).__name__}"
        )
    args = Arguments("pack_records", "canonical.key_codes", canonical.key_codes)
    args.format(fmt)
    first = ("N", "Hkv", fmt.head_dim, fmt.group)
    args.tensor("canonical.key_codes", canonical.key_codes, (torch.uint8,), first, strided=True)
    tiles, heads = canonical.key_codes.shape[:2]
    for name, tensor, (dtype, shape) in zip(
        CanonicalRecords._fields, canonical, _canonical(fmt, tiles, heads), strict=True
    ):
        args.tensor(f"canonical.{name}", tensor, (dtype,), shape, strided=True)
    shape = (tiles, heads, fmt.record_bytes)
    if out is None:
        out = canonical.key_codes.new_empty(shape)
    else:
        args.output("out", out, torch.uint8, shape)
    torch.ops.kvarn.pack_records(*(t.contiguous() for t in canonical), *_numbers(fmt), out)
    _wrote(out)
    return out


def _canonical(fmt: Format, tiles: int, heads: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of the fields of CanonicalRecords."""
    group, dim = fmt.group, fmt.head_dim
    codes, scale = torch.uint8, torch.float16
    return [
        (codes, (tiles, heads, dim, group)),
        (scale, (tiles, heads, dim)),
        (scale, (tiles, heads, dim)),
        (scale, (tiles, heads, group)),
        (codes, (tiles, heads, group, dim)),
        (scale, (tiles, heads, group)),
        (scale, (tiles, heads, group)),
        (scale, (tiles, heads, dim)),
    ]


def append_kv(
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    staging: Tensor,
    block_slot: Tensor,
    fmt: Format,
) -> None:
    """Writes new tokens, unchanged, into the rows of the staging pool.

    ``staging[block_slot[s // G], 0, :, s % G] = key[i]`` and the same with 1 for ``value[i]``,
    where ``s = slot_mapping[i]``.

    Args:
        key, value: floating point ``[T, Hkv, D]``, not rotated.
        slot_mapping: ``[T]``: ``block*G + row``, all different, or negative for padding, which is
            skipped. What a row gets that is named twice is not defined.
        staging: the dtype of ``key``, ``[slots, 2, Hkv, G, D]``; written in place.
        block_slot: ``[num_blocks]``: the staging slot of a block; -1 (a record) cannot be written.
            Virtual blocks (`decode_attention`) are written like others, by their own ids.
        fmt: the format of the cache.
    """
    args = Arguments("append_kv", "key", key)
    args.format(fmt)
    args.tensor("key", key, model_dtypes(args.device.type), ("T", "Hkv", fmt.head_dim))
    args.tensor("value", value, (key.dtype,), key.shape)
    args.tensor("slot_mapping", slot_mapping, INDICES, (key.shape[0],), strided=True)
    pool = ("slots", 2, key.shape[1], fmt.group, fmt.head_dim)
    args.output("staging", staging, key.dtype, pool)
    args.tensor("block_slot", block_slot, INDICES, ("num_blocks",), strided=True)
    torch.ops.kvarn.append_kv(key, value, slot_mapping, staging, block_slot, *_numbers(fmt))
    _wrote(staging)


def seal_blocks(
    staging: Tensor,
    slots: Tensor,
    blocks: Tensor,
    cache: Tensor,
    fmt: Format,
    *,
    fit: str = "unbiased",
    iterations: int | None = None,
    count: Tensor | None = None,
) -> None:
    """Packs full staged tiles into the cache: ``cache[blocks[i]]`` from ``staging[slots[i]]``.

    The caller then sets ``block_slot[blocks[i]] = -1`` and may reuse the slot.

    Args:
        staging: floating point ``[slots, 2, Hkv, G, D]``.
        slots, blocks: ``[n]``; an entry that is negative in either is padding and is skipped.
        cache: uint8 ``[num_blocks, Hkv, record_bytes]``; written in place.
        fmt: the format of the cache.
        fit, iterations: as for `quantize_tiles`.
        count: int32 ``[1]``, on the device: only the first ``count`` entries are sealed.
    """
    args = Arguments("seal_blocks", "staging", staging)
    args.format(fmt)
    pool = ("slots", 2, "Hkv", fmt.group, fmt.head_dim)
    args.tensor("staging", staging, model_dtypes(args.device.type), pool)
    args.tensor("slots", slots, INDICES, ("n",), strided=True)
    args.tensor("blocks", blocks, INDICES, (slots.shape[0],), strided=True)
    args.output("cache", cache, torch.uint8, ("num_blocks", staging.shape[2], fmt.record_bytes))
    rounds = args.fit(fit, iterations)
    if count is not None:
        args.tensor("count", count, (torch.int32,), (1,))
    torch.ops.kvarn.seal_blocks(staging, slots, blocks, cache, *_numbers(fmt), fit, rounds, count)
    _wrote(cache)


def _check_paged(
    args: Arguments,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: Format,
    staging: Tensor | None,
    block_slot: Tensor | None,
) -> None:
    """The arguments that decode_attention and gather_kv share."""
    args.tensor("cache", cache, (torch.uint8,), ("num_blocks", "Hkv", fmt.record_bytes))
    if cache.shape[1] == 0:
        args.fail("cache", "of at least one KV head", 0)
    args.tensor("block_table", block_table, INDICES, ("B", "max_blocks"), strided=True)
    args.tensor("seq_lens", seq_lens, INDICES, (block_table.shape[0],), strided=True)
    if staging is not None and block_slot is not None:
        pool = ("slots", 2, cache.shape[1], fmt.group, fmt.head_dim)
        args.tensor("staging", staging, model_dtypes(args.device.type), pool)
        args.tensor("block_slot", block_slot, INDICES, ("blocks",), strided=True)
        if block_slot.shape[0] < cache.shape[0]:
            args.fail("block_slot", f"of at least {cache.shape[0]} blocks", block_slot.shape[0])
    elif staging is not None or block_slot is not None:
        alone = "block_slot" if staging is None else "staging"
        args.fail("staging and block_slot", "given together", f"{alone} alone")


def _split_tokens(args: Arguments, split_tokens: int | None, fmt: Format) -> int:
    """0 for None."""
    if split_tokens is None:
        return 0
    args.integer("split_tokens", split_tokens, 1, 2**63 - 1)
    if split_tokens % fmt.group:
        args.fail("split_tokens", f"a multiple of {fmt.group}", split_tokens)
    return split_tokens


@overload
def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: Format,
    *,
    staging: Tensor | None = None,
    block_slot: Tensor | None = None,
    cu_query_lens: Tensor | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    max_seq_len: int | None = None,
    split_tokens: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: Format,
    *,
    staging: Tensor | None = None,
    block_slot: Tensor | None = None,
    cu_query_lens: Tensor | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    max_seq_len: int | None = None,
    split_tokens: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: Format,
    *,
    staging: Tensor | None = None,
    block_slot: Tensor | None = None,
    cu_query_lens: Tensor | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    max_seq_len: int | None = None,
    split_tokens: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each sequence over its packed and staged blocks.

    ``softmax(soft_cap(sm_scale * q @ k.T) + mask) @ v``, accumulated in float32. Token t of
    sequence b is row ``t % G`` of block ``block_table[b, t // G]``. A block is read from the
    staging pool if ``block_slot`` has a slot for it, else from its record. Table entries beyond a
    sequence's length are never read; masked tokens never reach the result, whatever their bytes.

    Args:
        q: floating point ``[T, Hq, D]``, not rotated, Hq a multiple of Hkv; query head h reads KV
            head ``h // (Hq / Hkv)``.
        cache: uint8 ``[num_blocks, Hkv, record_bytes]``.
        block_table: ``[B, max_blocks]`` block ids.
        seq_lens: ``[B]`` tokens in the cache, those of the query included. 0: the output is 0, the
            LSE -inf.
        fmt: the format of the cache.
        staging: ``[slots, 2, Hkv, G, D]``, floating point, not rotated; with ``block_slot``. None:
            every block is a record.
        block_slot: ``[num_blocks]``: the staging slot of a block, -1 when it is a record. It may be
            longer: ids from num_blocks on are virtual blocks, which are staged and have no record.
            So one sequence can read a tile in 16 bits while another, with the id of the record in
            its table, reads that.
        cu_query_lens: ``[B + 1]``: sequence b has the query rows ``cu_query_lens[b]`` to
            ``cu_query_lens[b+1] - 1``, its last tokens. None: one query token each, T = B.
        causal: query i of n sees the first ``seq_len - n + i + 1`` tokens; False: all of them.
        sm_scale: None for ``1/sqrt(D)``.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``; 0: they do not.
        window_left: a query sees this many tokens before its own position; -1: all.
        sinks: float32, float16 or bfloat16 ``[Hq]``: logits that only take part in the softmax's
            denominator.
        max_seq_len: a bound of ``seq_lens``, at most ``max_blocks*G``, which is also the default; a
            close one lets a device plan better.
        split_tokens: a multiple of G: sequences are cut into pieces of that many tokens, so that
            the result of one is bit-identical whatever else is in the batch. None: the fastest
            division.
        workspace: uint8 scratch memory of at least `decode_workspace_bytes`, 16-byte aligned. None:
            taken from torch's allocator.
        out: ``[T, Hq, D]``, dtype of ``q``, not in the memory of ``q``; with ``return_lse`` also a
            tuple (out, lse).
        return_lse: whether to return the log-sum-exp of the scores too.

    Returns:
        out ``[T, Hq, D]``, dtype of ``q``; with ``return_lse`` (out, lse), lse float32 ``[T, Hq]``,
        natural logarithm.
    """
    args = Arguments("decode_attention", "q", q)
    args.format(fmt)
    args.tensor("q", q, model_dtypes(args.device.type), ("T", "Hq", fmt.head_dim))
    _check_paged(args, cache, block_table, seq_lens, fmt, staging, block_slot)
    tokens, q_heads = q.shape[0], q.shape[1]
    kv_heads = cache.shape[1]
    if q_heads == 0 or q_heads % kv_heads:
        args.fail("q", f"of a multiple of {kv_heads} heads", q_heads)
    seqs, width = block_table.shape
    if cu_query_lens is not None:
        args.tensor("cu_query_lens", cu_query_lens, INDICES, (seqs + 1,), strided=True)
    elif tokens != seqs:
        rule = f"of one token per sequence without cu_query_lens, {seqs} in all"
        args.fail("q", rule, tokens)
    args.flag("causal", causal)
    if sm_scale is None:
        sm_scale = fmt.head_dim**-0.5
    args.number("sm_scale", sm_scale)
    args.number("logits_soft_cap", logits_soft_cap)
    if logits_soft_cap < 0:
        args.fail("logits_soft_cap", "at least 0", logits_soft_cap)
    args.integer("window_left", window_left, -1, 2**63 - 1)
    if sinks is not None:
        args.tensor("sinks", sinks, FLOATS, (q_heads,), strided=True)
    if max_seq_len is None:
        max_seq_len = width * fmt.group
    args.integer("max_seq_len", max_seq_len, 0, width * fmt.group)
    split = _split_tokens(args, split_tokens, fmt)
    if workspace is not None:
        args.output("workspace", workspace, torch.uint8, ("bytes",))
    args.flag("return_lse", return_lse)
    lse = None
    if return_lse and isinstance(out, (tuple, list)):
        attended, lse = args.pair("out", out, "(out, lse)")
        args.output("out[0]", attended, q.dtype, q.shape)
        args.output("out[1]", lse, torch.float32, (tokens, q_heads), strided=True)
    elif isinstance(out, (tuple, list)):
        args.fail("out", "a tensor without return_lse", type(out).__name__)
    else:
        attended = q.new_empty(q.shape) if out is None else out
        if out is not None:
            args.output("out", out, q.dtype, q.shape)
        if return_lse:
            lse = q.new_empty((tokens, q_heads), dtype=torch.float32)
    torch.ops.kvarn.decode_attention(
        q, cache, block_table, seq_lens, *_numbers(fmt), staging, block_slot, cu_query_lens, causal,
        sm_scale, logits_soft_cap, window_left, sinks, max_seq_len, split, workspace, attended,
        lse,
    )  # fmt: skip
    _wrote(attended, lse, workspace)
    return attended if lse is None else (attended, lse)


def decode_workspace_bytes(
    fmt: Format,
    *,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    max_seq_len: int,
    num_tokens: int | None = None,
    split_tokens: int | None = None,
    device: torch.device | str | int = "cpu",
) -> int:
    """Bytes of the workspace that `decode_attention` needs, exactly: one less is an error.

    On the CPU the number depends on ``torch.get_num_threads()``.

    Args:
        fmt: the format of the cache.
        num_seqs, num_q_heads, num_kv_heads: B, Hq and Hkv of the call.
        max_seq_len: the ``max_seq_len`` of the call; its default there is ``max_blocks*G``.
        num_tokens: T; None for one query token per sequence.
        split_tokens: as in the call.
        device: where the call runs.
    """
    args = Arguments("decode_workspace_bytes", "device", torch.device(device))
    args.format(fmt)
    args.integer("num_seqs", num_seqs, 0)
    args.integer("num_kv_heads", num_kv_heads, 1)
    args.integer("num_q_heads", num_q_heads, 1)
    if num_q_heads % num_kv_heads:
        args.fail("num_q_heads", f"a multiple of {num_kv_heads}", num_q_heads)
    args.integer("max_seq_len", max_seq_len, 0, 2**40)
    if num_tokens is None:
        num_tokens = num_seqs
    args.integer("num_tokens", num_tokens, 0)
    split = _split_tokens(args, split_tokens, fmt)
    like = torch.empty(0, device=device)
    result: int = torch.ops.kvarn.decode_workspace_bytes(
        like, *_numbers(fmt), num_seqs, num_tokens, num_q_heads, num_kv_heads, max_seq_len, split
    )
    return result


def gather_kv(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: Format,
    *,
    staging: Tensor | None = None,
    block_slot: Tensor | None = None,
    cu_seq_lens: Tensor,
    rotated: bool = False,
    total_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Packed and staged blocks -> contiguous keys and values, for a prefill kernel.

    Token t of sequence b goes to row ``cu_seq_lens[b] + t``.

    Args:
        cache, block_table, seq_lens, fmt, staging, block_slot: as for `decode_attention`.
        cu_seq_lens: ``[B + 1]``: where the tokens of a sequence start, and the end of the last.
        rotated: whether to give all tokens in the rotated basis instead of the original one.
        total_tokens: rows of new results. None: ``cu_seq_lens[-1]``, on the CPU; on CUDA, where it
            cannot be known without waiting, this or ``out`` is required.
        dtype: of the result: None for that of ``out``, else of ``staging``, else float16.
        out: (key, value), each floating point ``[total_tokens, Hkv, D]``.

    Returns:
        key, value ``[total_tokens, Hkv, D]``. Rows of no token are left as they are.
    """
    args = Arguments("gather_kv", "cache", cache)
    args.format(fmt)
    _check_paged(args, cache, block_table, seq_lens, fmt, staging, block_slot)
    starts = (block_table.shape[0] + 1,)
    args.tensor("cu_seq_lens", cu_seq_lens, INDICES, starts, strided=True)
    args.flag("rotated", rotated)
    dtypes = model_dtypes(args.device.type)
    if total_tokens is not None:
        args.integer("total_tokens", total_tokens, 0, 2**63 - 1)
    elif out is not None:
        first, _ = args.pair("out", out, "(key, value)")
        args.tensor("out[0]", first, dtypes, ("total_tokens", cache.shape[1], fmt.head_dim))
        total_tokens = first.shape[0]
    elif args.device.type == "cpu":
        total_tokens = int(cu_seq_lens[-1])
        if total_tokens < 0:
            args.fail("cu_seq_lens", "at least 0 at its end", total_tokens)
    else:
        args.fail("total_tokens", f"given, or out, on {args.device}", None)
    shape = (total_tokens, cache.shape[1], fmt.head_dim)
    default = torch.float16 if staging is None else staging.dtype
    key, value = _key_value(args, cache, dtypes, shape, dtype, default, out)
    torch.ops.kvarn.gather_kv(
        cache, block_table, seq_lens, *_numbers(fmt), staging, block_slot, cu_seq_lens, rotated,
        key, value,
    )  # fmt: skip
    _wrote(key, value)
    return key, value


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Two partial attentions of the same queries over disjoint keys -> one.

    ``lse = log(exp(lse_a) + exp(lse_b))``,
    ``out = exp(lse_a - lse)*out_a + exp(lse_b - lse)*out_b``.

    Args:
        out_a, out_b: floating point ``[T, Hq, D]``, of one dtype; any D.
        lse_a, lse_b: float32 ``[T, Hq]``, natural logarithm; -inf: that part is empty and not read.
        out: (out, lse); may be (out_a, lse_a) or (out_b, lse_b).

    Returns:
        out ``[T, Hq, D]``, lse ``[T, Hq]``.
    """
    args = Arguments("merge_states", "out_a", out_a)
    args.tensor("out_a", out_a, model_dtypes(args.device.type), ("T", "Hq", "D"))
    lse_shape = out_a.shape[:2]
    args.tensor("lse_a", lse_a, (torch.float32,), lse_shape, strided=True)
    args.tensor("out_b", out_b, (out_a.dtype,), out_a.shape)
    args.tensor("lse_b", lse_b, (torch.float32,), lse_shape, strided=True)
    if out is None:
        merged, lse = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_shape)
    else:
        merged, lse = args.pair("out", out, "(out, lse)")
        args.output("out[0]", merged, out_a.dtype, out_a.shape)
        args.output("out[1]", lse, torch.float32, lse_shape, strided=True)
    torch.ops.kvarn.merge_states(out_a, lse_a, out_b, lse_b, merged, lse)
    _wrote(merged, lse)
    return merged, lse
