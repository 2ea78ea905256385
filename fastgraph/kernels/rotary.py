"""Queries and keys on their way to attention: normed, rotated, and the keys and values written to their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.launch import can_overlap, cdiv, gdc_launch_dependents, gdc_wait
from fastgraph.kernels.norm import rms_norm_reference

_TOKENS = 16  # tokens of one head that a program handles


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm and rotate q and k, write k and v into their pages, return q.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]: views into one [tokens, width] tensor are fine;
    head_dim a power of two. cos, sin: [tokens, rotary_dim / 2] float32 (arXiv:2104.09864, pairs
    (i, i + rotary_dim / 2)), or None where q and k come rotated: then only the pages are written. q_norm, k_norm:
    [head_dim], RMSNorm of each head as in Qwen3, or None. k_cache, v_cache: [pages, page_size, kv_heads, head_dim];
    page_table: [slots, pages_per_slot] int32; positions, token_slots: [tokens] int32.
    Returns [tokens, heads, head_dim].
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    rotates = cos is not None
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format) if rotates else q
    overlap = can_overlap(q.device)
    grid = (cdiv(tokens, _TOKENS), (heads if rotates else 0) + 2 * kv_heads)
    _rotate_and_write[grid](
        q,
        k,
        v,
        cos,
        sin,
        q_norm,
        k_norm,
        k_cache,
        v_cache,
        page_table,
        positions,
        token_slots,
        q_out,
        tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        page_table.stride(0),
        eps,
        heads if rotates else 0,
        kv_heads,
        head_dim,
        k_cache.shape[1],
        cos.shape[1] if cos is not None else 0,
        q_norm is not None,
        _TOKENS,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return q_out


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Norm and rotate in plain PyTorch. x: [tokens, heads, head_dim]; the rest as in `rotate_and_write`."""
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # [tokens, 1, half]
    a, b, rest = x.to(torch.promote_types(x.dtype, torch.float32)).split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


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
def norm_and_rotate(
    x, partner, norm_ptr, d, cos, sin, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """x and the partners of its elements: [rows, D]; cos, sin: [rows or 1, D]. Returns [rows, D]."""
    dtype: tl.constexpr = x.dtype
    if NORM:
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
    NORM: tl.constexpr,
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
            q = norm_and_rotate(q, partner, q_norm_ptr, d, cos, sin, eps, HEAD_DIM, HALF, NORM)
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
                k = norm_and_rotate(k, partner, k_norm_ptr, d, cos, sin, eps, HEAD_DIM, HALF, NORM)
            tl.store(k_cache + cell, k, mask=ok)
        else:
            v = tl.load(v_ptr + row * v_stride + kv_head * HEAD_DIM + d[None, :], mask=ok, other=0.0)
            tl.store(v_cache + cell, v, mask=ok)
