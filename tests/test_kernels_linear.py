"""The linear, norm and activation kernels against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from kernel_helpers import DEVICE, DTYPE, HAS_GPU, TOLERANCE, error, gpu, load, randn
from torch import Tensor

from fastgraph.kernels import reference

linears, norms, launch = load("linear", "norm", "launch")
ROWS = (1, 2, 3, 20)


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def problem(rows: int, n: int, k: int, flags: tuple[bool, ...]) -> tuple[list, bool, Tensor | None, Tensor]:
    """Arguments of `linear` before `gated`, `gated`, the residual, and the answer."""
    biased, normed, gated, added = flags
    x, weight = randn(rows, k), randn(2 * n if gated else n, k, scale=k**-0.5)
    bias = randn(len(weight)) if biased else None
    norm = 1 + randn(k, scale=0.1) if normed else None
    residual = randn(rows, n) if added else None
    wide = [double(t) for t in (x, weight, bias, norm)]
    answer = reference.linear_reference(*wide, 1e-5, gated, double(residual))
    return [x, weight, bias, norm, 1e-5], gated, residual, answer


@pytest.mark.parametrize("flags", list(product((False, True), repeat=4)))
def test_a_linear_with_everything_folded_in_equals_the_separate_steps(flags: tuple[bool, ...]) -> None:
    for rows, (n, k) in product(ROWS, ((20, 24), (33, 40))):
        args, gated, residual, answer = problem(rows, n, k, flags)
        before = [None if t is None else t.clone() for t in args[:4]]
        out = linears.linear(*args, gated, residual)
        assert error(out, answer) < TOLERANCE
        assert out.dtype == DTYPE
        assert all(t is None or torch.equal(t, old) for t, old in zip(args[:4], before, strict=True))
        assert residual is None or out is residual


@pytest.mark.parametrize(("biased", "gated", "added"), list(product((False, True), repeat=3)))
def test_tiles_and_splits_of_the_inputs_add_up_to_the_whole(biased: bool, gated: bool, added: bool) -> None:
    n, k = 72, 160
    for rows, splits in product((3, 20), (1,) if gated else (1, 2, 4)):
        args, _, residual, answer = problem(rows, n, k, (biased, False, gated, added))
        plan = linears.TilePlan(16, 64 if HAS_GPU else 16, 32, splits, 4, 3)
        out = linears._tiled(*args[:3], gated, residual, "silu", plan)
        assert error(out, answer) < TOLERANCE
    assert not launch.counters(DEVICE).any()  # ready for the next launch


@pytest.mark.parametrize("rows", [2, 20])
def test_a_row_that_is_no_number_reaches_no_other(rows: int) -> None:
    for gated in (False, True):
        args, _, residual, answer = problem(rows, 72, 160, (False, True, gated, True))
        args[0][1::2], residual[1::2] = torch.nan, torch.nan
        out = linears.linear(*args, gated, residual.clone())
        assert error(out[::2], answer[::2]) < TOLERANCE
        args, _, residual, answer = problem(rows, 72, 160, (False, False, gated, True))
        args[0][1::2], residual[1::2] = torch.nan, torch.nan
        plan = linears.TilePlan(16, 64 if HAS_GPU else 16, 32, 1 if gated else 2, 4, 3)
        assert error(linears._tiled(*args[:3], gated, residual, "silu", plan)[::2], answer[::2]) < TOLERANCE


def test_every_plan_covers_its_weight() -> None:
    sizes = product((3, 16, 60, 128, 256), (64, 1000, 151936), (576, 1024, 14336), (False, True), (99 << 10, 227 << 10))
    for rows, n, k, gated, most in sizes:
        tile = linears.tile_plan(rows, n, k, gated, 132, most)
        shared = tile.stages * 2 * tile.depth * (tile.rows + tile.outputs * (2 if gated else 1))
        assert 16 <= tile.rows <= 256
        assert tile.stages >= 3  # before a Hopper one of them is no buffer
        assert shared > most / 2
        assert tile.depth >= 32
        assert shared <= most * 7 / 8
        assert tile.splits == 1 or not gated
        vector = linears.vector_plan(n, k, gated)
        assert vector.block >= 1
        assert vector.block & (vector.block - 1) == 0


@pytest.mark.parametrize("width", [7, 64, 1000])
def test_rms_norm_with_and_without_a_residual(width: int) -> None:
    x, residual, weight = randn(5, width), randn(5, width), randn(width)
    alone = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert error(norms.rms_norm(x, weight, 1e-6), alone) < TOLERANCE
    total = residual.double() + alone
    assert norms.rms_norm(x, weight, 1e-6, residual) is residual
    assert error(residual, total) < TOLERANCE


@pytest.mark.parametrize("width", [7, 1024, 1500])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gate_mul(width: int, activation: str) -> None:
    x = randn(3, 2 * width, scale=3.0)
    assert error(norms.gate_mul(x, activation), reference.gate_mul(x.double(), activation)) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_gated_by_gelu(rows: int) -> None:
    for shape in ((33, 40), (72, 160)):
        (x, weight, *_), *_ = problem(rows, *shape, (False, False, True, False))
        answer = reference.linear_reference(x.double(), weight.double(), gated=True, activation="gelu")
        assert error(linears.linear(x, weight, gated=True, activation="gelu"), answer) < TOLERANCE
        if rows > 1:
            plan = linears.TilePlan(16, 64 if HAS_GPU else 16, 32, 1, 4, 3)
            assert error(linears._tiled(x, weight, None, True, None, "gelu", plan), answer) < TOLERANCE


def test_a_float32_norm_is_applied_before_rounding() -> None:
    x, weight = randn(4, 256).half(), 1 + 0.1 * torch.randn(256, device=DEVICE)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    want = (wide * weight).half()
    for got in (norms.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got, want, rtol=2**-10, atol=0)  # a last bit may round the other way
        assert (got == want).float().mean() > 0.99


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (2048, 8192), (6144, 4096), (151936, 1024)])
def test_the_layers_of_real_models_at_every_kind_of_batch(shape: tuple[int, int]) -> None:
    n, k = shape
    flags = [(False, True, False, False), (False, False, False, True), (False, True, True, False)]
    for rows, flag in product((1, 2, 5, 16, 33, 64, 100, 200, 300), flags if n < 100_000 else flags[:1]):
        args, gated, residual, answer = problem(rows, n, k, flag)
        assert error(linears.linear(*args, gated, residual), answer) < TOLERANCE


@pytest.mark.gpu
@gpu
def test_kernels_that_overlap_in_a_captured_graph_equal_those_that_run_alone() -> None:
    shapes = ((1024,), (2 * 3072, 1024), (1024, 3072))
    layers = [[randn(*shape, scale=0.03) + (len(shape) == 1) for shape in shapes] for _ in range(8)]
    for rows in (1, 4, 40):
        start = randn(rows, 1024)

        def run(x: Tensor, wait: bool = False) -> Tensor:
            for norm, up, down in layers:
                y = linears.linear(x, up, norm=norm, eps=1e-6, gated=True)
                if wait:
                    torch.cuda.synchronize()
                x = linears.linear(y, down, residual=x)
                if wait:
                    torch.cuda.synchronize()
            return x

        alone = run(start.clone(), wait=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(start.clone())
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, alone)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rows", [65, 100, 128])
def test_a_large_gated_layer_of_many_rows_in_wide_tiles(rows: int) -> None:
    n, k = 8200, 4160  # outputs that fill no tile at the end
    assert linears.tile_plan(rows, n, k, True, 132, launch.shared_memory(DEVICE)).outputs == 128
    args, gated, residual, answer = problem(rows, n, k, (False, True, True, False))
    assert error(linears.linear(*args, gated, residual), answer) < TOLERANCE
