"""Linear layers of a decode step: each weight is read once, near the speed of memory, with the norm before it and the
gate or the residual after it folded in.

One row: a matrix-vector kernel whose programs hold whole rows of the weight in registers, loaded before they wait for
their input. A few rows: a tensor-core product whose tiles are as narrow as the batch. Many: cuBLAS.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from fastgraph.kernels.launch import (
    can_overlap,
    cdiv,
    counters,
    gdc_launch_dependents,
    gdc_wait,
    multiprocessors,
    power_of_two,
    prefetch,
    shared_memory,
)
from fastgraph.kernels.norm import activate, gate_mul, rms_norm

_SMALL = 1 << 24  # weights; how many decides between the plans, as measured on an H200 for models of 0.6B to 8B


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """x @ weight.T + bias, of the RMS-normed x if `norm` is given; then act(gate) * up if `gated`; then + residual.

    x: [rows, k]; weight: [n, k] contiguous, or [2 * n, k] if gated, gate first; bias: as many as the weight has rows;
    norm: [k], with `eps`; residual: [rows, n] contiguous, which takes the sum and is returned. Returns [rows, n].
    In plain PyTorch: `linear_reference`.
    """
    x = x.contiguous()
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    if rows == 1 or (rows == 2 and weight.numel() <= _SMALL // 2):
        return _vector(x, weight, bias, norm, eps, gated, residual, activation)
    if norm is not None:
        x = rms_norm(x, norm, eps)
    # float32 is for comparing, not for speed, and tensor cores would round it.
    tiles = x.element_size() == 2 and k % 8 == 0 and can_overlap(x.device)
    if tiles and rows <= most_tiled_rows(n, k, gated):
        plan = tile_plan(rows, n, k, gated, multiprocessors(x.device), shared_memory(x.device))
        return _tiled(x, weight, bias, gated, residual, activation, plan)
    if residual is not None and bias is None and not gated:
        return residual.addmm_(x, weight.t())  # cuBLAS adds
    y = F.linear(x, weight, bias)
    y = gate_mul(y, activation) if gated else y
    return y if residual is None else residual.add_(y)


class VectorPlan(NamedTuple):
    """How the matrix-vector kernel cuts a weight."""

    block: int  # outputs of a program
    warps: int


@cache
def vector_plan(n: int, k: int, gated: bool) -> VectorPlan:
    """Large weights are read with 256 bytes a thread; small ones with 128, so that every multiprocessor has a share."""
    width, rows = power_of_two(k), 2 if gated else 1
    small = n * rows * k < _SMALL // 2
    warps = min(max(width // (512 if small else 256), 2), 8)
    block = (128 if small else 256) * 32 * warps // (2 * width * rows)
    return VectorPlan(max(block, 1), warps)


def _vector(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    plan = vector_plan(n, k, gated)
    y = x.new_empty(rows, n) if residual is None else residual
    overlap = can_overlap(x.device)
    grid, tensors = (cdiv(n, plan.block),), (x, norm, weight, bias, residual, y)
    sizes, kind = (n, k, rows, plan.block, power_of_two(k)), (gated, activation == "gelu")
    _vector_kernel[grid](*tensors, eps, *sizes, *kind, overlap, num_warps=plan.warps, launch_pdl=overlap)
    return y


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _vector_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    HALVES: tl.constexpr = 2 if GATED else 1
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, HALVES * BLOCK)  # the program's rows of the weight: those of the gate, then those of up
    row = tl.program_id(0) * BLOCK + r % BLOCK
    at = (row + r // BLOCK * N).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    w = tl.load(weight_ptr + at[:, None] * K + k[None, :], mask=(row < N)[:, None] & in_k[None, :], other=0.0)
    if norm_ptr is not None:
        g = tl.load(norm_ptr + k, mask=in_k, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    for m in tl.static_range(ROWS):
        x = tl.load(x_ptr + m * K + k, mask=in_k, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            # The length of x is known only at the end, with the product: one reduction instead of two in a row.
            squares = tl.broadcast_to((x * x)[None, :], (HALVES * BLOCK, BLOCK_K))
            y, square = tl.reduce((w.to(tl.float32) * (x * g)[None, :], squares), 1, _add_pairs)
            y *= tl.rsqrt(square / K + eps)
        else:
            y = tl.sum(w.to(tl.float32) * x[None, :], 1)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + at, mask=row < N, other=0.0).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.trans(tl.reshape(y, (2, BLOCK))))
            y = activate(gate, GELU) * up
        if residual_ptr is not None:
            y += tl.load(residual_ptr + m * N + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + m * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


class TilePlan(NamedTuple):
    """How the tensor-core kernel cuts a product."""

    rows: int  # rows of x in a tile
    outputs: int
    depth: int  # of the inputs, a step
    splits: int  # programs that share a tile, each with a part of the inputs
    warps: int
    stages: int


def most_tiled_rows(n: int, k: int, gated: bool) -> int:
    """Up to how many rows the tensor-core kernel beats cuBLAS, which would need a second kernel for a gated layer.

    As measured on an H200, for the layers of models of 0.6B to 8B.
    """
    if n * k > 8 * _SMALL:  # a head
        return 16
    if n * k > 2 * _SMALL:
        return 128 if gated else 64
    if n * k >= _SMALL and not gated:
        return 64
    return 256 if gated or n >= 4 * k else 128


@cache
def tile_plan(rows: int, n: int, k: int, gated: bool, multiprocessors: int, shared: int) -> TilePlan:
    """Tiles of 64 outputs, or of 128 in large gated layers of many rows. The inputs are split where there are few tiles
    and much to read for each, and read 64, 128 or 256 at a time.

    shared: bytes that a program may have; what it does not keep for other things holds the stages. They take more than
    half of it: programs begin while the kernel before theirs still runs, and two to a multiprocessor would crowd on the
    first that are free, and leave the others with nothing to read.
    """
    height = max(power_of_two(rows), 16)
    if height > 64 and n * k * (2 if gated else 1) <= _SMALL:
        height //= 2
    outputs = 128 if gated and height == 128 and n * k > 2 * _SMALL else 64
    depth = 128 if height + outputs * (2 if gated else 1) <= 192 else 64
    tiles, splits = cdiv(rows, height) * cdiv(n, outputs), 1
    while not gated and splits < 8:
        wave = 2 * tiles * splits / multiprocessors
        if not ((wave <= 0.5 and k >= 1024 * splits) or (wave <= 1 and k >= 4096 * splits)):
            break
        splits *= 2
    if height == 16 and not gated and k >= 2048 * splits:
        depth = 256
    room, line = shared * 7 // 8, 2 * (height + outputs * (2 if gated else 1))  # bytes; of an input's share of a stage
    while 3 * depth * line > room and depth > 16:
        depth //= 2
    warps = 8 if height > 128 or outputs > 64 else 4
    stages = max(shared // 2 // (depth * line) + 1, 5)
    return TilePlan(height, outputs, depth, splits, warps, min(stages, room // (depth * line)))


def _tiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    residual: Tensor | None,
    activation: str,
    plan: TilePlan,
) -> Tensor:
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    y = x.new_empty(rows, n) if residual is None else residual
    grid = (cdiv(rows, plan.rows), cdiv(n, plan.outputs), plan.splits)
    tiles = grid[0] * grid[1]
    parts = None
    if plan.splits > 1:
        parts = x.new_empty(tiles * plan.splits * plan.rows * plan.outputs, dtype=torch.float32)
    overlap = can_overlap(x.device)
    x_tiles = TensorDescriptor.from_tensor(x, [plan.rows, plan.depth])
    weight_tiles = TensorDescriptor.from_tensor(weight, [plan.outputs, plan.depth])
    tensors = (x_tiles, weight_tiles, weight, bias, residual, y, parts, counters(x.device))
    sizes = (rows, n, k, plan.rows, plan.outputs, plan.depth, plan.splits, plan.stages)
    kind = (gated, activation == "gelu")
    _tiled_kernel[grid](*tensors, *sizes, *kind, overlap, num_warps=plan.warps, launch_pdl=overlap)
    return y


@triton.jit(do_not_specialize=["M"])  # it differs from step to step
def _tiled_kernel(
    x_tiles,
    weight_tiles,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    parts,
    counts,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    m0 = tl.program_id(0) * ROWS
    n0 = tl.program_id(1) * OUTPUTS
    n = n0 + tl.arange(0, OUTPUTS)
    per = tl.cdiv(tl.cdiv(K, DEPTH), SPLITS) * DEPTH
    lo = tl.program_id(2) * per
    hi = tl.minimum(lo + per, K)
    if OVERLAP:
        # The first lines of each row of the tile alone: reading further ahead made every step slower.
        line = tl.minimum(lo + tl.arange(0, 4) * 64, K - 1)
        ahead = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + line[None, :]
        prefetch(ahead)
        if GATED:
            prefetch(ahead + N.to(tl.int64) * K)
        gdc_wait()
    # The weight's rows are the product's rows, so that few rows of x make a narrow tile and waste nothing.
    y = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for k in tl.range(lo, hi, DEPTH, num_stages=STAGES):
        x = x_tiles.load([m0, k]).T
        y = tl.dot(weight_tiles.load([n0, k]), x, y)
        if GATED:
            up = tl.dot(weight_tiles.load([N + n0, k]), x, up)
    last = True
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        cell = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        part = parts + tile * SPLITS * (OUTPUTS * ROWS) + cell
        tl.store(part + tl.program_id(2) * (OUTPUTS * ROWS), y)
        tl.debug_barrier()  # every thread's part is written before one of them counts
        last = tl.atomic_add(counts + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counts + tile, 0)
            y = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for s in tl.static_range(SPLITS):  # always in this order, whoever came last
                y += tl.load(part + s * (OUTPUTS * ROWS))
    if last:
        in_n = (n < N)[:, None]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if bias_ptr is not None:
                up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            y = activate(y, GELU) * up
        m = m0 + tl.arange(0, ROWS)
        at = m.to(tl.int64)[None, :] * N + n[:, None]
        ok = in_n & (m < M)[None, :]
        if residual_ptr is not None:
            y += tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=ok)
