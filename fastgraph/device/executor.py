"""Runs one `StepPlan`: set slots up, refresh the inputs, run, copy the tokens out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastgraph.control.plan import NULL_SLOT, Logprobs, PrefillSpan, StepPlan, StepResult
from fastgraph.device.compiler import CompiledStep
from fastgraph.device.metadata import StepMetadata
from fastgraph.device.slots import Slots
from fastgraph.kernels.sampling import SamplerOutput


@dataclass(frozen=True, slots=True)
class Copied:
    """A step's outputs on their way to the host. `event` marks their arrival; on a CPU they are there already."""

    outputs: SamplerOutput
    rows: np.ndarray  # [sampled rows], where in the outputs they stand
    wants_logprobs: bool
    event: torch.cuda.Event | None

    def result(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        tokens, chosen, top_ids, top = (part.numpy()[self.rows] for part in self.outputs)
        return StepResult(tokens, Logprobs(chosen, top_ids, top) if self.wants_logprobs else None)


class Executor:
    def __init__(self, step: CompiledStep, slots: Slots, metadata: StepMetadata, device: torch.device) -> None:
        self._step, self._slots, self._metadata, self._device = step, slots, metadata, device

    def execute(self, plan: StepPlan) -> Copied:
        """Submit the step. The results may be read later; steps run in the order they were submitted."""
        self._slots.apply(plan)
        rows = len(plan.decode_slots)
        if plan.spans:
            inputs = self._metadata.refresh_mixed_metadata(plan)
        else:
            inputs = self._metadata.refresh_decode_metadata(rows, rows, plan.decode_slots, for_graph_replay=False)
        outputs = self._step(inputs)
        sampled = np.array([True] * rows + [span.samples for span in plan.spans])
        wants_logprobs = bool(self._slots.wants_logprobs[plan.sampling_slots].any())
        return self._copy_out(outputs, np.flatnonzero(sampled), wants_logprobs)

    def _copy_out(self, outputs: SamplerOutput, rows: np.ndarray, wants_logprobs: bool) -> Copied:
        if self._device.type == "cpu":
            return Copied(outputs, rows, wants_logprobs, None)
        host = SamplerOutput(*(_to_pinned(part) for part in outputs))
        event = torch.cuda.Event()
        event.record()
        return Copied(host, rows, wants_logprobs, event)

    def warm_up(self) -> None:
        """Run padding rows through both kinds of step, so that all that compiles has compiled."""
        null = PrefillSpan(NULL_SLOT, 0, np.zeros(3, np.int32), samples=False)
        nothing = np.empty((0, 3), np.int32)
        mixed = StepPlan(0, (), nothing, np.array([NULL_SLOT], np.int32), (null,))
        self._step.warm_up(self._metadata.refresh_mixed_metadata(mixed))
        self._step(self._metadata.refresh_decode_metadata(1, 0, np.empty(0, np.int32), for_graph_replay=True))


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
