"""Routed experts on a GPU: nothing asks the host, and the grids depend on the number of tokens alone.

Few tokens: each reads the weights of its experts as vectors, near the speed of memory. Many: `_order` puts the tokens
of an expert side by side, and a product per block of them reads its expert's weights (MegaBlocks, arXiv:2211.15841).
A *row* is a token with one of its experts: row t * top_k + j is token t with its j-th. The order of rows within an
expert, and so every result, is always the same.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.experts import STEEPNESS
from fastgraph.kernels.launch import can_overlap, cdiv, gdc_launch_dependents, gdc_wait, power_of_two
from fastgraph.kernels.linear import VectorPlan
from fastgraph.kernels.norm import activate

_STEEPNESS = tl.constexpr(STEEPNESS)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """The weighted sum of what each token's experts give. Arguments as in `fastgraph.ops.experts`.

    In plain PyTorch: `fastgraph.kernels.experts.experts_reference`.
    """
    tokens, top_k = ids.shape
    # So few rows seldom share an expert, and then nothing is gained by bringing them together.
    few = tokens == 1 or tokens * top_k <= len(gate_up) // 2
    routing = (weights.contiguous(), ids.contiguous())
    call = _Call(x.contiguous(), gate_up, down, *routing, residual, gate_up_bias, down_bias, limit)
    return _few(call) if few else _many(call)


class _Call(NamedTuple):
    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    ids: Tensor
    residual: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    limit: float


@cache
def vector_plan(k: int, together: int) -> VectorPlan:
    """Each thread holds 128 bytes of bfloat16 weights. together: rows of the weights that make up one output."""
    one = power_of_two(k) * together
    warps = min(max(one // 1024, 2), 16)
    return VectorPlan(max(64 * 32 * warps // one, 1), warps)


def _few(call: _Call) -> Tensor:
    x, gate_up, down, weights, ids, residual, gate_up_bias, down_bias, limit = call
    (tokens, hidden), top_k, width = x.shape, ids.shape[1], down.shape[2]
    overlap = can_overlap(x.device)
    h, y = x.new_empty(tokens * top_k, width), torch.empty_like(x)
    plan = vector_plan(hidden, 2)
    launch = {"num_warps": plan.warps, "launch_pdl": overlap}
    sizes = (width, hidden, top_k, plan.block, power_of_two(hidden))
    grid = (cdiv(width, plan.block), tokens * top_k)
    _vector_up[grid](x, gate_up, gate_up_bias, ids, h, *sizes, limit, overlap, **launch)
    padded = power_of_two(top_k)
    plan = vector_plan(width, padded)
    launch = {"num_warps": plan.warps, "launch_pdl": overlap}
    sizes = (hidden, width, top_k, plan.block, power_of_two(width))
    grid = (cdiv(hidden, plan.block), tokens)
    _vector_down[grid](h, down, down_bias, weights, ids, residual, y, *sizes, padded, overlap, **launch)
    return y


@triton.jit
def _swiglu(gate, up, LIMIT: tl.constexpr):
    """As `swiglu_reference`"""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        return gate * tl.sigmoid(gate * _STEEPNESS) * up
    else:
        return activate(gate, False) * up


@triton.jit
def _vector_up(
    x_ptr,
    gate_up_ptr,
    bias_ptr,
    ids_ptr,
    h_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """h[row] = silu(gate @ x) * (up @ x) of the row's expert"""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    expert = tl.load(ids_ptr + row).to(tl.int64)
    r = tl.arange(0, 2 * BLOCK)  # the program's rows of the weight: those of the gate, then those of up
    n = tl.program_id(0) * BLOCK + r % BLOCK
    at = expert * (2 * N) + n + r // BLOCK * N
    k = tl.arange(0, BLOCK_K)
    in_k = k < K
    w = tl.load(gate_up_ptr + at[:, None] * K + k[None, :], mask=(n < N)[:, None] & in_k[None, :], other=0.0)
    x = tl.load(x_ptr + row // TOP_K * K + k, mask=in_k, other=0.0)
    y = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=n < N, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.trans(tl.reshape(y, (2, BLOCK))))
    out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(h_ptr + row * N + out, _swiglu(gate, up, LIMIT).to(h_ptr.dtype.element_ty), mask=out < N)


