"""Queries and keys on their way to attention: normed, rotated, and the keys and values written to their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.attention import Pages, Turn
from fastgraph.kernels.launch import can_overlap, cdiv, gdc_launch_dependents, gdc_wait

_TOKENS = 16  # tokens of one head that a program handles


def rotate_and_write(q: Tensor, k: Tensor, v: Tensor, turn: Turn, pages: Pages) -> Tensor:
    """Norm and rotate q and k, write k and v into their pages, return q [tokens, heads, head_dim].

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]: views into one [tokens, width] tensor are fine;
    head_dim a power of two. Where q and k come rotated, only the pages are written. In plain PyTorch:
    `rotate_and_write_reference`.
    """
    tokens, heads, head_dim = q.shape
    cos, sin, q_norm, k_norm, eps = turn
    kv_heads, page_size = k.shape[1], pages.k_cache.shape[1]
    half = 0 if cos is None else cos.shape[1]
    q_heads = heads if half else 0  # that there is anything to do for
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format) if half else q
    overlap = can_overlap(q.device)
    grid = (cdiv(tokens, _TOKENS), q_heads + 2 * kv_heads)
    where = (pages.k_cache, pages.v_cache, pages.page_table, pages.positions, pages.token_slots)
    strides = (q.stride(0), k.stride(0), v.stride(0), pages.page_table.stride(0))
    sizes = (q_heads, kv_heads, head_dim, page_size, half, _TOKENS)
    read = (q, k, v, cos, sin, q_norm, k_norm, *where)
    launch = {"num_warps": 4, "launch_pdl": overlap}
    _rotate_and_write[grid](*read, q_out, tokens, *strides, eps, *sizes, overlap, **launch)
    return q_out


@triton.jit
def partner_of(d, HALF: tl.constexpr):
    """Which element each element of a head is rotated with; with itself, past the rotary part."""
    return tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


@triton.jit
def angles(cos_ptr, sin_ptr, at, d, ok, HALF: tl.constexpr):
    """What each element and its partner are multiplied with. `at` [rows, 1]: where a token's angles begin."""
    turns = ok & (d < 2 * HALF)[None, :]
    frequency = tl.where(d < HALF, d, d - HALF)[None, :]
    cos = tl.load(cos_ptr + at + frequency, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + at + frequency, mask=turns, other=0.0)
    return cos, tl.where((d < HALF)[None, :], -sin, sin)


@triton.jit
def norm_and_rotate(x, partner, norm_ptr, d, cos, sin, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """x and the partners of its elements: [rows, D]; cos, sin: [rows or 1, D]. Returns [rows, D]."""
    dtype: tl.constexpr = x.dtype
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm_ptr + d)[None, :]
        other = tl.load(norm_ptr + partner_of(d, HALF))[None, :]
        x = ((wide * scale).to(weight.dtype) * weight).to(dtype)
        partner = ((partner.to(tl.float32) * scale).to(weight.dtype) * other).to(dtype)
    return (x.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(dtype)


@triton.jit(do_not_specialize=["tokens"])  # it differs from step to step
def _rotate_and_write(
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
    positions,
    token_slots,
    out_ptr,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, HEAD_DIM)
    inside = t < tokens
    ok = inside[:, None]
    row = t.to(tl.int64)[:, None]
    if HALF:
        other = partner_of(d, HALF)
        cos, sin = angles(cos_ptr, sin_ptr, row * HALF, d, ok, HALF)
        if head < HEADS:
            at = q_ptr + row * q_stride + head * HEAD_DIM
            q = tl.load(at + d[None, :], mask=ok, other=0.0)
            partner = tl.load(at + other[None, :], mask=ok, other=0.0)
            q = norm_and_rotate(q, partner, q_norm_ptr, d, cos, sin, eps, HEAD_DIM, HALF)
            tl.store(out_ptr + (row * HEADS + head) * HEAD_DIM + d[None, :], q, mask=ok)
    if head >= HEADS:
        position = tl.load(positions + t, mask=inside, other=0)
        slot = tl.load(token_slots + t, mask=inside, other=0).to(tl.int64)
        page = tl.load(page_table + slot * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
        kv_head = (head - HEADS) % KV_HEADS
        cell = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        if head < HEADS + KV_HEADS:
            at = k_ptr + row * k_stride + kv_head * HEAD_DIM
            k = tl.load(at + d[None, :], mask=ok, other=0.0)
            if HALF:
                partner = tl.load(at + other[None, :], mask=ok, other=0.0)
                k = norm_and_rotate(k, partner, k_norm_ptr, d, cos, sin, eps, HEAD_DIM, HALF)
            tl.store(k_cache + cell, k, mask=ok)
        else:
            v = tl.load(v_ptr + row * v_stride + kv_head * HEAD_DIM + d[None, :], mask=ok, other=0.0)
            tl.store(v_cache + cell, v, mask=ok)
