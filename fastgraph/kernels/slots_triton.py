"""`fastgraph.kernels.slots` on a GPU: a kernel each, where plain PyTorch takes seven, which a small model feels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.launch import can_overlap, cdiv, gdc_launch_dependents, gdc_wait
from fastgraph.kernels.slots import FROM_SLOT, Tables

_BLOCK = 128
_FROM_SLOT = tl.constexpr(FROM_SLOT)


def gather(ids: Tensor, offsets: Tensor, token_slots: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """As `slots.gather`."""
    count = len(ids)
    # Each with storage of its own: a compiled model takes another offset for another graph.
    out = torch.empty_like(ids), torch.empty_like(ids), torch.empty_like(ids)
    # The first kernel of a step: launched plainly.
    _gather[(cdiv(count, _BLOCK),)](ids, offsets, token_slots, *tables, out, count, *tables.recent.shape, _BLOCK)
    return out


@triton.jit(do_not_specialize=["count", "depth", "width"])
def _gather(
    ids,
    offsets,
    token_slots,
    recent,
    generated,
    lengths,
    prompt_lengths,
    out,
    count,
    depth,
    width,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(token_slots + i, mask=inside, other=0)
    id = tl.load(ids + i, mask=inside, other=0)
    position = tl.load(lengths + slot) + tl.load(offsets + i, mask=inside, other=0)
    last = (tl.load(generated + slot) + depth - 1) % depth  # where there is none yet, any will do
    out_ids, out_positions, out_lengths = out
    tl.store(out_ids + i, tl.where(id == _FROM_SLOT, tl.load(recent + last * width + slot), id), mask=inside)
    tl.store(out_positions + i, position, mask=inside)
    tl.store(out_lengths + i, tl.maximum(tl.load(prompt_lengths + slot), position + 1), mask=inside)


def advance(tokens: Tensor, sampling_slots: Tensor, row_slots: Tensor, query_lengths: Tensor, tables: Tables) -> None:
    """As `slots.advance`."""
    count, overlap = len(tokens), can_overlap(tokens.device)
    rows = (tokens, sampling_slots, row_slots, query_lengths)
    _advance[(cdiv(count, _BLOCK),)](
        *rows, *tables[:3], count, *tables.recent.shape, _BLOCK, overlap, launch_pdl=overlap
    )


@triton.jit(do_not_specialize=["count", "depth", "width"])
def _advance(
    tokens,
    sampling_slots,
    row_slots,
    query_lengths,
    recent,
    generated,
    lengths,
    count,
    depth,
    width,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    slot = tl.load(sampling_slots + i, mask=inside, other=0)
    place = tl.load(generated + slot)
    tl.store(recent + place % depth * width + slot, tl.load(tokens + i, mask=inside, other=0), mask=inside)
    tl.store(generated + slot, place + 1, mask=inside & (slot > 0))
    slot = tl.load(row_slots + i, mask=inside, other=0)
    length = tl.load(lengths + slot) + tl.load(query_lengths + i, mask=inside, other=0)
    tl.store(lengths + slot, length, mask=inside & (slot > 0))