@triton.jit
def _vector_down(
    h_ptr,
    down_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    residual_ptr,
    y_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[token] = sum of weight * (down @ h) over the token's experts"""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    r = tl.arange(0, PADDED * BLOCK)  # the program's outputs of the first expert, then those of the next
    chosen = r // BLOCK < TOP_K
    n = tl.program_id(0) * BLOCK + r % BLOCK
    row = token * TOP_K + r // BLOCK
    expert = tl.load(ids_ptr + row, mask=chosen, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + row, mask=chosen, other=0.0).to(tl.float32)
    k = tl.arange(0, BLOCK_K)
    in_k = (k < K)[None, :]
    ok = (chosen & (n < N))[:, None] & in_k
    w = tl.load(down_ptr + (expert * N + n)[:, None] * K + k[None, :], mask=ok, other=0.0)
    h = tl.load(h_ptr + row[:, None] * K + k[None, :], mask=chosen[:, None] & in_k, other=0.0)
    y = tl.sum(w.to(tl.float32) * h.to(tl.float32), 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + expert * N + n, mask=chosen & (n < N), other=0.0).to(tl.float32)
    y = tl.sum(tl.reshape(y * weight, (PADDED, BLOCK)), 0)
    out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * N + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + out, y.to(y_ptr.dtype.element_ty), mask=out < N)


class TilePlan(NamedTuple):
    """How the tensor-core kernel cuts its products."""

    rows: int  # of a block
    outputs: int  # of a tile; half as many where a gate's stand beside them
    depth: int  # of the inputs, a step
    warps: int
    stages: int


