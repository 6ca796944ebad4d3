"""hadamard_transform on CUDA: against float64, at every address and shape, and in graphs."""

from __future__ import annotations

import math

import pytest
import torch

import kvarn
from kvarn import ops

pytestmark = pytest.mark.cuda

DIMS = (16, 32, 64, 128, 256, 512, 1024)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIGNIFICAND_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150}


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals NaN and +0 differs from -0."""
    return x.contiguous().view(torch.uint8)


def sylvester(dim: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64, device="cuda")
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def assert_close(got: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    """Every element is the exact result, within log2(D)+1 roundings in fp32 and the last one."""
    dim = x.shape[-1]
    exact = scale * (x.double() @ sylvester(dim))
    fp32 = 2.0**-24 * (math.log2(dim) + 1) * abs(scale) * x.double().abs().sum(-1, keepdim=True)
    last = exact.abs() * 2.0 ** -SIGNIFICAND_BITS[x.dtype] + SMALLEST[x.dtype]
    excess = (got.double() - exact).abs() - (last + fp32)
    assert got.dtype == x.dtype
    assert not got.isnan().any()
    assert excess.max() <= 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_equals_float64(dim: int, dtype: torch.dtype) -> None:
    # One row, less than a warp's, and more than a block's share that does not divide evenly.
    for rows in (1, 3, 31, 4097):
        x = randn(rows, dim, dtype=dtype, seed=rows)
        out = torch.full_like(x, math.nan)
        assert ops.hadamard_transform(x, out=out) is out
        assert_close(out, x, dim**-0.5)
        assert torch.equal(bits(ops.hadamard_transform(x)), bits(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, -0.25, 3.7])
def test_scale(scale: float, dtype: torch.dtype) -> None:
    x = randn(129, 128, dtype=dtype)
    assert_close(ops.hadamard_transform(x, scale=scale), x, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_its_own_inverse(dim: int, dtype: torch.dtype) -> None:
    x = randn(513, dim, dtype=dtype)
    back = ops.hadamard_transform(ops.hadamard_transform(x))
    error = (back.double() - x.double()).norm() / x.double().norm()
    assert error < 2.0 ** (1 - SIGNIFICAND_BITS[dtype]) + 3e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_equals_the_cpu(dim: int, dtype: torch.dtype) -> None:
    x = randn(257, dim, dtype=dtype)
    on_cpu = ops.hadamard_transform(x.cpu()).double()
    error = (ops.hadamard_transform(x).cpu().double() - on_cpu).norm() / on_cpu.norm()
    # Another order of the additions; it moves a few of the last roundings to 16 bits.
    assert error < (3e-7 if dtype is torch.float32 else 2.0 ** (-3 - SIGNIFICAND_BITS[dtype]))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (64,), (1, 64), (2, 3, 1, 5, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    out = ops.hadamard_transform(x)
    assert out.shape == x.shape
    rows = ops.hadamard_transform(x.reshape(-1, 64))
    assert torch.equal(bits(out), bits(rows.view(shape)))


def views(dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Views of poisoned buffers as models make them: [rows..., dim] of each, the rest is NaN."""

    def buffer(*shape: int) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device="cuda")

    n, h = 37, 3
    found = {
        f"offset of {k} elements": buffer(n * h * dim + 64)[k : k + n * h * dim].view(n, h, dim)
        for k in (1, 2, 4, 8)
    }
    found["rows with odd padding"] = buffer(n, h, dim + 1)[..., :dim]
    found["rows with 16 bytes of padding"] = buffer(n, h, dim + 8)[..., 8:]
    found["query of a fused buffer"] = buffer(n, 3, h, dim)[:, 0]
    found["value of a fused buffer"] = buffer(n, 3, h, dim)[:, 2]
    found["transposed rows"] = buffer(h, n, dim).transpose(0, 1)
    found["every second row"] = buffer(n, 2 * h, dim)[:, ::2]
    found["three strided dimensions"] = buffer(5, 7, 2 * h, dim + 8)[:, 1:6, ::2, :dim]
    found["four strided dimensions"] = buffer(3, 4, 5, 2 * h, dim).permute(2, 0, 3, 1, 4)[:, ::2]
    found["a dimension of size 1 with an odd stride"] = torch.as_strided(
        buffer(n * dim + 64), (n, 1, dim), (dim, 7, 1)
    )
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_fault12_strided_and_offset_views(dim: int, dtype: torch.dtype) -> None:
    inputs, outputs = views(dim, dtype), views(dim, dtype)
    for name in inputs:
        x, out = inputs[name], outputs[name]
        values = randn(*x.shape, dtype=dtype)
        want = bits(ops.hadamard_transform(values))
        x.copy_(values)
        assert torch.equal(bits(ops.hadamard_transform(x)), want), name
        # Into a view: nothing beside it is written.
        storage = torch.as_strided(
            out, (out.untyped_storage().nbytes() // out.element_size(),), (1,), 0
        )
        expected = torch.full_like(storage, math.nan)
        torch.as_strided(expected, out.shape, out.stride(), out.storage_offset()).copy_(
            want.view(dtype).view(out.shape)
        )
        ops.hadamard_transform(values, out=out)
        assert torch.equal(bits(storage), bits(expected)), name
        # In place, through the same view.
        ops.hadamard_transform(x, out=x)
        assert torch.equal(bits(x), want), name


def test_fault12_expanded_input() -> None:
    x = randn(1, 5, 128)
    out = ops.hadamard_transform(x.expand(7, 5, 128))
    assert torch.equal(bits(out), bits(ops.hadamard_transform(x).expand(7, 5, 128)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault03_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    for dim in DIMS:
        x = randn(300, dim, dtype=dtype)
        clean = ops.hadamard_transform(x)
        bad = torch.arange(300, device="cuda") % 7 == 3
        x[bad, 5] = math.nan
        x[17] = math.inf
        bad[17] = True
        out = ops.hadamard_transform(x)
        assert torch.equal(bits(out[~bad]), bits(clean[~bad]))
        assert out[bad & (torch.arange(300, device="cuda") != 17)].isnan().all()
        assert not out[17].isfinite().any()


def test_fault01_sums_above_the_16_bit_range_do_not_overflow_on_the_way() -> None:
    for dim in DIMS:
        x = torch.full((5, dim), 60000.0, dtype=torch.float16, device="cuda")
        out = ops.hadamard_transform(x, scale=1 / dim)
        assert (out[:, 0] == 60000).all()
        assert (out[:, 1:] == 0).all()


@pytest.mark.parametrize("dim", DIMS)
def test_fault10_70000_rows(dim: int) -> None:
    x = randn(70_000, dim)
    assert_close(ops.hadamard_transform(x), x, dim**-0.5)


def test_fault10_more_than_2_to_the_31_elements() -> None:
    pattern = randn(1021, 128)
    want = bits(ops.hadamard_transform(pattern))
    repeats = 2**31 // pattern.numel() + 2
    x = pattern.repeat(repeats, 1)
    assert x.numel() > 2**31
    ops.hadamard_transform(x, out=x)
    assert (x.view(torch.uint8).view(repeats, 1021, -1) == want).all()
    # Strides beyond 32 bits.
    far = x.view(-1)[: 2 * (2**30) + 128].as_strided((3, 128), (2**30, 1))
    values = randn(3, 128, seed=1)
    far.copy_(values)
    assert torch.equal(bits(ops.hadamard_transform(far)), bits(ops.hadamard_transform(values)))


def test_runs_on_the_current_stream() -> None:
    x = torch.zeros(4096, 128, dtype=torch.float16, device="cuda")
    out = torch.empty_like(x)
    values = randn(4096, 128)
    want = ops.hadamard_transform(values)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # the copy is still to come when the op is launched
        x.copy_(values)
        ops.hadamard_transform(x, out=out)
    stream.synchronize()
    assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault21_graph_replay_equals_eager(dtype: torch.dtype) -> None:
    x = randn(1000, 256, dtype=dtype)
    out = torch.empty_like(x)
    ops.hadamard_transform(x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.hadamard_transform(x, out=out)
        functional = ops.hadamard_transform(x, scale=0.5)
    for seed in (1, 2):
        x.copy_(randn(1000, 256, dtype=dtype, seed=seed))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(bits(out), bits(ops.hadamard_transform(x)))
        assert torch.equal(bits(functional), bits(ops.hadamard_transform(x, scale=0.5)))


def test_fault07_repeats_are_bit_identical() -> None:
    x = randn(10_000, 512)
    first = bits(ops.hadamard_transform(x))
    for _ in range(20):
        assert torch.equal(bits(ops.hadamard_transform(x)), first)
    # A row does not depend on the others.
    assert torch.equal(bits(ops.hadamard_transform(x[1234:1235])), first[1234:1235])


def test_gradient() -> None:
    x = randn(33, 64, dtype=torch.float32).requires_grad_()
    weight = randn(33, 64, dtype=torch.float32, seed=1)
    (ops.hadamard_transform(x, scale=0.3) * weight).sum().backward()
    assert torch.equal(x.grad, ops.hadamard_transform(weight, scale=0.3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    x = randn(5, 3, 128, dtype=dtype)
    op = torch.ops.kvarn.hadamard_transform
    torch.library.opcheck(op.default, (x.clone().requires_grad_(),), {"scale": 0.5})
    torch.library.opcheck(op.default, (x.transpose(0, 1), None))
    torch.library.opcheck(op.out, (x, None, torch.empty_like(x)))


def test_compile() -> None:
    x = randn(65, 128)
    compiled = torch.compile(lambda t: ops.hadamard_transform(t + 1) * 2, fullgraph=True)
    want = ops.hadamard_transform(x + 1) * 2
    assert torch.equal(bits(compiled(x)), bits(want))


@pytest.mark.parametrize("dim", [1, 2, 8, 2048])
def test_errors_of_dimensions_without_a_kernel(dim: int) -> None:
    x = randn(4, dim)
    out = torch.full_like(x, 7)
    rule = f"from 16 to 1024 in its last dimension on CUDA, got {dim}$"
    with pytest.raises(ValueError, match=f"^kvarn::hadamard_transform: x must be .*{rule[5:]}"):
        ops.hadamard_transform(x, out=out)
    with pytest.raises(RuntimeError, match=f"kvarn::hadamard_transform: x must be .*{rule[:-1]}"):
        torch.ops.kvarn.hadamard_transform.out(x, None, out)
    assert (out == 7).all()


def test_errors_of_two_devices() -> None:
    x = randn(4, 64)
    with pytest.raises(ValueError, match=r"kvarn::hadamard_transform: out must be .* on cuda:0"):
        ops.hadamard_transform(x, out=torch.empty(4, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"kvarn::hadamard_transform: out must be .* on cpu"):
        ops.hadamard_transform(x.cpu(), out=x)


def test_is_in_the_list_of_cuda_ops() -> None:
    assert "hadamard_transform" in kvarn._backends.CUDA_OPS
