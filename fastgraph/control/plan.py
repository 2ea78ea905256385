"""What crosses the door between the planes: a `StepPlan` goes in, a `StepResult` comes out. Numpy and numbers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastgraph.config import SamplingParams

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

NULL_SLOT = 0  # padding rows live here; no request ever does
NULL_PAGE = 0  # padding rows write here; no request ever reads it


@dataclass(frozen=True, slots=True)
class Limits:
    """What a built device can hold. Slots and pages are counted without the null ones."""

    slots: int
    pages: int
    page_size: int  # tokens a page holds
    max_model_len: int  # tokens a request may span, prompt and answer together
    max_step_tokens: int  # tokens one step may compute
    vocab: int  # ids that may be sampled or prompted
    prefix_cache: bool = True  # whether a prompt's pages may serve another one that begins alike
    host_pages: int = 0  # pages of host memory that retracted requests may be saved to
    window: int = 0  # tokens that each layer looks back, itself included; 0 is all
    multi_step: int = 1  # decode steps that one plan may hold

    @property
    def pool_tokens(self) -> int:
        return self.pages * self.page_size


@dataclass(frozen=True, slots=True)
class Admission:
    """A slot's new tenant, with all that the device needs to know of it."""

    slot: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    prompt: Int32  # [prompt tokens]
    answer: Int32  # [generated tokens]: what a retracted request had generated before, else empty
    computed: int  # tokens whose KV its pages hold already


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens [start, start + len(ids)) of a request, to be computed in this step."""

    slot: int
    start: int
    ids: Int32  # [span tokens]
    samples: bool  # the span ends the prompt, so the step samples a token after it


@dataclass(frozen=True)
class StepPlan:
    """One step of the device: copy pages, set slots up, then run decode rows and prefill spans in one forward.

    Without spans it may be several steps, one after the other: the same rows decode in each. The copies are part of the
    plan, so that they keep their order with the steps that write and read the pages.
    """

    number: int
    admissions: tuple[Admission, ...]
    page_writes: Int32  # [writes, 3] of (slot, index in its page table, page)
    decode_slots: Int32  # [decode rows]
    spans: tuple[PrefillSpan, ...]
    snapshots: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))  # (page, host page): copied out first
    restores: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))  # (host page, page): copied in next
    repeats: int = 1

    @cached_property
    def sampling_slots(self) -> Int32:
        """The slots whose next token a step samples, in the order of the result's rows: decode rows, then spans."""
        if not self.spans:
            return self.decode_slots
        ends = np.array([span.slot for span in self.spans if span.samples], np.int32)
        return np.concatenate([self.decode_slots, ends])

    @property
    def tokens(self) -> int:
        """How many are computed."""
        return self.repeats * len(self.decode_slots) + sum(len(span.ids) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the raw model, a row per sampled token."""

    chosen: Float32  # [rows]
    top_ids: Int32  # [rows, MAX_LOGPROBS]
    top: Float32  # [rows, MAX_LOGPROBS]

    def rows(self, rows: slice) -> Logprobs:
        return Logprobs(self.chosen[rows], self.top_ids[rows], self.top[rows])


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens a plan's steps sampled, one step's behind the other's, each in the order of `plan.sampling_slots`."""

    tokens: Int32  # [rows]
    logprobs: Logprobs | None  # None when no row asked
    seconds: float = 0.0  # that the device took for the plan, if it can say


class PendingStep(Protocol):
    """A submitted step. `result` waits for it if it must; if it is `ready`, it need not."""

    def ready(self) -> bool: ...

    def result(self) -> StepResult: ...


class Device(Protocol):
    """The part of `DeviceHandle` that the control plane uses, so that a test can stand in for the device."""

    @property
    def limits(self) -> Limits: ...

    def execute(self, plan: StepPlan) -> PendingStep: ...
