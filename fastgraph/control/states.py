"""A request's state is a frozen dataclass that owns the request's resources.

    Waiting ──admit──▶ Prefilling ──decode──▶ Decoding ──finish──▶ Finishing ──release──▶ Finished
       ▲                                          │
       └────────────────retract───────────────────┘

A transition consumes the state it is given and returns the next one, moving one bundle of resources: the old state's
lease is dead afterwards, so using a state twice raises. What changes every step (lengths, tokens) is not here but in
the scheduler's numpy tables, so that a thousand decoding requests cost no Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastgraph.config import SamplingParams
from fastgraph.control.pages import Lease
from fastgraph.control.plan import Int32

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What the front submits: token ids only."""

    id: int
    prompt: Int32  # [prompt tokens]
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    max_length: int  # tokens, prompt and answer together
    incremental: bool  # report tokens as they land, rather than all at the end


@dataclass(frozen=True, slots=True)
class Resources:
    """What a running request owns: moved as one."""

    slot: int
    lease: Lease

    def move(self) -> Resources:
        return Resources(self.slot, self.lease.move())


@dataclass(frozen=True, slots=True)
class Times:
    """When a request first got a slot and its first token landed, in seconds of time.perf_counter(); 0 is not yet."""

    admitted: float
    first_token: float


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """Owns nothing. `answer` is what it had generated when it was retracted, to be computed again."""

    request: Request
    answer: Int32  # [generated tokens]
    times: Times


@dataclass(frozen=True, slots=True, eq=False)
class Prefilling:
    request: Request
    resources: Resources


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    request: Request
    resources: Resources


@dataclass(frozen=True, slots=True, eq=False)
class Finishing:
    """Its answer is complete; its pages wait until the last step that may write them has landed."""

    request: Request
    resources: Resources
    last_step: int


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    request: Request


Running = Prefilling | Decoding
State = Waiting | Prefilling | Decoding | Finishing | Finished


def admit(state: Waiting, slot: int, lease: Lease) -> Prefilling:
    return Prefilling(state.request, Resources(slot, lease.move()))


def decode(state: Prefilling) -> Decoding:
    """Every prompt token has been scheduled; from here on the device feeds itself."""
    return Decoding(state.request, state.resources.move())


def retract(state: Running, answer: Int32, times: Times) -> Waiting:
    """Give everything back under pressure. Only with no step in flight: `answer` must be complete."""
    state.resources.lease.release()
    return Waiting(state.request, answer, times)


def finish(state: Running, last_step: int) -> Finishing:
    return Finishing(state.request, state.resources.move(), last_step)


def release(state: Finishing) -> Finished:
    state.resources.lease.release()
    return Finished(state.request)
