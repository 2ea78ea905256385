"""Attention of whole chunks of prompts over their pages (FlashAttention-2, arXiv:2307.08691): ragged, causal, paged."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels import serving
from fastgraph.kernels.attention import Pages, Turn
from fastgraph.kernels.decode_attention import decode_attention
from fastgraph.kernels.launch import power_of_two, shared_memory

_BELOW = tl.constexpr(-1.0e30)  # for a score that must not count
_LOG2E = tl.constexpr(math.log2(math.e))


def mixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    pages: Pages,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention op for a step in which prompts are computed while others decode: rows of any length.

    Which rows have one token is read on the device: where there are several rows, both kernels run in any case.
    Arguments as in `fastgraph.kernels.attention`. In plain PyTorch: `attention_reference`.
    """
    kernels = serving.kernels(q.device.type)
    rotated = kernels["rotate_and_write"](q, k, v, turn, pages)
    # A prompt is alone, or another decode attention was chosen, which has a step to itself.
    if len(pages.slots) == 1 or kernels["decode_attention"] is not decode_attention:
        return prefill_attention(rotated, pages, scale, window, sinks)
    out = prefill_attention(rotated, pages, scale, window, sinks, single=False)
    return decode_attention(q, k, v, turn, pages, scale, window, sinks, out)


