"""The adapters of bench/peers hand over the right inputs.

torch's own are run. The packages that need a GPU are stood in for by modules of the same interface
that compute in plain torch on the CPU, so that page tables, masks, layouts and types are checked;
whether the packages themselves still have that interface is not.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from pathlib import Path

import pytest
import torch

from bench import harness
from bench.ops import ROUTINES
from bench.ops.decode_attention import sequence_lengths
from bench.peers import all_peers, kvarn_triton
from bench.peers.adapter import AbsentError
from bench.problems import Attention, Packed
from bench.routine import relative_error
from kvarn import Format, formats_interop, reference

CPU = torch.device("cpu")
FMT = Format("kvarn_k4v2_g64", head_dim=64)


@pytest.fixture(autouse=True)
def two_input_sets(monkeypatch):
    monkeypatch.setattr(harness, "cache_bytes", lambda device: 0)


def peer(name: str, op: str = "decode_attention", checkout: Path | None = None):
    (found,) = [
        p for p in all_peers(checkout) if (p.name, p.op) == (name, op) and p.device != "cpu"
    ]
    return found


def attention(lengths: list[int], count: int = 1, dtype: torch.dtype = torch.float16) -> Attention:
    packed = Packed(FMT, lengths, 2, 2, CPU)
    return Attention(packed, torch.randn(len(lengths) * count, 8, 64).to(dtype), count)


def over_pages(q, key, value, ids, lengths, causal=True):
    """q [B, n, Hq, D] over sequences whose pages [P, size, Hkv, D] are ``ids[b]``, in float64."""
    outs = []
    for rows, pages, length in zip(q.double(), ids, lengths, strict=True):
        k, v = (pool[pages].flatten(0, 1)[:length].double() for pool in (key, value))
        k, v = (x.repeat_interleave(rows.shape[1] // x.shape[1], 1) for x in (k, v))
        score = torch.einsum("nhd,lhd->hnl", rows, k) * rows.shape[-1] ** -0.5
        n = len(rows)
        if causal:
            seen = torch.arange(length) <= length - n + torch.arange(n)[:, None]
            score = score.masked_fill(~seen, -math.inf)
        outs.append(torch.einsum("hnl,lhd->nhd", score.softmax(-1), v))
    return torch.stack(outs).to(q.dtype)


# --------------------------------------------------------------------------------------------------
# torch


#: Of what torch.compile is used for the simplest and the one with most to trace.
CASES = {
    "hadamard_transform": {"shape": [4, 64], "dtype": "float16", "in_place": False},
    "variance_normalize": {"shape": [2, 128, 128], "iterations": 1},
    "decode_attention": {
        "batch": 2, "context": 200, "group_size": 2, "head_dim": 64, "query_tokens": 1,
    },
}  # fmt: skip
ON_CPU = [p for p in all_peers() if p.device == "cpu" and p.op in CASES]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("p", ON_CPU, ids=lambda p: f"{p.name}-{p.op}")
def test_peers_on_the_cpu_agree(p, monkeypatch):
    """torch.compile without its code generator, which takes too long here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    prepared = ROUTINES[p.op].prepare(CASES[p.op], FMT, CPU)
    assert prepared.error() <= prepared.max_error
    calls = p.prepare(prepared.problem)
    assert prepared.peer_error(calls[0]()) <= p.max_error
    assert len(calls) >= 2


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (lambda: attention([70, 64]), "takes sequences of one length"),
        (lambda: attention([70, 70], 2), "its causal mask is not that of the last tokens"),
    ],
)
def test_sdpa_says_what_it_cannot_do(problem, reason):
    with pytest.raises(AbsentError, match=reason):
        peer("cuDNN fp16").prepare(problem())


# --------------------------------------------------------------------------------------------------
# Packages, by stand-ins


def test_what_is_not_installed_is_named():
    for p in all_peers():
        if p.name.startswith(("flash-attn", "FlashInfer")) and p.op == "decode_attention":
            with pytest.raises(AbsentError, match="flash.* is not installed"):
                p.prepare(attention([64]))


