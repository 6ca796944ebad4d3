"""What the operators say about bad arguments, word by word, and that they then write nothing.

For every argument: `TENSORS` (kvarn.ops) and `RAW_TENSORS` (torch.ops.kvarn) give the rule of a
tensor, from which its violations are made; `VALUES` and `RAW_VALUES` list bad values one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import op_calls
import pytest
import torch
from op_calls import Call
from torch import Tensor

from kvarn import Format, ops

FLOATS = "float16, bfloat16 or float32"
INDICES = "int32 or int64"
FMT = Format("kvarn_k4v2_g64", head_dim=64)
RB = FMT.record_bytes
GROUP_MULTIPLE = "a multiple of 64"
I32 = "an integer from {} to 2147483647"
I64 = "an integer from {} to 9223372036854775807"

PAGED = {
    "cache": f"uint8 [num_blocks, Hkv, {RB}]",
    "block_table": f"{INDICES} [B, max_blocks]",
    "seq_lens": f"{INDICES} [3]",
    "staging": f"{FLOATS} [slots, 2, 2, 64, 64]",
    "block_slot": f"{INDICES} [blocks]",
}
CANONICAL = {
    "key_codes": "uint8 [2, 2, 64, 64]",
    "key_channel_scale": "float16 [2, 2, 64]",
    "key_zero_point": "float16 [2, 2, 64]",
    "key_token_scale": "float16 [2, 2, 64]",
    "value_codes": "uint8 [2, 2, 64, 64]",
    "value_token_scale": "float16 [2, 2, 64]",
    "value_zero_point": "float16 [2, 2, 64]",
    "value_channel_scale": "float16 [2, 2, 64]",
}
#: argument -> "dtypes [shape]"; each is preceded by "must be" and followed by "on cpu".
TENSORS: dict[str, dict[str, str]] = {
    "hadamard_transform": {"x": f"{FLOATS} [..., D]", "out": "float32 [2, 3, 64]"},
    "variance_normalize": {"tiles": f"{FLOATS} [..., R, C]"},
    "pack_bits": {"codes": "uint8 [..., n]", "out": "uint8 [2, 2, 6]"},
    "unpack_bits": {"packed": "uint8 [..., bytes]", "out": "uint8 [2, 2, 16]"},
    "quantize_tiles": {
        "key": f"{FLOATS} [N, 64, Hkv, 64]",
        "value": "float16 [2, 64, 2, 64]",
        "out": f"uint8 [2, 2, {RB}]",
    },
    "dequantize_tiles": {
        "records": f"uint8 [N, Hkv, {RB}]",
        "out[0]": "float16 [2, 64, 2, 64]",
        "out[1]": "float16 [2, 64, 2, 64]",
    },
    "unpack_records": {"records": f"uint8 [N, Hkv, {RB}]"},
    "pack_records": {
        **{f"canonical.{name}": rule for name, rule in CANONICAL.items()},
        "canonical.key_codes": "uint8 [N, Hkv, 64, 64]",
        "out": f"uint8 [2, 2, {RB}]",
    },
    "append_kv": {
        "key": f"{FLOATS} [T, Hkv, 64]",
        "value": "float16 [3, 2, 64]",
        "slot_mapping": f"{INDICES} [3]",
        "staging": "float16 [slots, 2, 2, 64, 64]",
        "block_slot": f"{INDICES} [num_blocks]",
    },
    "seal_blocks": {
        "staging": f"{FLOATS} [slots, 2, Hkv, 64, 64]",
        "slots": f"{INDICES} [n]",
        "blocks": f"{INDICES} [4]",
        "cache": f"uint8 [num_blocks, 2, {RB}]",
        "count": "int32 [1]",
    },
    "decode_attention": {
        "q": f"{FLOATS} [T, Hq, 64]",
        **PAGED,
        "cu_query_lens": f"{INDICES} [4]",
        "sinks": f"{FLOATS} [6]",
        "workspace": "uint8 [bytes]",
        "out[0]": "float16 [3, 6, 64]",
        "out[1]": "float32 [3, 6]",
    },
    "decode_workspace_bytes": {},
    "gather_kv": {
        **PAGED,
        "cu_seq_lens": f"{INDICES} [4]",
        "out[0]": "float16 [198, 2, 64]",
        "out[1]": "float16 [198, 2, 64]",
    },
    "merge_states": {
        "out_a": f"{FLOATS} [T, Hq, D]",
        "lse_a": "float32 [3, 6]",
        "out_b": "float16 [3, 6, 64]",
        "lse_b": "float32 [3, 6]",
        "out[0]": "float16 [3, 6, 64]",
        "out[1]": "float32 [3, 6]",
    },
}
#: Arguments that may have any strides.
STRIDED = {
    "append_kv": {"slot_mapping", "block_slot"},
    "seal_blocks": {"slots", "blocks"},
    "decode_attention": {"block_table", "seq_lens", "block_slot", "cu_query_lens", "sinks"},
    "gather_kv": {"block_table", "seq_lens", "block_slot", "cu_seq_lens"},
    "merge_states": {"lse_a", "lse_b"},
    "pack_records": {f"canonical.{name}" for name in CANONICAL},
}
STRIDED_OUTPUTS = {"decode_attention": {"out[1]", "lse"}, "merge_states": {"out[1]", "lse"}}
#: The argument that says on which device the op runs.
FIRST = {
    "hadamard_transform": "x", "variance_normalize": "tiles", "pack_bits": "codes",
    "unpack_bits": "packed", "quantize_tiles": "key", "dequantize_tiles": "records",
    "unpack_records": "records", "pack_records": "canonical.key_codes", "append_kv": "key",
    "seal_blocks": "staging", "decode_attention": "q", "gather_kv": "cache",
    "merge_states": "out_a",
}  # fmt: skip

FMT_RULE = "fmt must be a kvarn.Format"
FIT_RULE = "fit must be 'unbiased' or 'minmax'"
ITERATIONS_RULE = f"iterations must be {I32.format(0)}"
#: op -> (argument, bad value, what is said after "kvarn::<op>: ")
VALUES: dict[str, list[tuple[str, Any, str]]] = {
    "hadamard_transform": [
        ("x", torch.ones(2, 48), "x must be a power of two in its last dimension, got 48"),
        ("x", torch.ones(2, 0), "x must be a power of two in its last dimension, got 0"),
        ("scale", "1", "scale must be a number, got '1'"),
        ("scale", True, "scale must be a number, got True"),
        ("scale", math.nan, "scale must be a finite float32 number, got nan"),
        ("scale", -math.inf, "scale must be a finite float32 number, got -inf"),
    ],
    "variance_normalize": [
        (
            "tiles",
            torch.ones(3, 1, 8),
            "tiles must be at least 2 in its last two dimensions, got [3, 1, 8]",
        ),
        ("iterations", -1, f"{ITERATIONS_RULE}, got -1"),
        ("iterations", 2.0, f"{ITERATIONS_RULE}, got 2.0"),
        ("iterations", None, f"{ITERATIONS_RULE}, got None"),
    ],
    "pack_bits": [
        ("bits", 0, "bits must be an integer from 1 to 8, got 0"),
        ("bits", 9, "bits must be an integer from 1 to 8, got 9"),
        ("bits", 4.0, "bits must be an integer from 1 to 8, got 4.0"),
    ],
    "unpack_bits": [
        ("bits", 0, "bits must be an integer from 1 to 8, got 0"),
        ("bits", True, "bits must be an integer from 1 to 8, got True"),
        ("count", -1, f"count must be {I64.format(0)}, got -1"),
        ("count", 17, "packed must be uint8 [2, 2, 7] on cpu, got uint8 [2, 2, 6] on cpu"),
    ],
    "quantize_tiles": [
        ("fmt", FMT.name, f"{FMT_RULE}, got 'kvarn_k4v2_g64'"),
        ("fit", "mse", f"{FIT_RULE}, got 'mse'"),
        ("fit", None, f"{FIT_RULE}, got None"),
        ("iterations", -1, f"{ITERATIONS_RULE}, got -1"),
        ("rotated", 1, "rotated must be True or False, got 1"),
    ],
    "dequantize_tiles": [
        ("fmt", None, f"{FMT_RULE}, got None"),
        ("dtype", torch.float64, f"dtype must be {FLOATS}, got torch.float64"),
        ("rotated", None, "rotated must be True or False, got None"),
        ("out", torch.ones(1), "out must be a tuple (key, value), got Tensor"),
        ("out", (torch.ones(1),), "out must be a tuple (key, value), got tuple"),
    ],
    "unpack_records": [("fmt", 4, f"{FMT_RULE}, got 4")],
    "pack_records": [
        ("fmt", 4, f"{FMT_RULE}, got 4"),
        (
            "canonical",
            (torch.ones(1),),
            "canonical must be a kvarn.CanonicalRecords, got tuple",
        ),
    ],
    "append_kv": [("fmt", 4, f"{FMT_RULE}, got 4")],
    "seal_blocks": [
        ("fmt", 4, f"{FMT_RULE}, got 4"),
        ("fit", "", f"{FIT_RULE}, got ''"),
        ("iterations", 2**31, f"{ITERATIONS_RULE}, got 2147483648"),
    ],
    "decode_attention": [
        ("fmt", 4, f"{FMT_RULE}, got 4"),
        ("q", torch.ones(3, 5, 64), "q must be of a multiple of 2 heads, got 5"),
        ("q", torch.ones(3, 0, 64), "q must be of a multiple of 2 heads, got 0"),
        (
            "cache",
            torch.ones(6, 0, RB, dtype=torch.uint8),
            "cache must be of at least one KV head, got 0",
        ),
        ("staging", None, "staging and block_slot must be given together, got block_slot alone"),
        (
            "block_slot",
            torch.full((5,), -1, dtype=torch.int32),
            "block_slot must be of at least 6 blocks, got 5",
        ),
        ("block_slot", None, "staging and block_slot must be given together, got staging alone"),
        ("causal", 0, "causal must be True or False, got 0"),
        ("sm_scale", "a", "sm_scale must be a number, got 'a'"),
        ("sm_scale", math.inf, "sm_scale must be a finite float32 number, got inf"),
        ("logits_soft_cap", None, "logits_soft_cap must be a number, got None"),
        ("logits_soft_cap", -1.0, "logits_soft_cap must be at least 0, got -1.0"),
        ("logits_soft_cap", math.nan, "logits_soft_cap must be a finite float32 number, got nan"),
        ("window_left", -2, f"window_left must be {I64.format(-1)}, got -2"),
        ("window_left", None, f"window_left must be {I64.format(-1)}, got None"),
        ("max_seq_len", -1, "max_seq_len must be an integer from 0 to 128, got -1"),
        ("max_seq_len", 129, "max_seq_len must be an integer from 0 to 128, got 129"),
        ("split_tokens", 0, f"split_tokens must be {I64.format(1)}, got 0"),
        ("split_tokens", 96, f"split_tokens must be {GROUP_MULTIPLE}, got 96"),
        ("return_lse", 1, "return_lse must be True or False, got 1"),
        ("return_lse", False, "out must be a tensor without return_lse, got tuple"),
        ("out", (torch.ones(1),), "out must be a tuple (out, lse), got tuple"),
    ],
    "decode_workspace_bytes": [
        ("fmt", 4, f"{FMT_RULE}, got 4"),
        ("num_seqs", -1, f"num_seqs must be {I32.format(0)}, got -1"),
        ("num_q_heads", 0, f"num_q_heads must be {I32.format(1)}, got 0"),
        ("num_q_heads", 5, "num_q_heads must be a multiple of 2, got 5"),
        ("num_kv_heads", 0, f"num_kv_heads must be {I32.format(1)}, got 0"),
        ("max_seq_len", -1, "max_seq_len must be an integer from 0 to 1099511627776, got -1"),
        ("num_tokens", -1, f"num_tokens must be {I32.format(0)}, got -1"),
        ("split_tokens", 65, f"split_tokens must be {GROUP_MULTIPLE}, got 65"),
    ],
    "gather_kv": [
        ("fmt", 4, f"{FMT_RULE}, got 4"),
        ("staging", None, "staging and block_slot must be given together, got block_slot alone"),
        (
            "block_slot",
            torch.full((5,), -1, dtype=torch.int32),
            "block_slot must be of at least 6 blocks, got 5",
        ),
        ("rotated", 0, "rotated must be True or False, got 0"),
        ("total_tokens", -1, f"total_tokens must be {I64.format(0)}, got -1"),
        (
            "total_tokens",
            199,
            "out[0] must be float16 [199, 2, 64] on cpu, got float16 [198, 2, 64] on cpu",
        ),
        ("dtype", torch.int8, f"dtype must be {FLOATS}, got torch.int8"),
        ("out", torch.ones(1), "out must be a tuple (key, value), got Tensor"),
    ],
    "merge_states": [("out", 3, "out must be a tuple (out, lse), got int")],
}


def describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"


def written(op: str, arguments: Call) -> dict[str, Tensor]:
    """The tensors that a call may write."""
    names = ("out", "workspace", *op_calls.WRITTEN.get(op, ()))
    return {
        name: t for name, t in op_calls.tensors(arguments).items() if name.split("[")[0] in names
    }


def violations(
    name: str, good: Tensor, rule: str, *, first: bool, strided: bool, output: bool
) -> Iterator[tuple[Tensor, str]]:
    """Bad tensors in the place of a good one, and what is said about each."""

    def bad(t: Tensor) -> tuple[Tensor, str]:
        return t, f"{name} must be {rule} on cpu, got {describe(t)}"

    yield bad(good.new_zeros(good.shape, dtype=torch.float64))
    yield bad(good.new_zeros(()))
    if not first:
        yield bad(torch.empty_like(good, device="meta"))
    dims = re.search(r"\[(.*)\]", rule)[1].split(", ")
    if dims[0] != "...":
        yield bad(good.new_zeros((*good.shape, 1)))
        for i, size in enumerate(dims):
            if size.isdigit():
                shape = list(good.shape)
                shape[i] += 1
                yield bad(good.new_zeros(shape))
    if not strided and good.shape[-1] > 1:
        t = good.new_zeros((*good.shape, 2))[..., 0]
        strides = list(t.stride())
        yield t, f"{name} must be contiguous in its last dimension, got strides {strides}"
    if output:
        t = good.new_zeros((1, *good.shape[1:])).expand(good.shape)
        if good.dim() == 1:
            if strided:
                yield t, f"{name} must not overlap itself, got strides [0]"
        else:
            yield t, f"{name} must not overlap itself, got strides {list(t.stride())}"


def check_refused(
    op: str, arguments: Call, outputs: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    """The call fails with exactly this message and leaves all outputs as they were."""
    for t in outputs.values():
        t.view(torch.uint8).fill_(171)
    before = {name: t.clone() for name, t in outputs.items()}
    with pytest.raises(error) as raised:
        if error is ValueError:
            op_calls.function(op)(**arguments)
        else:
            getattr(torch.ops.kvarn, op)(*arguments.values())
    assert type(raised.value) is error
    assert str(raised.value) == f"kvarn::{op}: {message}"
    for name, t in outputs.items():
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("op", op_calls.OPS)
def test_every_argument_has_a_case(op: str) -> None:
    checked = {name.split("[")[0].split(".")[0] for name in TENSORS[op]}
    checked |= {name for name, _, _ in VALUES.get(op, ())}
    unchecked = {"device"} if op == "decode_workspace_bytes" else set()  # its own test
    assert checked | unchecked == set(op_calls.parameters(op))


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, rules in TENSORS.items() for name in rules]
)
def test_bad_tensor(op: str, name: str) -> None:
    arguments = op_calls.call(op)
    outputs = written(op, arguments)
    tensors = op_calls.tensors(arguments)
    if op == "pack_records":
        tensors |= {f"canonical.{k}": v for k, v in arguments["canonical"]._asdict().items()}
    rule = TENSORS[op][name]
    if name == "out[0]" and op == "gather_kv":
        arguments["total_tokens"] = 198
    strided = name in STRIDED.get(op, ()) or name in STRIDED_OUTPUTS.get(op, ())
    for bad, message in violations(
        name, tensors[name], rule, first=name == FIRST[op], strided=strided, output=name in outputs
    ):
        check_refused(op, op_calls.replace(arguments, name, bad), outputs, ValueError, message)
    not_a_tensor = op_calls.replace(arguments, name, [1.0])
    check_refused(op, not_a_tensor, outputs, ValueError, f"{name} must be a tensor, got list")


@pytest.mark.parametrize(
    ("op", "name", "bad", "message"),
    [(op, *case) for op, cases in VALUES.items() for case in cases],
)
def test_bad_value(op: str, name: str, bad: Any, message: str) -> None:
    arguments = op_calls.call(op)
    outputs = written(op, arguments)
    check_refused(op, arguments | {name: bad}, outputs, ValueError, message)


def test_one_output_of_an_op_with_one_result() -> None:
    arguments = op_calls.call("decode_attention") | {"return_lse": False}
    outputs = written("decode_attention", arguments)
    bad = torch.empty(3, 6, 63, dtype=torch.float16)
    message = f"out must be float16 [3, 6, 64] on cpu, got {describe(bad)}"
    check_refused("decode_attention", arguments | {"out": bad}, outputs, ValueError, message)


def test_queries_without_cu_query_lens() -> None:
    arguments = op_calls.call("decode_attention")
    arguments |= {"cu_query_lens": None, "q": torch.ones(4, 6, 64), "out": None}
    message = "q must be of one token per sequence without cu_query_lens, 3 in all, got 4"
    check_refused("decode_attention", arguments, {}, ValueError, message)


@pytest.mark.parametrize("needs_grad", ["x", "out"])
def test_out_does_not_differentiate(needs_grad: str) -> None:
    arguments = op_calls.call("hadamard_transform")
    arguments[needs_grad].requires_grad_()
    message = "out must be None for tensors that require a gradient, got a tensor"
    check_refused("hadamard_transform", arguments, {}, ValueError, message)
    with torch.no_grad():
        ops.hadamard_transform(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_fault27_device_without_kernels() -> None:
    with pytest.raises(ValueError) as error:
        ops.decode_workspace_bytes(
            FMT, num_seqs=1, num_q_heads=1, num_kv_heads=1, max_seq_len=1, device="mps"
        )
    assert str(error.value) == (
        "kvarn::decode_workspace_bytes: device must be one with kernels for this op, "
        "got mps (kvarn has no kernels for mps)"
    )


# What only the kernel sees.

METADATA: list[tuple[str, str, Any, str]] = [
    (
        "append_kv", "slot_mapping", torch.tensor([64, 192, 0]),
        "slot_mapping must be less than 192 (3 blocks of 64), got 192 at index 1",
    ),
    (
        "append_kv", "slot_mapping", torch.tensor([64, -1, 5]),
        "block_slot must be a staging slot below 4 for every block that tokens are appended to, "
        "got -1 at block 0 (slot_mapping 5 at index 2)",
    ),
    (
        "append_kv", "block_slot", torch.tensor([0, 4, 1]),
        "block_slot must be a staging slot below 4 for every block that tokens are appended to, "
        "got 4 at block 1 (slot_mapping 69 at index 0)",
    ),
    (
        "seal_blocks", "slots", torch.tensor([3, 4, 1, 0]),
        "slots must be less than 4 (the staging slots), got 4 at index 1",
    ),
    (
        "seal_blocks", "blocks", torch.tensor([5, 4, 6, 1]),
        "blocks must be less than 6 (the blocks of the cache), got 6 at index 2",
    ),
    (
        "seal_blocks", "blocks", torch.tensor([5, 4, 5, 1]),
        "blocks must be different, got 5 at index 0 and at index 2",
    ),
    (
        "seal_blocks", "count", torch.tensor([5], dtype=torch.int32),
        "count must be between 0 and 4, got 5",
    ),
    (
        "decode_attention", "seq_lens", torch.tensor([128, 129, 5]),
        "seq_lens must be from 0 to 128 (max_seq_len), got 129 at index 1",
    ),
    (
        "decode_attention", "seq_lens", torch.tensor([128, 65, -1]),
        "seq_lens must be from 0 to 128 (max_seq_len), got -1 at index 2",
    ),
    (
        "decode_attention", "block_table", torch.tensor([[0, 1], [2, 6], [4, 5]]),
        "block_table must be block numbers below 6, got 6 at [1, 1]",
    ),
    (
        "decode_attention", "block_slot", torch.tensor([-1, 3, 4, -1, 1, -1]),
        "block_slot must be -1 or a staging slot below 4, got 4 of block 2 "
        "(block_table at [1, 0])",
    ),
    (
        "decode_attention", "cu_query_lens", torch.tensor([0, 2, 1, 3]),
        "cu_query_lens must be at least 2 at index 2, got 1",
    ),
    (
        "decode_attention", "cu_query_lens", torch.tensor([0, 1, 2, 4]),
        "cu_query_lens must be from 0 to 3 (the tokens of q), got 0 to 4",
    ),
    (
        "gather_kv", "cu_seq_lens", torch.tensor([0, 128, 193, 199]),
        "cu_seq_lens must be at most 198 (the rows of key), got 199 at index 3",
    ),
    (
        "gather_kv", "seq_lens", torch.tensor([128, 66, 5]),
        "seq_lens must be from 0 to 65 (the room that cu_seq_lens gives), got 66 at index 1",
    ),
    (
        "gather_kv", "block_table", torch.tensor([[0, 1], [2, -1], [4, 5]]),
        "block_table must be block numbers below 6, got -1 at [1, 1]",
    ),
    (
        "pack_bits", "codes", torch.full((2, 2, 16), 8, dtype=torch.uint8),
        "codes must be less than 8, got 8",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "bad", "message"), METADATA)
def test_fault19_bad_metadata(op: str, name: str, bad: Any, message: str) -> None:
    arguments = op_calls.call(op)
    if "block_table" in arguments:
        arguments["block_table"] = torch.arange(6).view(3, 2)
    outputs = written(op, arguments)
    before = {k: t.clone() for k, t in outputs.items()}
    with pytest.raises(RuntimeError) as error:
        op_calls.function(op)(**arguments | {name: bad})
    assert str(error.value) == f"kvarn::{op}: {message}"
    for k, t in outputs.items():
        assert torch.equal(t.view(torch.uint8), before[k].view(torch.uint8)), k


def test_pack_bits_writes_nothing_when_a_late_row_is_bad() -> None:
    codes = torch.zeros(2, 5, 16, dtype=torch.uint8)[:, :3]  # rows that are no single dimension
    codes[1, 2, 15] = 9
    out = torch.full((2, 3, 6), 171, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="codes must be less than 8, got 9"):
        ops.pack_bits(codes, 3, out=out)
    assert (out == 171).all()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_fault23_workspace_to_the_byte() -> None:
    arguments = op_calls.call("decode_attention")
    needed = ops.decode_workspace_bytes(
        FMT, num_seqs=3, num_q_heads=6, num_kv_heads=2, max_seq_len=128, num_tokens=3,
        split_tokens=64,
    )  # fmt: skip
    assert needed > 0
    memory = torch.full((needed + 64,), 171, dtype=torch.uint8)
    ops.decode_attention(**arguments | {"workspace": memory[:needed]})
    assert (memory[needed:] == 171).all()
    expected = arguments["out"][0].clone()

    arguments["out"][0].zero_()
    outputs = {"out": arguments["out"][0], "memory": memory}
    before = {name: t.clone() for name, t in outputs.items()}
    for workspace, message in [
        (memory[: needed - 1], f"of at least {needed} bytes, got {needed - 1}"),
        (memory[1 : needed + 1], "aligned to 16 bytes, got an address 1 bytes past"),
    ]:
        with pytest.raises(RuntimeError) as error:
            ops.decode_attention(**arguments | {"workspace": workspace})
        assert str(error.value) == f"kvarn::decode_attention: workspace must be {message}"
        for name, t in outputs.items():
            assert torch.equal(t, before[name]), name
    ops.decode_attention(**arguments | {"workspace": None})
    assert torch.equal(arguments["out"][0], expected)


# Direct calls of torch.ops.kvarn.

#: As TENSORS, for the arguments whose name or rule is not the same there.
RAW_TENSORS: dict[str, dict[str, str]] = {
    "hadamard_transform": {"x": f"{FLOATS} [..., D]"},
    "variance_normalize": {
        "tiles": f"{FLOATS} [N, R, C]",
        "balanced": "float32 [4, 5, 8]",
        "row_scale": "float32 [4, 5]",
        "col_scale": "float32 [4, 8]",
    },
    "pack_bits": {"codes": "uint8 [..., n]", "packed": "uint8 [2, 2, 6]"},
    "unpack_bits": {"packed": "uint8 [..., bytes]"},
    "quantize_tiles": {
        "key": f"{FLOATS} [N, 64, Hkv, 64]",
        "value": "float16 [2, 64, 2, 64]",
        "records": f"uint8 [2, 2, {RB}]",
    },
    "dequantize_tiles": {
        "records": f"uint8 [N, Hkv, {RB}]",
        "key": f"{FLOATS} [2, 64, 2, 64]",
        "value": "float16 [2, 64, 2, 64]",
    },
    "unpack_records": {"records": f"uint8 [N, Hkv, {RB}]", **CANONICAL},
    "pack_records": {
        **CANONICAL,
        "key_codes": "uint8 [N, Hkv, 64, 64]",
        "records": f"uint8 [2, 2, {RB}]",
    },
    "append_kv": {
        **TENSORS["append_kv"],
        "staging": f"{FLOATS} [slots, 2, 2, 64, 64]",
    },
    "seal_blocks": TENSORS["seal_blocks"],
    "decode_attention": {
        **{k: v for k, v in TENSORS["decode_attention"].items() if not k.startswith("out")},
        "out": "float16 [3, 6, 64]",
        "lse": "float32 [3, 6]",
    },
    "decode_workspace_bytes": {},
    "gather_kv": {
        **PAGED,
        "cu_seq_lens": f"{INDICES} [4]",
        "key": f"{FLOATS} [total_tokens, 2, 64]",
        "value": "float16 [198, 2, 64]",
    },
    "merge_states": {
        **{k: v for k, v in TENSORS["merge_states"].items() if not k.startswith("out[")},
        "out": "float16 [3, 6, 64]",
        "lse": "float32 [3, 6]",
    },
}
RAW_CONTIGUOUS = {
    "variance_normalize": {"balanced", "row_scale", "col_scale"},
    "unpack_records": set(CANONICAL),
    "pack_records": set(CANONICAL),
}
FORMAT_RULE = (
    "format must be bits 2, 3, 4 or 8, group 64 or 128, head_dim 64, 128, 256 or 512, got "
)
FORMAT_CASES = [
    ("key_bits", 5, f"{FORMAT_RULE}[5, 2, 64, 64]"),
    ("value_bits", 2**32 + 2, f"{FORMAT_RULE}[4, 4294967298, 64, 64]"),
    ("group", 32, f"{FORMAT_RULE}[4, 2, 32, 64]"),
    ("head_dim", -64, f"{FORMAT_RULE}[4, 2, 64, -64]"),
]
RAW_I32 = "between 0 and 2147483647"
RAW_VALUES: dict[str, list[tuple[str, Any, str]]] = {
    "hadamard_transform": [
        ("x", torch.ones(2, 48), "x must be a power of two in its last dimension, got 48"),
    ],
    "variance_normalize": [
        (
            "tiles",
            torch.ones(3, 1, 8),
            "tiles must be at least 2 in its last two dimensions, got [3, 1, 8]",
        ),
        ("iterations", -1, f"iterations must be {RAW_I32}, got -1"),
        ("iterations", 2**32, f"iterations must be {RAW_I32}, got 4294967296"),
    ],
    "pack_bits": [("bits", 9, "bits must be 1 to 8, got 9")],
    "unpack_bits": [
        ("bits", -1, "bits must be 1 to 8, got -1"),
        (
            "codes",
            torch.ones(2, 2, 17, dtype=torch.uint8),
            "packed must be uint8 [2, 2, 7] on cpu, got uint8 [2, 2, 6] on cpu",
        ),
        (
            "codes",
            torch.ones(3, 16, dtype=torch.uint8),
            "codes must be uint8 [2, 2, 16] on cpu, got uint8 [3, 16] on cpu",
        ),
    ],
    "quantize_tiles": [
        *FORMAT_CASES,
        ("fit", "mse", "fit must be 'minmax' or 'unbiased', got 'mse'"),
        ("iterations", -1, f"iterations must be {RAW_I32}, got -1"),
    ],
    "dequantize_tiles": FORMAT_CASES,
    "unpack_records": FORMAT_CASES,
    "pack_records": FORMAT_CASES,
    "append_kv": FORMAT_CASES,
    "seal_blocks": [
        *FORMAT_CASES,
        ("fit", "", "fit must be 'minmax' or 'unbiased', got ''"),
        ("iterations", 2**40, f"iterations must be {RAW_I32}, got 1099511627776"),
    ],
    "decode_attention": [
        *FORMAT_CASES,
        ("q", torch.ones(3, 5, 64), "q must be of a multiple of 2 heads, got 5"),
        ("staging", None, "staging and block_slot must be given together, got block_slot alone"),
        (
            "block_slot",
            torch.full((5,), -1, dtype=torch.int32),
            "block_slot must be of at least 6 blocks, got 5",
        ),
        (
            "cu_query_lens",
            None,
            "q must be of one token per sequence without cu_query_lens, 3 in all, got 4",
        ),
        ("sm_scale", math.nan, "sm_scale must be a finite float32 number, got nan"),
        (
            "logits_soft_cap",
            -1.0,
            "logits_soft_cap must be a finite float32 number and at least 0, got -1",
        ),
        ("window_left", -2, "window_left must be at least -1, got -2"),
        ("max_seq_len", -1, "max_seq_len must be between 0 and 1099511627776, got -1"),
        (
            "max_seq_len",
            129,
            "max_seq_len must be at most 128, the tokens of the table, got 129",
        ),
        ("split_tokens", 96, f"split_tokens must be {GROUP_MULTIPLE}, got 96"),
    ],
    "decode_workspace_bytes": [
        *FORMAT_CASES,
        ("num_seqs", -1, f"num_seqs must be {RAW_I32}, got -1"),
        ("num_tokens", 2**31, f"num_tokens must be {RAW_I32}, got 2147483648"),
        ("num_q_heads", 5, "num_q_heads must be a multiple of 2, got 5"),
        ("num_kv_heads", 0, "num_kv_heads must be at least 1, got 0"),
        ("max_seq_len", -1, "max_seq_len must be between 0 and 1099511627776, got -1"),
        ("split_tokens", -64, f"split_tokens must be {GROUP_MULTIPLE}, got -64"),
    ],
    "gather_kv": [
        *FORMAT_CASES,
        ("block_slot", None, "staging and block_slot must be given together, got staging alone"),
    ],
    "merge_states": [],
}
#: Whatever their value, they are right.
RAW_FREE = {"rotated", "causal", "scale", "like"}


def raw_outputs(op: str, arguments: Call) -> dict[str, Tensor]:
    schema = getattr(torch.ops.kvarn, op).default._schema
    return {
        a.name: arguments[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }


@pytest.mark.parametrize("op", op_calls.OPS)
def test_every_raw_argument_has_a_case(op: str) -> None:
    checked = {*RAW_TENSORS[op], *(name for name, _, _ in RAW_VALUES[op]), *RAW_FREE}
    assert {a.name for a in getattr(torch.ops.kvarn, op).default._schema.arguments} <= checked


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, rules in RAW_TENSORS.items() for name in rules]
)
def test_bad_raw_tensor(op: str, name: str) -> None:
    arguments = op_calls.raw(op)
    outputs = raw_outputs(op, arguments)
    contiguous = name in RAW_CONTIGUOUS.get(op, ())
    strided = contiguous or name in STRIDED.get(op, ()) or name in STRIDED_OUTPUTS.get(op, ())
    # A tensor on another device would make the dispatcher pick another kernel: first=True.
    for bad, message in violations(
        name,
        arguments[name],
        RAW_TENSORS[op][name],
        first=True,
        strided=strided,
        output=name in outputs and not contiguous,
    ):
        check_refused(op, arguments | {name: bad}, outputs, RuntimeError, message)
    if contiguous:
        bad = arguments[name].new_zeros((*arguments[name].shape, 2))[..., 0]
        message = f"{name} must be contiguous, got strides {list(bad.stride())}"
        check_refused(op, arguments | {name: bad}, outputs, RuntimeError, message)


@pytest.mark.parametrize(
    ("op", "name", "bad", "message"),
    [(op, *case) for op, cases in RAW_VALUES.items() for case in cases],
)
def test_bad_raw_value(op: str, name: str, bad: Any, message: str) -> None:
    arguments = op_calls.raw(op)
    if name == "cu_query_lens":
        arguments |= {"q": torch.ones(4, 6, 64)}
    outputs = raw_outputs(op, arguments)
    check_refused(op, arguments | {name: bad}, outputs, RuntimeError, message)


def test_raw_hadamard_out_is_checked() -> None:
    x = torch.ones(2, 64)
    out = torch.ones(2, 63)
    with pytest.raises(RuntimeError) as error:
        torch.ops.kvarn.hadamard_transform.out(x, None, out)
    assert str(error.value) == (
        "kvarn::hadamard_transform: out must be float32 [2, 64] on cpu, got float32 [2, 63] on cpu"
    )


def test_overlapping_tensors_are_refused() -> None:
    memory = torch.ones(3 * 64)
    x, shifted = memory[:128].view(2, 64), memory[64:].view(2, 64)
    cases = [
        ("hadamard_transform", lambda: ops.hadamard_transform(x, out=shifted), "out", "x"),
        (
            "dequantize_tiles",
            lambda: ops.dequantize_tiles(
                torch.zeros(1, 1, RB, dtype=torch.uint8),
                FMT,
                out=(torch.ones(1, 64, 1, 64).half(),) * 2,
            ),
            "key",
            "value",
        ),
        (
            "merge_states",
            lambda: ops.merge_states(
                x[None], torch.zeros(1, 2), x[None] + 1, torch.zeros(1, 2),
                out=(shifted[None], torch.zeros(1, 2)),
            ),
            "out",
            "out_a",
        ),
    ]  # fmt: skip
    for op, call, name, other in cases:
        with pytest.raises(RuntimeError) as error:
            call()
        assert str(error.value) == f"kvarn::{op}: {name} must not overlap {other}"
    assert (memory == 1).all()
