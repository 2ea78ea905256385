"""Around the model: what a step gathers from its slots, and how it moves them on. The null slot 0 never moves."""

from __future__ import annotations

import torch
from torch import Tensor

FROM_SLOT = -1  # an id that means: the token this slot sampled last


def gather(
    ids: Tensor,
    offsets: Tensor,
    token_slots: Tensor,
    recent: Tensor,
    generated: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's id, its position, and the length of its sequence: the whole prompt's, or position + 1 past it.

    ids, offsets (place within the row), token_slots: [tokens]; recent: [depth, slots] contiguous, number i of an answer
    in row i % depth; generated, lengths (tokens in the pages), prompt_lengths: [slots] contiguous. All are int32, and
    so are the three results, [tokens] each.
    """
    run = gather_reference
    if ids.is_cuda:
        from fastgraph.kernels.slots_triton import gather as run  # a CPU may lack Triton
    return run(ids, offsets, token_slots, recent, generated, lengths, prompt_lengths)


def gather_reference(
    ids: Tensor,
    offsets: Tensor,
    token_slots: Tensor,
    recent: Tensor,
    generated: Tensor,
    lengths: Tensor,
    prompt_lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gather` in plain PyTorch."""
    positions = lengths[token_slots] + offsets
    last = (generated[token_slots] - 1) % len(recent)
    ids = torch.where(ids == FROM_SLOT, recent[last, token_slots], ids)
    return ids, positions, torch.maximum(prompt_lengths[token_slots], positions + 1)


def advance(
    tokens: Tensor,
    sampling_slots: Tensor,
    row_slots: Tensor,
    query_lengths: Tensor,
    recent: Tensor,
    generated: Tensor,
    lengths: Tensor,
) -> None:
    """Put sampled tokens behind the answers of `sampling_slots`, and add `query_lengths` to the lengths of `row_slots`.

    tokens, sampling_slots, row_slots, query_lengths: [rows] int32, each live slot at most once; the rest is `gather`'s.
    """
    run = advance_reference
    if tokens.is_cuda:
        from fastgraph.kernels.slots_triton import advance as run
    run(tokens, sampling_slots, row_slots, query_lengths, recent, generated, lengths)


def advance_reference(
    tokens: Tensor,
    sampling_slots: Tensor,
    row_slots: Tensor,
    query_lengths: Tensor,
    recent: Tensor,
    generated: Tensor,
    lengths: Tensor,
) -> None:
    """`advance` in plain PyTorch."""
    place = generated[sampling_slots]
    recent[place % len(recent), sampling_slots] = tokens
    generated[sampling_slots] = torch.where(sampling_slots == 0, 0, place + 1)
    lengths[row_slots] = torch.where(row_slots == 0, 0, lengths[row_slots] + query_lengths)