class FlashInferWrapper:
    def __init__(self, workspace, layout, use_tensor_cores=False, backend="auto"):
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self.backend = backend

    def _plan(self, rows, indptr, indices, last, heads, kv_heads, dim, page, kv_data_type):
        assert {t.dtype for t in (rows, indptr, indices, last)} == {torch.int32}
        assert self.backend == ("auto" if kv_data_type == torch.float16 else "fa2")
        self.rows, self.type = rows.tolist(), kv_data_type
        self.ids = [indices[a:b].long() for a, b in zip(indptr[:-1], indptr[1:], strict=True)]
        self.lengths = [(len(i) - 1) * page + int(n) for i, n in zip(self.ids, last, strict=True)]
        self.shape = (page, kv_heads, dim)

    def run(self, q, paged):
        key, value = paged
        assert key.dtype == value.dtype == self.type
        assert key.shape[1:] == value.shape[1:] == self.shape
        counts = {b - a for a, b in zip(self.rows[:-1], self.rows[1:], strict=True)}
        (n,) = counts
        query = q.view(-1, n, *q.shape[1:])
        out = over_pages(query, key.half(), value.half(), self.ids, self.lengths)
        return out.view(q.shape)


class FlashInferDecode(FlashInferWrapper):
    def plan(self, indptr, indices, last, *sizes, q_data_type, kv_data_type):
        assert q_data_type == torch.float16
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(rows, indptr, indices, last, *sizes, kv_data_type)


class FlashInferPrefill(FlashInferWrapper):
    def plan(self, rows, indptr, indices, last, *sizes, causal, q_data_type, kv_data_type):
        assert causal and q_data_type == torch.float16
        self._plan(rows, indptr, indices, last, *sizes, kv_data_type)


def merge_base_2(out_a, lse_a, out_b, lse_b):
    ln2 = math.log(2)
    return reference.merge_states(out_a, lse_a * ln2, out_b, lse_b * ln2)


