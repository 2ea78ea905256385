"""The choice of experts on a GPU: softmax and the largest of it, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.launch import can_overlap, gdc_launch_dependents, gdc_wait, power_of_two


def route(logits: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token, and their weights. Arguments and results as of `fastgraph.ops.route`.

    Logits that are NaN, as of tokens that belong to no row, count as the smallest: any experts will do, but different
    ones. In plain PyTorch: `fastgraph.kernels.experts.route_reference`.
    """
    tokens, count = logits.shape
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int64)
    overlap = can_overlap(logits.device)
    sizes = (count, power_of_two(count), top_k, power_of_two(top_k))
    _route[(tokens,)](logits.contiguous(), weights, ids, *sizes, normalised, overlap, num_warps=1, launch_pdl=overlap)
    return weights, ids


@triton.jit
def _route(
    logits,
    weights,
    ids,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    NORMALISED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    left = tl.load(logits + token * COUNT + expert, mask=expert < COUNT, other=0.0).to(tl.float32)
    left = tl.where(left > -1.0e30, left, -1.0e30)  # which a comparison with NaN does too
    left = tl.where(expert < COUNT, left, float("-inf"))
    most = tl.max(left, 0)
    total = tl.sum(tl.exp(left - most), 0)
    place = tl.arange(0, TOP_PADDED)
    share = tl.zeros((TOP_PADDED,), tl.float32)
    chosen = tl.zeros((TOP_PADDED,), tl.int64)
    for i in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, expert, PADDED), 0)
        share = tl.where(place == i, tl.exp(best - most), share)
        chosen = tl.where(place == i, first, chosen)
        left = tl.where(expert == first, float("-inf"), left)
    if NORMALISED:
        total = tl.sum(share, 0)
    at = token * TOP_K + place
    tl.store(weights + at, share / total, mask=place < TOP_K)
    tl.store(ids + at, chosen, mask=place < TOP_K)
