"""Runs one `StepPlan`: set slots up, refresh the inputs, replay or run, copy the tokens out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastgraph.control.plan import NULL_SLOT, Limits, Logprobs, PrefillSpan, StepPlan, StepResult
from fastgraph.device.compiler import CompiledStep
from fastgraph.device.host_pages import HostPages
from fastgraph.device.ladder import CaptureLadder, Recorder, rungs, token_rungs
from fastgraph.device.metadata import StepInputs, StepMetadata
from fastgraph.device.slots import Slots
from fastgraph.errors import FastgraphWarning
from fastgraph.kernels.sampling import SamplerOutput, outputs_of

Launch = Callable[[], SamplerOutput]  # a step that is prepared, and only to be run


@dataclass(frozen=True, slots=True)
class Copied:
    """A plan's outputs on their way to the host; on a CPU they are there already."""

    tokens: Tensor
    logprobs: tuple[Tensor, ...] | None  # the other parts of a `SamplerOutput`, if a row wants them
    rows: NDArray[np.int64]  # [sampled rows], where in these they stand; beyond the end it begins anew
    seconds: float  # that it took, where it has run already
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # the plan's begin, and the arrival of its outputs

    def ready(self) -> bool:
        return self.events is None or self.events[1].query()

    def result(self) -> StepResult:
        seconds = self.seconds
        if self.events is not None:
            began, arrived = self.events
            arrived.synchronize()
            seconds = began.elapsed_time(arrived) / 1e3
        tokens = self.tokens.numpy().take(self.rows, mode="wrap")
        if self.logprobs is None:
            return StepResult(tokens, None, seconds)
        return StepResult(tokens, Logprobs(*(part.numpy()[self.rows] for part in self.logprobs)), seconds)


