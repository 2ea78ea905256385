"""RMSNorm, with the residual addition after it, and the activation of gated layers: one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.launch import can_overlap, cdiv, gdc_launch_dependents, gdc_wait, power_of_two


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Root-mean-square norm (arXiv:1910.07467) of x, added to the residual if there is one, which then has the sum.

    x, residual: [rows, width] contiguous; weight: [width]. Returns [rows, width]: the residual, or a new tensor.
    Computed in float32, rounded to the weight's dtype before that is applied: as in Hugging Face's LlamaRMSNorm, or,
    where the weight is float32, Gemma3RMSNorm.
    """
    rows, width = x.shape
    y = torch.empty_like(x) if residual is None else residual
    block = power_of_two(width)
    overlap = can_overlap(x.device)
    warps = min(max(block // 512, 1), 16)
    _rms_norm[(rows,)](x, residual, weight, y, eps, width, block, overlap, num_warps=warps, launch_pdl=overlap)
    return y


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    eps,
    width,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    inside = i < width
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * width + i
    wide = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / width + eps)
    y = (wide.to(weight.dtype) * weight).to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, y, mask=inside)


def gate_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up (arXiv:2002.05202). gate_up: [rows, 2 * width] contiguous, gate first. Returns [rows, width].

    activation: "silu", or "gelu" for its tanh approximation (arXiv:1606.08415).
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    overlap = can_overlap(gate_up.device)
    grid = (rows, cdiv(width, 1024))
    _gate_mul[grid](gate_up, y, width, 1024, activation == "gelu", overlap, num_warps=4, launch_pdl=overlap)
    return y


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """The gate's activation, in float32. With tanh(z) = 2 * sigmoid(2 * z) - 1, GELU is a sigmoid's product too."""
    z = gate
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return gate * tl.sigmoid(z)


@triton.jit
def _gate_mul(x_ptr, y_ptr, width, BLOCK: tl.constexpr, GELU: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(x_ptr + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + i, activate(gate, GELU) * up, mask=inside)
