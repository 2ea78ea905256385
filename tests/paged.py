"""Runs a model file over a paged cache without an engine: what the tests of models and of attention share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.kernels import serving
from fastgraph.loading.weights import read, sources_of, stored
from fastgraph.ops import Batch, LayerCache


def copy_weights(model: nn.Module, weights: Mapping[str, Any], state: Mapping[str, Tensor]) -> set[str]:
    """Fill `model` from a transformers state dict, and return the names that were used."""
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        sources = sources_of(name, parameter, weights, state)
        used.update(name for source in sources for name in stored(source))
        with torch.no_grad():
            parameter.copy_(torch.cat([read(source, state.__getitem__, parameter) for source in sources]))
    return used


@dataclass(frozen=True)
class Piece:
    """A row of a step: which slot, and the tokens it brings. `whole` is the prompt's length, 0 when decoding."""

    slot: int
    ids: Sequence[int]
    whole: int = 0


def forward(model: Any, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
    """The hidden states after the last block, before the final norm. [tokens, hidden]"""
    x, shared = model.embed(batch)
    for block, cache in zip(model.layers, caches, strict=True):
        x = block(x, shared, cache, batch)
    return x


class Paged:
    """Caches, a scrambled page table and lengths for `slots` sequences of up to `span` tokens each."""

    def __init__(
        self,
        config: Any,
        *,
        slots: int,
        span: int,
        page_size: int = 4,
        width: int = 0,  # of a head in the pages; 0 is head_dim
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        per_slot = -(-span // page_size)
        pages = slots * per_slot
        scrambled = torch.randperm(pages, generator=torch.Generator().manual_seed(3)) + 1
        null = torch.zeros(1, per_slot, dtype=torch.int32)  # slot 0 and page 0 take what nobody reads
        self.page_table = torch.cat([null, scrambled.view(slots, per_slot).int()]).to(device)
        self.lengths = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        shape = (pages + 1, page_size, config.kv_heads, width or config.head_dim)
        self.caches = [
            LayerCache(*(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"))
            for _ in range(config.layers)
        ]

    def batch(self, pieces: Sequence[Piece]) -> Batch:
        """The tensors of one step."""
        ids, positions, wholes, token_slots, starts = [], [], [], [], [0]
        for piece in pieces:
            before = int(self.lengths[piece.slot])
            for i, token in enumerate(piece.ids):
                ids.append(token)
                positions.append(before + i)
                wholes.append(max(piece.whole, before + i + 1))
                token_slots.append(piece.slot)
            starts.append(len(ids))
        columns = [ids, positions, wholes, token_slots, [piece.slot for piece in pieces], starts]
        tensors = (torch.tensor(c, dtype=torch.int32, device=self.lengths.device) for c in columns)
        return Batch(*tensors, self.lengths, self.page_table)

    def step(self, model: Any, pieces: Sequence[Piece], forward: Any = forward) -> list[Tensor]:
        """Run one step and advance the lengths. A row's result is the logits of its tokens. [tokens, vocab]"""
        batch = self.batch(pieces)
        serving.begin_step()
        logits = model.head(forward(model, batch, self.caches))
        for piece in pieces:
            if piece.slot:
                self.lengths[piece.slot] += len(piece.ids)
        return list(logits.split([len(piece.ids) for piece in pieces]))