@pytest.fixture
def flashinfer(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = FlashInferDecode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = FlashInferPrefill  # type: ignore[attr-defined]
    module.merge_state = merge_base_2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("bench.peers.flashinfer.WORKSPACE_BYTES", 16)


PROBLEMS = [([200, 200], 1), (sequence_lengths(5, "1-400"), 1), ([200, 64, 129], 4)]


@pytest.mark.parametrize(("lengths", "count"), PROBLEMS)
@pytest.mark.parametrize(("name", "low", "high"), [
    ("FlashInfer fp16", 0, 1e-3),
    ("FlashInfer fp8", 1e-2, 8e-2),  # three bits of mantissa are seen, and pass
])  # fmt: skip
def test_flashinfer(flashinfer, name, low, high, lengths, count):
    problem = attention(lengths, count)
    calls = peer(name).prepare(problem)
    error = relative_error(calls[0](), problem.exact())
    assert low <= error <= high <= max(peer(name).max_error, 1e-3)
    assert len(calls) == 2
    assert torch.equal(calls[0](), calls[1]())


def test_flashinfer_merge(flashinfer):
    prepared = ROUTINES["merge_states"].prepare({"tokens": 3, "head_dim": 64}, None, CPU)
    (call, *_) = peer("FlashInfer", "merge_states").prepare(prepared.problem)
    assert prepared.peer_error(call()) < 1e-3


@pytest.mark.parametrize(("lengths", "count"), PROBLEMS)
@pytest.mark.parametrize(("version", "module_name", "table_argument"), [
    (2, "flash_attn", "block_table"), (3, "flash_attn_interface", "page_table")
])  # fmt: skip
def test_flash_attn(monkeypatch, version, module_name, table_argument, lengths, count):
    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, causal, **table):
        assert causal and list(table) == [table_argument]
        assert table[table_argument].dtype == cache_seqlens.dtype == torch.int32
        assert k_cache.shape[1] % 256 == 0
        ids = [
            row[: -(-int(n) // k_cache.shape[1])].long()
            for row, n in zip(table[table_argument], cache_seqlens, strict=True)
        ]
        out = over_pages(q, k_cache, v_cache, ids, cache_seqlens.tolist())
        return (out, None) if version == 3 else out

    module = types.ModuleType(module_name)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module_name, module)
    problem = attention(lengths, count)
    calls = peer(f"flash-attn {version} fp16").prepare(problem)
    assert relative_error(calls[0](), problem.exact()) < 1e-3


def test_hadamard_peers(monkeypatch):
    module = types.ModuleType("fast_hadamard_transform")
    module.hadamard_transform = lambda x, scale: reference.hadamard_transform(x, scale=scale)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fast_hadamard_transform", module)
    case = {"shape": [4, 64], "dtype": "float16", "in_place": False}
    prepared = ROUTINES["hadamard_transform"].prepare(case, None, CPU)
    for name in ("matmul with H", "fast-hadamard-transform"):
        calls = peer(name, "hadamard_transform").prepare(prepared.problem)
        assert prepared.peer_error(calls[0]()) < 1e-3


# --------------------------------------------------------------------------------------------------
# The Triton implementation: two files of a made-up checkout that take the arguments of the fork's.

DECODE = """
from vllm.triton_utils import tl, triton

assert triton.language is tl


def adaptive_num_kv_splits(max_blocks_per_req):
    return 2


def kvarn_decode_attention(query, kv_cache, hadamard, scale, cfg, impl, md):
    return ATTEND(query, kv_cache, hadamard, scale, cfg, impl, md)
"""

SINKHORN = """
from vllm.triton_utils import tl, triton
from kvarn import reference


def kvarn_sinkhorn_triton(tiles, iterations=16):
    balanced, rows, cols = reference.variance_normalize(tiles, iterations=iterations)
    return balanced, cols, rows
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / kvarn_triton.FOLDER
    folder.mkdir(parents=True)
    (folder / "triton_kvarn_decode.py").write_text(DECODE)
    (folder / "triton_kvarn_sinkhorn.py").write_text(SINKHORN)
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.language = language  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    return tmp_path


def test_triton_attention(checkout, monkeypatch):
    """The records, read by the layout that the adapter states, give the same attention."""

    def attend(query, cache, hadamard, scale, cfg, impl, md):
        assert impl._mid_o_buf.shape == (query.shape[0] * query.shape[1], 2, query.shape[2])
        assert (impl._block_to_slot_t == -1).all()
        assert md.block_table.max() < len(cache) == impl._block_lookup_size
        assert scale == FMT.head_dim**-0.5
        records = formats_interop.from_triton(cache, FMT)
        out, _ = reference.decode_attention(query, records, md.block_table, md.seq_lens, FMT)
        return out.to(query.dtype)

    load = kvarn_triton._load

    def load_with_attend(*arguments):
        module = load(*arguments)
        module.ATTEND = attend
        return module

    monkeypatch.setattr(kvarn_triton, "_load", load_with_attend)
    problem = attention([200, 70])
    calls = peer("KVarN, Triton", checkout=checkout).prepare(problem)
    assert relative_error(calls[0](), problem.exact()) < 5e-3  # offsets are rounded to fp16
    assert "vllm" not in sys.modules


def test_triton_layout():
    """Offsets of fields in its record (kvarn.formats_interop says what lies where)."""
    layout = kvarn_triton._layout(FMT)
    canonical = reference.unpack_records(Packed(FMT, [64], 1, 2, CPU).records, FMT)
    record = formats_interop.to_triton(reference.pack_records(canonical, FMT), FMT)[0, 0]
    for offset, field in {
        layout.k_s_col_offset: canonical.key_channel_scale,
        layout.k_s_row_offset: canonical.key_token_scale,
        layout.v_s_col_offset: canonical.value_channel_scale,
        layout.v_s_row_offset: canonical.value_token_scale,
    }.items():
        expected = field[0, 0]
        found = record[offset : offset + 2 * len(expected)].view(torch.float16)
        assert torch.equal(found, expected)
    assert (layout.k_packed_offset, layout.v_zp_offset) == (0, FMT.record_bytes - 2 * FMT.group)


def test_triton_normalization(checkout):
    case = {"shape": [2, 128, 128], "iterations": 1}
    prepared = ROUTINES["variance_normalize"].prepare(case, None, CPU)
    calls = peer("KVarN, Triton", "variance_normalize", checkout).prepare(prepared.problem)
    assert prepared.peer_error(calls[0]()) < 1e-3


def test_triton_says_why_not(checkout, tmp_path):
    with pytest.raises(AbsentError, match="give a checkout of it by --kvarn-triton PATH"):
        peer("KVarN, Triton").prepare(attention([64]))
    with pytest.raises(AbsentError, match="triton_kvarn_decode.py does not exist"):
        peer("KVarN, Triton", checkout=tmp_path / "nowhere").prepare(attention([64]))
    with pytest.raises(AbsentError, match="one query token"):
        peer("KVarN, Triton", checkout=checkout).prepare(attention([64], 2))