class Executor:
    """`depth` is how many steps may be in flight beside the newest one.

    `capture_bs` is the largest batch whose decode steps are captured, 0 for none.
    """

    def __init__(
        self,
        step: CompiledStep,
        slots: Slots,
        metadata: StepMetadata,
        capture_bs: int,
        device: torch.device,
        depth: int,
    ) -> None:
        self._step, self._slots, self._metadata = step, slots, metadata
        self._decode_ladder = CaptureLadder(rungs(capture_bs), self._padding) if capture_bs else None
        self._mixed_ladder: CaptureLadder | None = None
        self._host_pages = HostPages(device)
        self.above_ladder = 0  # decode steps too large for every captured graph
        self.padding_tokens = 0  # computed to fill up captured graphs
        # A result is read before its buffer's turn comes again, on a CPU too.
        recent = slots.state.recent
        self._host = cycle([_Arrival(metadata.rows * len(recent), recent) for _ in range(depth + 2)])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Copied:
        """Submit the step. The results may be read later; steps run in the order they were submitted."""
        if len(plan.snapshots) or len(plan.restores):
            self._host_pages.copy(plan, self._step.caches)
        self._slots.apply(plan)
        rows = len(plan.decode_slots)
        launch = self._mixed(plan) if plan.spans else self._decode(rows, plan)
        places = self._slots.advance(plan)
        arrival = next(self._host)
        if not self._slots.wants_logprobs[plan.sampling_slots].any():
            return arrival.fetch_tokens(launch, plan.repeats, places)
        sampled = np.arange(rows * plan.repeats)
        if plan.spans:
            sampled = np.concatenate([sampled, rows + np.flatnonzero([span.samples for span in plan.spans])])
        return arrival.fetch_outputs(launch, plan.repeats, rows + len(plan.spans), sampled)

    def _mixed(self, plan: StepPlan) -> Launch:
        size = self._mixed_ladder.fit(plan.tokens) if self._mixed_ladder else None
        inputs = self._metadata.refresh_mixed_metadata(plan, size)
        if self._mixed_ladder and size:
            self.padding_tokens += size - plan.tokens
            return partial(self._mixed_ladder.replay, size)
        return partial(self._step, inputs)

    def _decode(self, rows: int, plan: StepPlan) -> Launch:
        ladder = self._decode_ladder
        size = ladder.fit(rows) if ladder else None
        if ladder and size:
            self._metadata.refresh_decode_metadata(size, rows, plan.decode_slots, for_graph_replay=True)
            self.padding_tokens += plan.repeats * (size - rows)
            return partial(ladder.replay, size)
        if ladder:
            self._count_above(rows, plan.repeats, ladder)
        inputs = self._metadata.refresh_decode_metadata(rows, rows, plan.decode_slots, for_graph_replay=False)
        return partial(self._step, inputs)

    def _count_above(self, rows: int, steps: int, ladder: CaptureLadder) -> None:
        first, self.above_ladder = not self.above_ladder, self.above_ladder + steps
        if first:
            message = (
                f"{rows} requests decode at once, above the {ladder.sizes[-1]} that CUDA graphs were captured for: "
                f"such steps are slower. max_capture_bs raises the limit"
            )
            warnings.warn(message, FastgraphWarning, stacklevel=2)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run padding rows through both kinds of step, so that all that compiles has compiled."""
        self._step.warm_up(self._metadata.refresh_mixed_metadata(_padding_plan(3, 3, decoding=1)))
        self._step(self._padding(1))

    @torch.inference_mode()
    def rehearse(self, limits: Limits) -> int:
        """Run steps of padding of every order of size: their kernels are built, their memory is reserved.

        Mixed steps, and the decode steps that no graph is captured for. Returns the tokens of the largest mixed step
        that the host takes about as long to launch as the device to run: up to there, graphs gain something.
        """
        bound = 0
        for size in _orders(limits.max_step_tokens):
            longest = min(size, limits.max_model_len - 1)
            if size > longest * limits.slots:
                continue
            inputs = self._metadata.refresh_mixed_metadata(_padding_plan(size, longest))
            self._step(inputs)
            torch.cuda.synchronize()
            began = perf_counter()
            self._step(inputs)
            launched = perf_counter()
            torch.cuda.synchronize()
            if launched - began > (perf_counter() - began) / 2:
                bound = max(bound, size)
        rows = min(limits.slots, limits.max_step_tokens // 2)
        self._step(self._metadata.refresh_mixed_metadata(_padding_plan(2 * rows, 2)))  # the most logits
        captured = self._decode_ladder.sizes[-1] if self._decode_ladder else 0
        for size in _orders(limits.slots):
            if size > captured:
                self._step(self._padding(size))
        return bound

    @torch.inference_mode()
    def reserve(self, limits: Limits, capture_tokens: int | None, most: int) -> int:
        """Bytes of device memory that steps and graphs take beside the pages: measured, by running and recording them.

        `capture_tokens`: of the largest mixed step to capture; None settles it by what the host is too slow for. Either
        way not above `most`.
        """
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        bound = self.rehearse(limits)
        taken = free - torch.cuda.mem_get_info()[0]
        if self._decode_ladder:
            asked = bound if capture_tokens is None else capture_tokens
            sizes = token_rungs(min(asked, most), limits.slots)
            self._mixed_ladder = CaptureLadder(sizes, self._mixed_padding) if sizes else None
        recorder = Recorder(self._step)
        for ladder in self._ladders():
            taken += ladder.memory(recorder)
        for ladder in self._ladders():
            ladder.clear()
        torch.cuda.empty_cache()
        return taken

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, float | None], None]) -> None:
        """Record all steps of the ladders. The addresses of the caches are recorded with them."""
        recorder = Recorder(self._step)
        if self._mixed_ladder:
            self._mixed_ladder.capture(recorder, partial(progress, "capturing CUDA graphs of steps with prompts"))
        if self._decode_ladder:
            self._decode_ladder.capture(recorder, partial(progress, "capturing CUDA graphs of decode steps"))

    def _ladders(self) -> list[CaptureLadder]:
        """The one that takes the most memory first."""
        return [ladder for ladder in (self._mixed_ladder, self._decode_ladder) if ladder]

    def _mixed_padding(self, tokens: int) -> StepInputs:
        """Inputs of a mixed step of padding alone."""
        return self._metadata.refresh_mixed_metadata(_padding_plan(0, 1), tokens)

    def _padding(self, bs: int) -> StepInputs:
        """Inputs of a decode step of padding rows alone."""
        return self._metadata.refresh_decode_metadata(bs, 0, np.empty(0, np.int32), for_graph_replay=True)


def _orders(most: int) -> list[int]:
    """`most`, and the powers of two below it, descending."""
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)}, reverse=True)


def _padding_plan(tokens: int, longest: int, decoding: int = 0) -> StepPlan:
    """A mixed step of the null slot alone: `tokens` of prompts, in rows of at most `longest`."""
    rows = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    spans = tuple(PrefillSpan(NULL_SLOT, 0, np.zeros(row, np.int32), samples=False) for row in rows)
    return StepPlan(0, (), np.empty((0, 3), np.int32), np.full(decoding, NULL_SLOT, np.int32), spans)


class _Arrival:
    """Host memory that one plan's outputs are copied to, and when the device began and ended that.

    recent: `SlotState.recent`.
    """

    def __init__(self, rows: int, recent: Tensor) -> None:
        pinned = recent.is_cuda
        self._outputs = outputs_of(rows, pin_memory=pinned)
        self._recent = torch.empty_like(recent, device="cpu", pin_memory=pinned)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if pinned:
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._copy: Callable[[], Any] = partial(self._recent.copy_, recent, non_blocking=True)
        if pinned:  # always the same copy: recorded, it is launched in less time
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # the stream is else one for all threads
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._copy()
            self._copy = graph.replay

    def fetch_tokens(self, launch: Launch, repeats: int, places: NDArray[np.int64]) -> Copied:
        """Launch the steps, and copy the tokens that all slots sampled last: once, however many the steps.

        places: where the plan's tokens will stand in `SlotState.recent`, made flat.
        """

        def work() -> None:
            for _ in range(repeats):
                launch()
            self._copy()

        seconds = self._timed(work)
        return Copied(self._recent.view(-1), None, places, seconds, self._events)

    def fetch_outputs(self, launch: Launch, repeats: int, count: int, rows: NDArray[np.int64]) -> Copied:
        """Launch the steps, and copy `count` rows of each's outputs before the next one overwrites them."""

        def work() -> None:
            for first in range(0, repeats * count, count):
                for source, target in zip(launch(), self._outputs, strict=True):
                    target[first : first + count].copy_(source[:count], non_blocking=True)

        seconds = self._timed(work)
        return Copied(self._outputs.tokens, self._outputs[1:], rows, seconds, self._events)

    def _timed(self, work: Callable[[], None]) -> float:
        """Submit the work between the two events; or do it where there are none, and tell how long it took."""
        if self._events is None:
            began = perf_counter()
            work()
            return perf_counter() - began
        self._events[0].record()  # no earlier: a device which waits for the host to prepare a step counts as idle
        work()
        self._events[1].record()
        return 0.0