def tile_plan(rows: int, experts: int, itemsize: int) -> TilePlan:
    """Blocks high enough for most experts to have one, as long as that costs nothing but idle tensor cores."""
    height = min(max(power_of_two(3 * rows // (2 * experts)), 16), 128)
    outputs, depth = 128, 128 // itemsize  # whole lines of memory
    stage = 128 * (height + outputs)  # bytes
    return TilePlan(height, outputs, depth, 8 if height > 64 else 4, min(100_000 // stage, 4))


def block_count(rows: int, experts: int, height: int) -> int:
    """The blocks that rows may need, whatever the routing: expert e begins with block start // height + e."""
    return rows // height + experts


def _many(call: _Call, plan: TilePlan | None = None) -> Tensor:
    x, gate_up, down, weights, ids, residual, gate_up_bias, down_bias, limit = call
    (tokens, hidden), width = x.shape, down.shape[2]
    rows, count = ids.numel(), len(gate_up)
    plan = plan or tile_plan(rows, count, x.element_size())
    blocks = block_count(rows, count, plan.rows)
    overlap = can_overlap(x.device)
    order = ids.new_empty(rows, dtype=torch.int32)
    table = ids.new_empty(3, blocks, dtype=torch.int32)  # of each block: its expert, its first place, its rows
    _order[(count,)](ids, order, table, rows, blocks, plan.rows, 1024, overlap, num_warps=4, launch_pdl=overlap)
    h, parts, y = x.new_empty(rows, width), x.new_empty(rows, hidden), torch.empty_like(x)
    for source, weight, bias, out, gated in ((x, gate_up, gate_up_bias, h, True), (h, down, down_bias, parts, False)):
        (n, k), outputs = (out.shape[1], source.shape[1]), plan.outputs // (2 if gated else 1)
        tile = (plan.rows, outputs, plan.depth, plan.stages)
        grid, where = (blocks, cdiv(n, outputs)), (order, table, weights, out)
        launch = {"num_warps": plan.warps, "launch_pdl": overlap}
        _tiled[grid](source, weight, bias, *where, n, k, ids.shape[1], *tile, gated, limit, overlap, **launch)
    block = min(power_of_two(hidden), 1024)
    grid = (tokens, cdiv(hidden, block))
    _add_up[grid](parts, residual, y, hidden, ids.shape[1], block, overlap, num_warps=4, launch_pdl=overlap)
    return y


@triton.jit(do_not_specialize=["rows", "blocks"])
def _order(ids_ptr, order_ptr, table, rows, blocks, ROWS: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    """One expert's rows, in their places: behind those of lower experts. And its blocks, of which the last are empty"""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    below = tl.zeros((CHUNK,), tl.int32)
    own = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, rows, CHUNK):
        expert = tl.load(ids_ptr + first + i, mask=first + i < rows, other=tl.num_programs(0))
        below += (expert < mine).to(tl.int32)
        own += (expert == mine).to(tl.int32)
    start = tl.sum(below, 0)
    count = tl.sum(own, 0)
    block = start // ROWS + mine
    after = (start + count) // ROWS + mine + 1
    for first in range(block, after, CHUNK):
        at = first + i
        behind = (at - block) * ROWS
        tl.store(table + at, tl.zeros((CHUNK,), tl.int32) + mine, mask=at < after)
        tl.store(table + blocks + at, start + behind, mask=at < after)
        tl.store(table + 2 * blocks + at, tl.minimum(count - behind, ROWS), mask=at < after)
    place = start
    for first in range(0, rows, CHUNK):
        expert = tl.load(ids_ptr + first + i, mask=first + i < rows, other=tl.num_programs(0))
        here = (expert == mine).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(here, 0) - here, first + i, mask=here > 0)
        place += tl.sum(here, 0)


@triton.jit
def _tiled(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    table,
    weights_ptr,
    y_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block's product with its expert's weights. The first, gated, takes tokens and gives rows in the order of
    experts; the second takes those and gives weighted rows in their own order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    count = tl.load(table + 2 * blocks + block)
    if count > 0:
        expert = tl.load(table + block).to(tl.int64)
        m = tl.arange(0, ROWS)
        place = tl.load(table + blocks + block) + tl.where(m < count, m, 0)  # idle ones do again what the first does
        row = tl.load(order_ptr + place)
        n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        k = tl.arange(0, DEPTH)
        inside = tl.minimum(n, N - 1)
        if GATED:
            source = row // TOP_K
            at = expert * (2 * N) + inside
        else:
            source = place
            at = expert * N + inside
        weight_at = weight_ptr + at[:, None] * K + k[None, :]
        x_at = x_ptr + source.to(tl.int64)[None, :] * K + k[:, None]
        # The weight's rows are the product's rows, so that few rows make a narrow tile and waste nothing.
        y = tl.zeros((OUTPUTS, ROWS), tl.float32)
        up = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for first in tl.range(0, K, DEPTH, num_stages=STAGES):
            in_k = k < K - first
            x = tl.load(x_at + first, mask=in_k[:, None], other=0.0)
            w = tl.load(weight_at + first, mask=in_k[None, :], other=0.0)
            y = tl.dot(w, x, y, input_precision="ieee")
            if GATED:
                w = tl.load(weight_at + N * K + first, mask=in_k[None, :], other=0.0)
                up = tl.dot(w, x, up, input_precision="ieee")
        if bias_ptr is not None:
            y += tl.load(bias_ptr + at).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias_ptr + N + at).to(tl.float32)[:, None]
        if GATED:
            y = _swiglu(y, up, LIMIT)
            to = place
        else:
            y *= tl.load(weights_ptr + row).to(tl.float32)[None, :]
            to = row
        ok = (n < N)[:, None] & (m < count)[None, :]
        tl.store(y_ptr + to.to(tl.int64)[None, :] * N + n[:, None], y.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _add_up(
    parts_ptr,
    residual_ptr,
    y_ptr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[token] = the sum of its rows, and the residual"""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_n = n < N
    y = tl.zeros((BLOCK,), tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * N + n, mask=in_n, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        y += tl.load(parts_ptr + (token * TOP_K + j) * N + n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + n, y.to(y_ptr.dtype.element_ty), mask=in_n)
