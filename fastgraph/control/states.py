"""A request's state is a frozen dataclass that owns the request's resources.

    Waiting ──admit──▶ Prefilling ──decode──▶ Decoding ──finish──▶ Finishing ──release──▶ Finished
       ▲                 ▲     │                 │
       ├─────retract─────┼─────┴────────┬────────┘
       │                 │              │ save
                         └──restore── Retracted

A transition consumes the state it is given and returns the next one, moving one bundle of resources: the old state's
lease is dead afterwards, so using a state twice raises. What changes every step (lengths, tokens) is not here but in
the scheduler's numpy tables, so that a thousand decoding requests cost no Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fastgraph.config import SamplingParams
from fastgraph.control.pages import Lease
from fastgraph.control.plan import Int32, Limits
from fastgraph.errors import RequestError

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


def check(request: Request, limits: Limits) -> None:
    """Refuse a request that could never run. Raises `RequestError`, which names the bound."""
    prompt, longest = len(request.prompt), limits.max_model_len
    if not prompt:
        raise RequestError("the prompt is empty: there is no token to start from")
    if prompt >= longest:
        raise RequestError(
            f"the prompt has {prompt} tokens; with max_model_len {longest} it may have {longest - 1} at most, to leave "
            f"room for an answer"
        )
    # The last token's KV is never written.
    if request.max_length > longest or request.max_length - 1 > limits.pool_tokens:
        raise RequestError(
            f"{prompt} prompt tokens and max_tokens {request.max_length - prompt} make {request.max_length}; "
            f"max_model_len is {longest}, and the KV pool holds {limits.pool_tokens} tokens: ask for fewer max_tokens"
        )


@dataclass(frozen=True, slots=True)
class Resources:
    """What a running request owns: moved as one."""

    slot: int
    lease: Lease

    def move(self) -> Resources:
        return Resources(self.slot, self.lease.move())


class Past(NamedTuple):
    """What is remembered of a request. Times are seconds of time.perf_counter(); 0 is not yet."""

    number: float  # its place in the policy's order
    admitted: float  # when it first got a slot
    first_token: float  # when that landed
    cached_tokens: int  # of the prompt, found in the prefix tree when it first got a slot


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """Owns nothing. `answer` is what it had generated when it was retracted, to be computed again."""

    request: Request
    answer: Int32  # [generated tokens]
    past: Past


@dataclass(frozen=True, slots=True, eq=False)
class Retracted:
    """Owns pages of the host, which hold the keys and values of its first `computed` tokens."""

    request: Request
    answer: Int32  # [generated tokens]
    past: Past
    computed: int
    saved: Lease


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


Queued = Waiting | Retracted
Running = Prefilling | Decoding
State = Waiting | Retracted | Prefilling | Decoding | Finishing | Finished


def admit(state: Waiting, slot: int, lease: Lease) -> Prefilling:
    return Prefilling(state.request, Resources(slot, lease.move()))


def decode(state: Prefilling) -> Decoding:
    """Every known token has been scheduled; from here on the device feeds itself."""
    return Decoding(state.request, state.resources.move())


def retract(state: Running, answer: Int32, past: Past) -> Waiting:
    """Give everything back under pressure. Only with no step in flight: `answer` must be complete."""
    state.resources.lease.release()
    return Waiting(state.request, answer, past)


def save(state: Running, answer: Int32, past: Past, computed: int, saved: Lease) -> Retracted:
    """`retract`, when the device has been told to copy the pages to those of `saved`."""
    state.resources.lease.release()
    return Retracted(state.request, answer, past, computed, saved.move())


def restore(state: Retracted, slot: int, lease: Lease) -> Prefilling:
    """The device has been told to copy the saved pages back: only the last token, or the rest, is to be computed."""
    state.saved.release()
    return Prefilling(state.request, Resources(slot, lease.move()))


def finish(state: Running, last_step: int) -> Finishing:
    return Finishing(state.request, state.resources.move(), last_step)


def release(state: Finishing) -> Finished:
    state.resources.lease.release()
    return Finished(state.request)
