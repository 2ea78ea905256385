"""Around the model: what a step gathers from its slots, and how it moves them on. The null slot 0 never moves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FROM_SLOT = -1  # an id that means: the token this slot sampled last


class Tables(NamedTuple):
    """What is read and moved, int32 and contiguous."""

    recent: Tensor  # [depth, slots], number i of an answer in row i % depth
    generated: Tensor  # [slots], tokens of the answer
    lengths: Tensor  # [slots], tokens in the pages
    prompt_lengths: Tensor  # [slots], which never move


def gather(ids: Tensor, offsets: Tensor, token_slots: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's id, its position, and the length of its sequence: the whole prompt's, or position + 1 past it.

    ids, offsets (place within the row), token_slots: [tokens] int32, as the three results are.
    """
    run = gather_reference
    if ids.is_cuda:
        from fastgraph.kernels.slots_triton import gather as run  # a CPU may lack Triton
    return run(ids, offsets, token_slots, tables)


def gather_reference(
    ids: Tensor, offsets: Tensor, token_slots: Tensor, tables: Tables
) -> tuple[Tensor, Tensor, Tensor]:
    """`gather` in plain PyTorch."""
    positions = tables.lengths[token_slots] + offsets
    last = (tables.generated[token_slots] - 1) % len(tables.recent)
    ids = torch.where(ids == FROM_SLOT, tables.recent[last, token_slots], ids)
    return ids, positions, torch.maximum(tables.prompt_lengths[token_slots], positions + 1)


def advance(tokens: Tensor, sampling_slots: Tensor, row_slots: Tensor, query_lengths: Tensor, tables: Tables) -> None:
    """Put sampled tokens behind the answers of `sampling_slots`, and add `query_lengths` to the lengths of `row_slots`.

    tokens, sampling_slots, row_slots, query_lengths: [rows] int32, each live slot at most once.
    """
    run = advance_reference
    if tokens.is_cuda:
        from fastgraph.kernels.slots_triton import advance as run
    run(tokens, sampling_slots, row_slots, query_lengths, tables)


def advance_reference(
    tokens: Tensor, sampling_slots: Tensor, row_slots: Tensor, query_lengths: Tensor, tables: Tables
) -> None:
    """`advance` in plain PyTorch."""
    recent, generated, lengths, _ = tables
    place = generated[sampling_slots]
    recent[place % len(recent), sampling_slots] = tokens
    generated[sampling_slots] = torch.where(sampling_slots == 0, 0, place + 1)
    lengths[row_slots] = torch.where(row_slots == 0, 0, lengths[row_slots] + query_lengths)
