"""gather_kv on CUDA against the reference, over the same bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_cases import FORMATS, Case, row_errors
from torch import Tensor

from kvarn import Format, ops, reference

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
K4V2 = Format("kvarn_k4v2_g128", head_dim=128)


def on_device(case: Case) -> dict[str, Any]:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in case.paged.items()}


def gather(case: Case, starts: Tensor, total: int, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.gather_kv(
        **on_device(case), cu_seq_lens=starts.to(DEVICE), total_tokens=total, **options
    )


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS if f.head_dim <= 256], ids=lambda f: f"{f}-{f.head_dim}"
)
def test_fault13_every_format(fmt: Format, dtype: torch.dtype, rotated: bool) -> None:
    group = fmt.group
    case = Case(fmt, [group + 37, 0, 3 * group, 1], kv_heads=2, dtype=dtype, first_staged=False)
    exact = reference.gather_kv(**case.paged, cu_seq_lens=case.cu_seq_lens, rotated=rotated)
    got = gather(case, case.cu_seq_lens, sum(case.lengths), rotated=rotated)
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == dtype
        assert row_errors(x.cpu(), y).max() < torch.finfo(dtype).eps


def test_fault08_every_length() -> None:
    lengths = list(range(1, 301))
    case = Case(K4V2, lengths, dtype=torch.float16)
    exact = reference.gather_kv(**case.paged, cu_seq_lens=case.cu_seq_lens)
    got = gather(case, case.cu_seq_lens, sum(lengths))
    for x, y in zip(got, exact, strict=True):
        assert row_errors(x.cpu(), y).max() < 1e-3


def test_fault12_views_and_gaps() -> None:
    # Rows of no token, and everything beside the views, are left as they are.
    case = Case(K4V2, [130, 0, 300], kv_heads=2, dtype=torch.float16)
    starts = torch.tensor([5, 150, 150, 460])
    fused = torch.full((470, 2, 3, 2, 128), math.pi, dtype=torch.float16, device=DEVICE)
    key, value = fused[:, 0, 1], fused[:, 1, 2]
    gather(case, starts, 470, out=(key, value))
    exact = reference.gather_kv(**case.paged, cu_seq_lens=case.cu_seq_lens)
    for x, y in zip((key, value), exact, strict=True):
        tokens = torch.cat([x[5:135], x[150:450]]).cpu()
        assert row_errors(tokens, y).max() < 1e-3
        assert (torch.cat([x[:5], x[135:150], x[450:]]) == fused[0, 0, 0, 0, 0]).all()
    assert (fused[:, 0, 0] == fused[0, 0, 0, 0, 0]).all()


def test_fault21_graph_equals_eager() -> None:
    case = Case(K4V2, [300, 129, 0], kv_heads=2, dtype=torch.float16)
    paged = on_device(case)
    starts = case.cu_seq_lens.to(DEVICE)
    key, value = torch.zeros(2, 430, 2, 128, dtype=torch.float16, device=DEVICE).unbind()
    out = (key, value)
    ops.gather_kv(**paged, cu_seq_lens=starts, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gather_kv(**paged, cu_seq_lens=starts, out=out)
    for lengths in ([300, 129, 0], [7, 100, 0], [0, 0, 0]):
        paged["seq_lens"].copy_(torch.tensor(lengths))
        for t in out:
            t.fill_(7)
        graph.replay()
        replayed = [t.clone() for t in out]
        for t in out:
            t.fill_(7)
        ops.gather_kv(**paged, cu_seq_lens=starts, out=out)
        for x, y in zip(replayed, out, strict=True):
            assert torch.equal(x, y)


def test_fault19_checked_mode_names_the_offender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_CHECKED", "1")
    case = Case(K4V2, [300, 64], dtype=torch.float16)
    gather(case, case.cu_seq_lens, 364)
    with pytest.raises(RuntimeError, match="the room that cu_seq_lens gives"):
        gather(case, torch.tensor([0, 299, 363]), 364)
    with pytest.raises(RuntimeError, match="cu_seq_lens must be at most 363"):
        gather(case, case.cu_seq_lens, 363)
