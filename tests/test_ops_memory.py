"""What ops write: nothing they read, all of it whatever the numbers; and autograd is told."""

from __future__ import annotations

import op_calls
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kvarn import Format, ops, reference

FMT = Format("kvarn_k4v2_g64", head_dim=64)
RECORD = FMT.record_bytes


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float16)


def view(memory: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """The first bytes of a uint8 buffer as a tensor."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return memory[:count].view(dtype).view(shape)


def paged(q: Tensor, **arguments: object) -> dict[str, object]:
    records = ops.quantize_tiles(halves(2, 64, 2, 64), halves(2, 64, 2, 64), FMT)
    table = torch.arange(2, dtype=torch.int32).view(1, 2).expand(q.shape[0], 2)
    lens = torch.full((q.shape[0],), 100, dtype=torch.int32)
    return {
        "q": q, "cache": records, "block_table": table, "seq_lens": lens, "fmt": FMT, **arguments
    }  # fmt: skip


def test_fault12_an_output_over_an_input_is_refused() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    tiles = view(memory, torch.float16, 1, 64, 2, 64)
    records = view(memory, torch.uint8, 1, 2, RECORD)
    staging = view(memory, torch.float16, 2, 2, 2, 64, 64)
    other = halves(1, 64, 2, 64)
    canonical = ops.unpack_records(torch.zeros(1, 2, RECORD, dtype=torch.uint8), FMT)
    over_codes = canonical._replace(key_codes=view(memory, torch.uint8, 1, 2, 64, 64))
    q = view(memory, torch.float16, 4, 4, 64)
    lse = view(memory, torch.float32, 4, 4)
    plain = paged(halves(4, 4, 64))
    one = torch.zeros(1, dtype=torch.int64)
    slot = torch.zeros(2, dtype=torch.int32)
    cu = torch.tensor([0, 100])
    calls = [
        lambda: ops.quantize_tiles(tiles, other, FMT, out=records),
        lambda: ops.quantize_tiles(other, tiles, FMT, out=records),
        lambda: ops.dequantize_tiles(records, FMT, out=(tiles, other)),
        lambda: ops.dequantize_tiles(records, FMT, out=(other, tiles)),
        lambda: ops.pack_records(over_codes, FMT, out=records),
        lambda: ops.append_kv(tiles[0, :1], other[0, :1], one, staging, slot, FMT),
        lambda: ops.append_kv(other[0, :1], tiles[0, :1], one, staging, slot, FMT),
        lambda: ops.seal_blocks(staging, one, one, records, FMT),
        lambda: ops.decode_attention(**paged(q, out=q)),
        lambda: ops.decode_attention(**plain, return_lse=True, out=(q, lse)),
        lambda: ops.decode_attention(**plain | {"cache": records.expand(1, 2, RECORD)}, out=q),
        lambda: ops.decode_attention(**plain, workspace=memory, out=q),
        lambda: ops.merge_states(
            halves(4, 4, 64), lse, halves(4, 4, 64), torch.zeros(4, 4),
            out=(q, torch.zeros(4, 4)),
        ),
        lambda: ops.gather_kv(
            plain["cache"], plain["block_table"][:1], plain["seq_lens"][:1], FMT, staging=staging,
            block_slot=slot, cu_seq_lens=cu,
            out=(view(memory, torch.float16, 100, 2, 64), halves(100, 2, 64)),
        ),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="must not overlap"):
            call()
    assert (memory == 0).all()


@pytest.mark.parametrize("op", op_calls.WRITING)
def test_fault12_nothing_written_lies_over_any_other_argument(op: str) -> None:
    """Nor over index tensors, which steer where it is written."""
    refused = 0
    for written, other, memory, arguments in op_calls.overlapping(op):
        before = memory.clone()
        with pytest.raises(RuntimeError, match="must not overlap"):
            op_calls.call_raw(op, arguments)
        assert torch.equal(memory, before), (written, other)
        refused += 1
    assert refused


def test_fault12_slices_of_one_buffer() -> None:
    """Different parts of each row are apart, whatever the extents; shared parts are not."""
    fused = torch.randn(6, 8, 64)
    x = fused[:, :4].clone()
    ops.hadamard_transform(fused[:, :4], out=fused[:, 4:])
    torch.testing.assert_close(fused[:, 4:], reference.hadamard_transform(x))
    torch.testing.assert_close(fused[:, :4], x, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="out must not overlap x"):
        ops.hadamard_transform(fused[:, :4], out=fused[:, 3:7])
    with pytest.raises(RuntimeError, match="out must not overlap x"):
        ops.hadamard_transform(fused[:5, :4], out=fused[1:, :4])
    batches = torch.randn(2, 3, 8, 64)
    ops.hadamard_transform(batches[:, :, 4:], out=batches[:, :, :4])
    with pytest.raises(RuntimeError, match="out must not overlap x"):
        ops.hadamard_transform(batches[:, :, :5], out=batches[:, :, 3:])


@pytest.mark.parametrize("split", [64, 128, 2**31 - 64, 2**62, 2**63 - 64])
def test_fault10_any_split_length(split: int) -> None:
    arguments = paged(torch.randn(32, 16, 64))
    whole = ops.decode_attention(**arguments)
    out = torch.full_like(whole, torch.nan)
    ops.decode_attention(**arguments, split_tokens=split, out=out)
    torch.testing.assert_close(out, whole)


@pytest.mark.parametrize("window", [99, 100, 2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize("causal", [True, False])
def test_fault10_any_window_that_hides_nothing(window: int, causal: bool) -> None:
    arguments = paged(torch.randn(1, 4, 64))
    arguments["q"] = torch.randn(4, 4, 64)
    arguments |= {"cu_query_lens": torch.tensor([0, 4], dtype=torch.int32), "causal": causal}
    whole = ops.decode_attention(**arguments)
    assert torch.equal(ops.decode_attention(**arguments, window_left=window), whole)


@pytest.mark.parametrize("value", [1e-46, -1e39, 1e39])
def test_fault26_numbers_that_float32_cannot_hold_are_refused(value: float) -> None:
    for name in ("sm_scale", "logits_soft_cap"):
        with pytest.raises(ValueError, match=f"{name} must be a finite float32 number, got"):
            ops.decode_attention(**paged(torch.randn(1, 4, 64)), **{name: value})
    with pytest.raises(ValueError, match="scale must be a finite float32 number, got"):
        ops.hadamard_transform(torch.ones(1, 2), scale=value)


def test_gradients_are_refused_rather_than_dropped() -> None:
    q = torch.randn(1, 4, 64, requires_grad=True)
    with pytest.raises(ValueError, match="q must be without gradient"):
        ops.decode_attention(**paged(q))
    with torch.no_grad():
        assert ops.decode_attention(**paged(q)).shape == q.shape


def floating(op: str) -> list[str]:
    tensors = op_calls.tensors(op_calls.call(op)).items()
    return [name for name, t in tensors if t.is_floating_point()]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in op_calls.OPS for name in floating(op)]
)
def test_fault26_tangents_are_refused_rather_than_dropped(op: str, name: str) -> None:
    """Of torch.func.jvp and torch.autograd.forward_ad: no op has a forward-mode derivative."""
    arguments = op_calls.call(op)
    t = op_calls.tensors(arguments)[name]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(t, torch.ones_like(t))
        with pytest.raises(ValueError, match=r"must be without tangent"):
            op_calls.run(op, op_calls.replace(arguments, name, dual))
        op_calls.run(op, op_calls.call(op))  # others go on


def test_autograd_sees_that_a_saved_tensor_was_overwritten() -> None:
    x, w = torch.randn(4, 64), torch.ones(64, requires_grad=True)
    y = (x * w).sum()
    ops.hadamard_transform(x, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    staging = torch.zeros(1, 2, 2, 64, 64, dtype=torch.float16)
    before = staging._version
    slot = torch.zeros(1, dtype=torch.int32)
    ops.append_kv(halves(1, 2, 64), halves(1, 2, 64), torch.tensor([0]), staging, slot, FMT)
    assert staging._version > before
    arguments = op_calls.call("decode_attention")
    written = [*arguments["out"], arguments["workspace"]]
    versions = [t._version for t in written]
    ops.decode_attention(**arguments)
    assert all(t._version > before for t, before in zip(written, versions, strict=True))
    with torch.inference_mode():
        ops.hadamard_transform(torch.ones(1, 64), out=torch.empty(1, 64))
