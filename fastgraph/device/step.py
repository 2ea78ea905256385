"""One step as a pure function of tensors: gather by slot, model, sample, scatter. This is what is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastgraph.control.plan import NULL_SLOT
from fastgraph.device.metadata import FROM_SLOT, StepInputs
from fastgraph.device.slots import SlotState
from fastgraph.kernels.sampling import SamplerOutput, outputs_of, sample
from fastgraph.ops import Batch, LayerCache


class Model(Protocol):
    """What the engine asks of a model file."""

    layers: Sequence[nn.Module]

    def embed(self, batch: Batch) -> tuple[Tensor, Any]:
        """-> x [tokens, hidden], and whatever every block needs besides (the rotary's cos and sin)."""

    def head(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> logits [rows, vocab]."""


def begin(model: Model, inputs: StepInputs, state: SlotState) -> tuple[Batch, Tensor, Any]:
    """Gather the step's batch from the slots, and embed it."""
    positions = state.lengths[inputs.token_slots] + inputs.offsets
    last = (state.sampler.generated[inputs.token_slots] - 1) % len(state.recent)
    ids = torch.where(inputs.ids == FROM_SLOT, state.recent[last, inputs.token_slots], inputs.ids)
    batch = Batch(
        ids=ids,
        positions=positions,
        sequence_lengths=torch.maximum(state.prompt_lengths[inputs.token_slots], positions + 1),
        token_slots=inputs.token_slots,
        slots=inputs.slots,
        query_start=inputs.query_start,
        lengths=state.lengths,
        page_table=state.page_table,
    )
    x, shared = model.embed(batch)
    return batch, x, shared


def end(model: Model, x: Tensor, inputs: StepInputs, state: SlotState, vocab: int) -> SamplerOutput:
    """Logits of each row's last token, a sampled token each, and the slots moved on."""
    logits = model.head(x[inputs.last])
    out = outputs_of(logits.shape[0], device=x.device)
    sample(logits, inputs.sampling_slots, state.sampler, vocab, out)
    generated = state.sampler.generated[inputs.sampling_slots]
    state.recent[generated % len(state.recent), inputs.sampling_slots] = out.tokens
    state.sampler.generated[inputs.sampling_slots] = generated + 1
    # Padding rows share the null slot, which stays where it is.
    moved = state.lengths[inputs.slots] + inputs.query_lengths
    state.lengths[inputs.slots] = torch.where(inputs.slots == NULL_SLOT, 0, moved)
    return out


def run(model: Model, caches: Sequence[LayerCache], inputs: StepInputs, state: SlotState, vocab: int) -> SamplerOutput:
    """The whole step."""
    batch, x, shared = begin(model, inputs, state)
    for block, cache in zip(model.layers, caches, strict=True):
        x = block(x, shared, cache, batch)
    return end(model, x, inputs, state, vocab)
