"""Attention of one new token a row over its pages, in splits of like length: norm, rotation and KV write included.

One program of a single warp takes one kv head of one split, which is a part of a row's context; the heads that share
the kv head are the columns of a tensor-core product, so that every key and value is read once (Flash-Decoding,
arXiv:2311.01282). A small kernel lays the splits out, once a step for all layers: long rows are cut so that none keeps
the others waiting, and few rows so that they fill the machine. It reads the lengths on the device: a launch, and so a
captured graph, depends on the number of rows alone. The programs of a row count themselves; the last one adds up the
parts.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels import serving
from fastgraph.kernels.attention import Pages, Turn
from fastgraph.kernels.decode_splits import FIELDS, lay_out, split_plan
from fastgraph.kernels.launch import (
    can_overlap,
    counters,
    gdc_launch_dependents,
    gdc_wait,
    multiprocessors,
    power_of_two,
)
from fastgraph.kernels.rotary import angles, norm_and_rotate, partner_of

_STAGES = 2  # of the load pipeline: the page numbers, and then the keys and values, of the blocks ahead
_BELOW = tl.constexpr(-1.0e30)  # for a score; -inf would make NaN of an empty block
_LOG2E = tl.constexpr(math.log2(math.e))


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    pages: Pages,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v into the pages, attend. Returns `out`, [tokens, heads, head_dim].

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]: views into one [tokens, width] tensor; head_dim
    and the page size powers of two. `window` > 0: a token sees itself and the `window - 1` before it. sinks: [heads],
    logits of each softmax whose share is lost. Only rows of one token are taken care of; what the others have in `out`
    stays there. In plain PyTorch: `attention_reference`.
    """
    _, heads, head_dim = q.shape
    cos, sin, q_norm, k_norm, eps = turn
    k_cache, v_cache, page_table, *_ = pages
    kv_heads, page_size = k.shape[1], k_cache.shape[1]
    columns = power_of_two(heads // kv_heads)
    plan = split_plan(kv_heads, head_dim, multiprocessors(q.device))
    splits, new = serving.once(("decode_attention", plan, window), lambda: lay_out(pages, plan, window))
    most = len(splits)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    parts = q.new_empty((most, heads, head_dim), dtype=torch.float32)
    totals = q.new_empty((most, heads, 2), dtype=torch.float32)
    overlap = can_overlap(q.device)
    read = (q, k, v, cos, sin, q_norm, k_norm, k_cache, v_cache, page_table, splits, sinks)
    written = (out, parts, totals, counters(q.device))
    strides = (q.stride(0), k.stride(0), v.stride(0), page_table.stride(0))
    half = 0 if cos is None else cos.shape[1]
    sizes = (heads, kv_heads, head_dim, page_size, half, plan.block, columns, max(columns, 8), _STAGES)
    # Launched plainly it begins when the splits are laid out, and no later kernel begins before it: so all the others
    # may read them without waiting.
    launch = {"num_warps": 1, "launch_pdl": overlap and not new}
    numbers = (eps, scale * math.log2(math.e), window)
    _decode[(kv_heads, most)](*read, *written, *strides, *numbers, *sizes, overlap, **launch)
    return out


@triton.jit
def _fold(q, k, v, seen, most, total, acc, SCALE: tl.constexpr, MASKED: tl.constexpr):
    """Add a block of tokens to an online softmax (arXiv:1805.02867).

    q [D, G], k [B, D], v [D, B], seen [B]; most, total [G]; acc [D, G]
    """
    s = tl.dot(k, q, input_precision="ieee")  # [B, G]
    if MASKED:
        s = tl.where(seen[:, None], s, _BELOW)
    new = tl.maximum(most, tl.max(s, 0) * SCALE)
    fade = tl.exp2(most - new)
    p = tl.exp2(s * SCALE - new[None, :])
    if MASKED:
        p = tl.where(seen[:, None], p, 0.0)
    return new, total * fade + tl.sum(p, 0), tl.dot(v, p.to(v.dtype), acc * fade[None, :], input_precision="ieee")


@triton.jit
def _combine(
    parts,
    totals,
    out_ptr,
    active,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Weigh the parts of one kv head by their shares of the softmax, and add them up."""
    WIDTH: tl.constexpr = PADDED * HEAD_DIM
    STEP: tl.constexpr = 2048 // WIDTH if WIDTH < 2048 else 1  # splits at once: what the registers hold
    g = tl.arange(0, PADDED)
    d = tl.arange(0, HEAD_DIM)
    most = tl.full((PADDED,), _BELOW, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    acc = tl.zeros((PADDED, HEAD_DIM), tl.float32)
    for first in range(0, active, STEP):
        s = first + tl.arange(0, STEP)
        ok = (g < GROUP)[:, None] & (s < active)[None, :]
        at = s[None, :] * HEADS + g[:, None]  # [G, step]
        maxima = tl.load(totals + at * 2, mask=ok, other=_BELOW)
        new = tl.maximum(most, tl.max(maxima, 1))
        fade = tl.exp2(most - new)
        share = tl.exp2(maxima - new[:, None])
        total = total * fade + tl.sum(share * tl.load(totals + at * 2 + 1, mask=ok, other=0.0), 1)
        part = tl.load(parts + at[:, :, None] * HEAD_DIM + d[None, None, :], mask=ok[:, :, None], other=0.0)
        acc = acc * fade[:, None] + tl.sum(part * share[:, :, None], 1)
        most = new
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g[:, None] * HEAD_DIM + d[None, :], out, mask=(g < GROUP)[:, None])


@triton.jit
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache,
    v_cache,
    page_table,
    splits,
    sinks_ptr,
    out_ptr,
    parts,
    totals,
    counts,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    eps,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    CELL: tl.constexpr = KV_HEADS * HEAD_DIM
    head = tl.program_id(0)  # the heads of a page lie side by side: programs that run together share DRAM rows
    split = tl.program_id(1)
    at = splits + split * FIELDS
    counter = tl.load(at)
    slot = tl.load(at + 1).to(tl.int64)
    lo = tl.load(at + 2)
    hi = tl.load(at + 3)
    n = tl.load(at + 4)
    first_split = tl.load(at + 5)
    active = tl.load(at + 6)
    token = tl.load(at + 7).to(tl.int64)
    if counter >= 0:
        is_last = split == first_split + active - 1
        tail = lo + tl.maximum(tl.cdiv(hi - lo, BLOCK) - 1, 0) * BLOCK
        table = page_table + slot * table_stride
        d = tl.arange(0, HEAD_DIM)
        t = tl.arange(0, BLOCK)
        cell = t % PAGE * CELL + head * HEAD_DIM
        k_in = k_cache + cell[:, None] + d[None, :]  # [B, D]
        v_in = v_cache + cell[None, :] + d[:, None]  # [D, B]
        # The last block, the only one that may be short, is in flight before this step's q and k are waited for.
        ahead = tail + t < hi
        page = tl.load(table + tail // PAGE + t // PAGE, mask=ahead, other=0).to(tl.int64)
        page = page * (PAGE * CELL) + tail % PAGE * CELL
        seen = ahead
        if WINDOW:
            seen &= tail + t > n - WINDOW
        k = tl.load(k_in + page[:, None], mask=seen[:, None], other=0.0)
        v = tl.load(v_in + page[None, :], mask=seen[None, :], other=0.0)
        own = (tl.load(table + n // PAGE).to(tl.int64) * PAGE + n % PAGE) * CELL + head * HEAD_DIM
        g = tl.arange(0, COLUMNS)
        g_ok = (g < GROUP)[:, None]
        if OVERLAP:
            gdc_wait()
        q_at = q_ptr + token * q_stride + (head * GROUP + g)[:, None] * HEAD_DIM
        k_at = k_ptr + token * k_stride + head * HEAD_DIM
        q = tl.load(q_at + d[None, :], mask=g_ok, other=0.0)  # [G, D]
        k_new = tl.load(k_at + d)[None, :]
        v_new = tl.load(v_ptr + token * v_stride + head * HEAD_DIM + d)
        if HALF:
            other = partner_of(d, HALF)
            q_other = tl.load(q_at + other[None, :], mask=g_ok, other=0.0)
            k_other = tl.load(k_at + other)[None, :]
            cos, sin = angles(cos_ptr, sin_ptr, token * HALF, d, (d < HEAD_DIM)[None, :], HALF)
            q = norm_and_rotate(q, q_other, q_norm_ptr, d, cos, sin, eps, HEAD_DIM, HALF)
            k_new = norm_and_rotate(k_new, k_other, k_norm_ptr, d, cos, sin, eps, HEAD_DIM, HALF)
        s_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * SCALE  # [G]
        if is_last:
            tl.store(k_cache + own + d[None, :], k_new)
            tl.store(v_cache + own + d, v_new)
        q = tl.trans(q)  # [D, G]
        most = tl.full((COLUMNS,), _BELOW, tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        acc = tl.zeros((HEAD_DIM, COLUMNS), tl.float32)
        if sinks_ptr is not None:  # as if it were a token before all others, whose value is nothing
            sink = tl.load(sinks_ptr + head * GROUP + g, mask=g < GROUP, other=0.0).to(tl.float32)
            most = tl.where(split == first_split, sink * _LOG2E, most)
            total = tl.where(split == first_split, 1.0, total)
        most, total, acc = _fold(q, k, v, seen, most, total, acc, SCALE, True)
        for first in tl.range(lo, tail, BLOCK, num_stages=STAGES):
            page = tl.load(table + first // PAGE + t // PAGE).to(tl.int64)
            page = page * (PAGE * CELL) + first % PAGE * CELL
            k = tl.load(k_in + page[:, None])
            v = tl.load(v_in + page[None, :])
            if WINDOW:
                most, total, acc = _fold(q, k, v, first + t > n - WINDOW, most, total, acc, SCALE, True)
            else:
                most, total, acc = _fold(q, k, v, seen, most, total, acc, SCALE, False)
        if is_last:
            new = tl.maximum(most, s_new)
            fade = tl.exp2(most - new)
            p_new = tl.exp2(s_new - new)
            total = total * fade + p_new
            acc = acc * fade[None, :] + v_new.to(tl.float32)[:, None] * p_new[None, :]
            most = new
        first_head = token * HEADS + head * GROUP
        if active == 1:
            out_at = (first_head + g)[None, :] * HEAD_DIM + d[:, None]
            tl.store(out_ptr + out_at, (acc / total[None, :]).to(out_ptr.dtype.element_ty), mask=(g < GROUP)[None, :])
        else:
            part_at = split * HEADS + head * GROUP + g
            tl.store(parts + part_at[None, :] * HEAD_DIM + d[:, None], acc, mask=(g < GROUP)[None, :])
            tl.store(totals + part_at * 2, most, mask=g < GROUP)
            tl.store(totals + part_at * 2 + 1, total, mask=g < GROUP)
            tl.debug_barrier()  # every thread's part is written before one of them counts
            count = counts + counter * KV_HEADS + head
            if tl.atomic_add(count, 1, sem="acq_rel") == active - 1:
                tl.store(count, 0)
                begin = first_split * HEADS + head * GROUP
                _combine(
                    parts + begin * HEAD_DIM,
                    totals + begin * 2,
                    out_ptr + first_head * HEAD_DIM,
                    active,
                    HEADS,
                    GROUP,
                    PADDED,
                    HEAD_DIM,
                )
    elif OVERLAP and split == 0:  # none is used, and one kernel at least must wait for the one before
        gdc_wait()