def prefill_attention(
    q: Tensor, pages: Pages, scale: float, window: int = 0, sinks: Tensor | None = None, single: bool = True
) -> Tensor:
    """Attend causally over pages that hold the step's own keys and values already. Returns [tokens, heads, head_dim].

    q: [tokens, heads, head_dim], rotated; head_dim and the page size powers of two. `window` > 0: a token sees itself
    and the `window - 1` before it. sinks: [heads], logits of each softmax whose share is lost. The result of a token
    that belongs to no row is left unwritten, and without `single` that of a row's only token.
    """
    tokens, heads, head_dim = q.shape
    k_cache, v_cache, page_table, lengths, slots, query_start, *_ = pages
    page_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    rows = len(slots)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    plan = block_plan(head_dim, q.element_size(), shared_memory(q.device))
    block_m = max(plan.queries, power_of_two(group))
    options = {"maxnreg": plan.registers} if plan.registers and q.is_cuda else {}
    # Each row wastes at most one block, so this many blocks are enough, whatever the rows' lengths.
    grid = (kv_heads, tokens // (block_m // group) + rows)
    tensors = (q, k_cache, v_cache, page_table, lengths, slots, query_start, sinks, out)
    numbers = (rows, q.stride(0), page_table.stride(0), scale * math.log2(math.e), window)
    sizes = (heads, kv_heads, head_dim, page_size, block_m, plan.keys, plan.stages)
    _prefill[grid](*tensors, *numbers, *sizes, single, num_warps=plan.warps, **options)
    return out


class BlockPlan(NamedTuple):
    """How a program of the prefill kernel works."""

    queries: int  # times heads that share keys
    keys: int  # a step
    stages: int
    warps: int
    registers: int  # of a thread at most; 0 leaves it to the compiler


@cache
def block_plan(head_dim: int, itemsize: int, shared: int) -> BlockPlan:
    """With 128 registers a thread, programs share a multiprocessor: some compute while the others wait.

    shared: bytes that a program may have; where float32 would need more, it takes fewer keys a step.
    """
    if head_dim <= 64:
        plan = BlockPlan(64, 64, 2, 4, 128)
    else:
        plan = BlockPlan(128, 64, 2, 8, 128) if head_dim <= 128 else BlockPlan(64, 32, 2, 4, 0)
    while itemsize * head_dim * (plan.queries + 2 * plan.stages * plan.keys) > shared and plan.stages > 1:
        plan = plan._replace(keys=plan.keys // 2) if plan.keys > 16 else plan._replace(stages=plan.stages - 1)
    return plan


@triton.jit
def _blocks(
    q,
    most,
    total,
    acc,
    lo,
    hi,
    query,
    table,
    k_in,
    v_in,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    CELL: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add the keys of positions [lo, hi) to an online softmax. q [M, D], most, total, query [M], acc [M, D]"""
    t = tl.arange(0, BLOCK_N)
    for first in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        if MASKED:
            page = tl.load(table + first // PAGE + t // PAGE, mask=first + t < hi, other=0).to(tl.int64)
        else:
            page = tl.load(table + first // PAGE + t // PAGE).to(tl.int64)
        page = page * (PAGE * CELL) + first % PAGE * CELL
        if MASKED:
            k = tl.load(k_in + page[None, :], mask=(first + t < hi)[None, :], other=0.0)
        else:
            k = tl.load(k_in + page[None, :])
        s = tl.dot(q, k, input_precision="ieee")
        if MASKED:
            seen = (first + t)[None, :] <= query[:, None]
            if WINDOW:
                seen &= (first + t)[None, :] > query[:, None] - WINDOW
            s = tl.where(seen, s, _BELOW)
        new = tl.maximum(most, tl.max(s, 1) * SCALE)
        p = tl.exp2(s * SCALE - new[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)
        fade = tl.exp2(most - new)
        total = total * fade + tl.sum(p, 1)
        if MASKED:
            used = first + t < hi
            if WINDOW:  # what nobody sees may be anybody's by now, and even infinite
                used &= first + t > tl.min(query, 0) - WINDOW
            v = tl.load(v_in + page[:, None], mask=used[:, None], other=0.0)
        else:
            v = tl.load(v_in + page[:, None])
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        most = new
    return most, total, acc


@triton.jit(do_not_specialize=["rows"])  # it differs from step to step
def _prefill(
    q_ptr,
    k_cache,
    v_cache,
    page_table,
    lengths,
    slots,
    query_start,
    sinks_ptr,
    out_ptr,
    rows,
    q_stride,
    table_stride,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # the heads that share keys are rows of one block
    CELL: tl.constexpr = KV_HEADS * HEAD_DIM
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the last blocks see most, so they begin first
    # Row r may use blocks from query_start[r] // TOKENS + r on: find the last row that begins here or before.
    row = 0
    above = rows
    while above - row > 1:
        middle = (row + above) // 2
        reached = tl.load(query_start + middle) // TOKENS + middle <= block
        row = tl.where(reached, middle, row)
        above = tl.where(reached, above, middle)
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    first = (block - begin // TOKENS - row) * TOKENS
    if (first < count) & (SINGLE or count > 1):
        slot = tl.load(slots + row).to(tl.int64)
        history = tl.load(lengths + slot)
        table = page_table + slot * table_stride
        i = tl.arange(0, BLOCK_M)
        d = tl.arange(0, HEAD_DIM)
        t = tl.arange(0, BLOCK_N)
        token = first + i // GROUP
        ok = ((token < count) & (i < TOKENS * GROUP))[:, None]
        query = history + token
        at = (begin + token).to(tl.int64)
        column = ((head * GROUP + i % GROUP) * HEAD_DIM)[:, None] + d[None, :]
        q = tl.load(q_ptr + at[:, None] * q_stride + column, mask=ok, other=0.0)
        cell = t % PAGE * CELL + head * HEAD_DIM
        k_in = k_cache + cell[None, :] + d[:, None]  # [D, N]
        v_in = v_cache + cell[:, None] + d[None, :]  # [N, D]
        most = tl.full((BLOCK_M,), _BELOW, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        if sinks_ptr is not None:  # as if it were a token before all others, whose value is nothing
            most = tl.load(sinks_ptr + head * GROUP + i % GROUP).to(tl.float32) * _LOG2E
            total += 1.0
        end = history + tl.minimum(first + TOKENS, count)
        if WINDOW:
            plain = tl.maximum(history + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        else:  # every token of the block sees all of these positions
            plain = (history + first + 1) // BLOCK_N * BLOCK_N
            most, total, acc = _blocks(
                q, most, total, acc, 0, plain, query, table, k_in, v_in, SCALE, 0, False, CELL, PAGE, BLOCK_N, STAGES
            )
        most, total, acc = _blocks(
            q, most, total, acc, plain, end, query, table, k_in, v_in, SCALE, WINDOW, True, CELL, PAGE, BLOCK_N, STAGES
        )
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * (HEADS * HEAD_DIM) + column, out, mask=ok)
