"""What an engine's steps did and when: noted as each lands, and made into columns afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from fastgraph.control.loop import Observer
from fastgraph.control.plan import StepPlan, StepResult

STEADY = 0.9  # of the largest batch: steps that decode so much of it, or more, are full

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class StepLog(Observer):
    """Notes each step with the time at which it landed. That is all it does while the engine serves."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, StepPlan, float]] = []  # landed at, plan, seconds that the device took

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        self.steps.append((perf_counter(), plan, result.seconds))


@dataclass(frozen=True, slots=True)
class Steps:
    """Columns over the steps of a run, in the order in which they landed."""

    at: Float64  # [steps] seconds on `perf_counter`'s clock
    busy: Float64  # [steps] seconds that the device took
    decoding: Int64  # [steps] rows that decoded
    sampled: Int64  # [steps] tokens that were sampled
    computed: Int64  # [steps] tokens that were computed, those of prompts among them
    repeats: Int64  # [steps] as how many they count: decode steps may be submitted together
    gaps: Float64  # [gaps] seconds from a request's token to its next

    @classmethod
    def of(cls, log: StepLog) -> Steps:
        at, busy = [step[0] for step in log.steps], [step[2] for step in log.steps]
        plans = [step[1] for step in log.steps]
        return cls(
            np.array(at, np.float64),
            np.array(busy, np.float64),
            np.array([len(plan.decode_slots) for plan in plans], np.int64),
            np.array([plan.repeats * len(plan.sampling_slots) for plan in plans], np.int64),
            np.array([plan.tokens for plan in plans], np.int64),
            np.array([plan.repeats for plan in plans], np.int64),
            _gaps(at, plans),
        )

    def steady(self) -> slice:
        """The steps after the first full one, up to the last full one: neither filling nor emptying is among them."""
        full = np.flatnonzero(self.decoding >= STEADY * self.decoding.max(initial=1))
        return slice(int(full[0]) + 1, int(full[-1]) + 1) if full.size else slice(0, 0)

    def seconds(self, part: slice) -> float:
        """From the landing of the step before these to the landing of the last of them."""
        return float(self.at[part.stop - 1] - self.at[part.start - 1]) if part.stop > part.start else 0.0


def _gaps(at: Sequence[float], plans: Sequence[StepPlan]) -> Float64:
    """A request has a token of each step that samples its slot; a slot's new tenant has had none yet."""
    slots = max((int(plan.sampling_slots.max(initial=0)) for plan in plans), default=0)
    before = np.full(slots + 1, np.nan)  # when the slot's last token came
    found = [np.empty(0)]
    for now, plan in zip(at, plans, strict=True):
        before[[admission.slot for admission in plan.admissions if admission.slot <= slots]] = np.nan
        found.append(now - before[plan.sampling_slots])
        found.append(np.zeros(len(plan.decode_slots) * (plan.repeats - 1)))  # they come together
        before[plan.sampling_slots] = now
    gaps = np.concatenate(found)
    return gaps[~np.isnan(gaps)]
