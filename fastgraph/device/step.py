"""One step: gather by slot, run the model and sample, move the slots on. What stands between is what is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from fastgraph.device.metadata import StepInputs
from fastgraph.device.slots import SlotState
from fastgraph.kernels import slots
from fastgraph.kernels.sampling import SamplerOutput, SamplerState, outputs_of, sample
from fastgraph.ops import Batch, LayerCache


class Model(Protocol):
    """What the engine asks of a model file."""

    layers: Sequence[nn.Module]

    def embed(self, batch: Batch) -> tuple[Tensor, Any]:
        """-> x [tokens, hidden], and whatever every block needs besides (the rotary's cos and sin)."""

    def head(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> logits [rows, vocab]."""


def gather(inputs: StepInputs, state: SlotState) -> Batch:
    """The step's batch, as the slots are now."""
    tokens = (inputs.ids, inputs.offsets, inputs.token_slots)
    ids, positions, sequence_lengths = slots.gather(*tokens, _tables(state))
    return Batch(
        ids=ids,
        positions=positions,
        sequence_lengths=sequence_lengths,
        token_slots=inputs.token_slots,
        slots=inputs.slots,
        query_start=inputs.query_start,
        lengths=state.lengths,
        page_table=state.page_table,
    )


def begin(model: Model, batch: Batch) -> tuple[Tensor, Any]:
    """What goes into the blocks."""
    return model.embed(batch)


def end(model: Model, x: Tensor, sampling_slots: Tensor, state: SamplerState, vocab: int) -> SamplerOutput:
    """A sampled token of each row. x: [rows, hidden], of each row's last token."""
    logits = model.head(x)
    out = outputs_of(logits.shape[0], device=x.device)
    sample(logits, sampling_slots, state, vocab, out)
    return out


def run(
    model: Model, caches: Sequence[LayerCache], batch: Batch, last: Tensor, sampling_slots: Tensor,
    state: SamplerState, vocab: int,
) -> SamplerOutput:  # fmt: skip
    """All between gathering and moving on. last: [rows], each row's last token."""
    x, shared = begin(model, batch)
    for block, cache in zip(model.layers, caches, strict=True):
        x = block(x, shared, cache, batch)
    return end(model, x[last], sampling_slots, state, vocab)


def advance(out: SamplerOutput, inputs: StepInputs, state: SlotState) -> None:
    """Move the slots on: their tokens, and how many there are."""
    rows = (inputs.sampling_slots, inputs.slots, inputs.query_lengths)
    slots.advance(out.tokens, *rows, _tables(state))


def _tables(state: SlotState) -> slots.Tables:
    return slots.Tables(state.recent, state.sampler.generated, state.lengths, state.prompt_lengths)
