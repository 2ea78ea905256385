"""A device that checks every plan it is given and remembers, token by token, what stands in which page.

It samples a pure function of the sequence that it reads back *through the page table*: a wrong page, a page used twice,
a token lost or repeated, all change the answer that `uninterrupted` says a request must have.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastgraph.config import MAX_LOGPROBS, SamplingParams
from fastgraph.control.plan import NULL_SLOT, Admission, Int32, Limits, Logprobs, StepPlan, StepResult
from fastgraph.control.states import FinishReason, Request

NOTHING = -1  # in the cache, where nothing was ever written


def next_token(sequence: Sequence[int], seed: int, vocab: int, banned: Sequence[int]) -> int:
    """What the simulated model says after `sequence`."""
    token = zlib.crc32(np.array(sequence, np.int32).tobytes(), seed) % vocab
    while token in banned:
        token = (token + 1) % vocab
    return token


def logprob(sequence: Sequence[int]) -> float:
    return float(np.float32(-zlib.crc32(np.array(sequence, np.int32).tobytes()) / 2**30))


def uninterrupted(request: Request, vocab: int) -> tuple[list[int], FinishReason, list[float]]:
    """A request's answer, why it ends and the log-probability of each token, had it the device for itself."""
    answer: list[int] = []
    logprobs: list[float] = []
    while len(request.prompt) + len(answer) < request.max_length:
        sequence = [*request.prompt.tolist(), *answer]
        banned = request.stop_ids if len(answer) < request.sampling.min_tokens else ()
        token = next_token(sequence, request.seed, vocab, banned)
        if token in request.stop_ids:
            return answer, "stop", logprobs
        answer.append(token)
        logprobs.append(logprob(sequence))
    return answer, "length", logprobs


@dataclass
class Tenant:
    """The request that has a slot, as far as the device knows it."""

    admission: Admission
    number: int  # of the admission: no two tenants share it
    pages: list[int] = field(default_factory=list)  # its page table
    length: int = 0  # tokens in its pages
    history: list[int] = field(default_factory=list)  # prompt, answer, and what was sampled since

    @property
    def generated(self) -> int:
        return len(self.history) - len(self.admission.prompt)

    @property
    def prefilled(self) -> bool:
        """Whether the last token of its history was sampled here, and is yet to be computed."""
        return self.length >= len(self.admission.prompt) + len(self.admission.answer)


@dataclass
class Pending:
    device: SimulatedDevice
    plan: StepPlan
    outcome: StepResult

    def result(self) -> StepResult:
        return self.device.land(self)


@dataclass(frozen=True)
class Sampled:
    """A token that was sampled."""

    step: int
    seed: int
    index: int  # in the answer


class SimulatedDevice:
    """Implements `fastgraph.control.plan.Device`, and the builder's part of `DeviceHandle` for an `Engine`."""

    def __init__(self, limits: Limits, depth: int = 0, on_step: Callable[[StepPlan], None] | None = None) -> None:
        self.limits = limits
        self.depth = depth
        self.on_step = on_step
        self.steps = 0
        self.computed = 0  # tokens
        self.sampled: list[Sampled] = []
        self.plans: list[StepPlan] = []
        self.shut_down = False
        # With copies of the plan's arrays, and the pages that the step may read or write.
        self._in_flight: deque[tuple[Pending, list[Int32], set[int]]] = deque()
        self._tenants: dict[int, Tenant] = {}
        self._admitted = 0
        self._owner: dict[int, Tenant] = {}  # of a page: who was given it last
        size = (limits.pages + 1, limits.page_size)
        self._token = np.full(size, NOTHING, np.int32)
        self._position = np.full(size, NOTHING, np.int32)
        self._tenant = np.full(size, NOTHING, np.int32)

    # --- what the control plane calls ---

    def execute(self, plan: StepPlan) -> Pending:
        assert not self.shut_down
        if self.on_step is not None:
            self.on_step(plan)
        check_types(plan)
        self.steps += 1
        assert plan.number == self.steps, "steps are numbered one by one"
        assert len(self._in_flight) <= self.depth, "more steps in flight than allowed"
        assert 0 < plan.tokens <= self.limits.max_step_tokens
        used = [*plan.decode_slots.tolist(), *(span.slot for span in plan.spans)]
        assert len(used) == len(set(used)), "a slot has two rows in one step"
        assert NULL_SLOT not in used
        for admission in plan.admissions:
            self._admit(admission)
            assert any(span.slot == admission.slot for span in plan.spans), "a slot is taken before it is needed"
        for slot, index, page in plan.page_writes.tolist():
            self._write_page(slot, index, page, used)
        rows = [self._decode(slot) for slot in plan.decode_slots.tolist()]
        rows += [self._prefill(span) for span in plan.spans]
        self.computed += plan.tokens
        outcome = self._sample([tenant for tenant, samples in rows if samples], plan)
        pending = Pending(self, plan, outcome)
        pages = {page for tenant, _ in rows for page in tenant.pages}
        self._in_flight.append((pending, [array.copy() for array in arrays_of(plan)], pages))
        self.plans.append(plan)
        return pending

    def land(self, pending: Pending) -> StepResult:
        oldest, as_submitted, _ = self._in_flight.popleft()
        assert oldest is pending, "results are read in the order of the steps"
        # A real device may read its plan as late as now.
        for array, before in zip(arrays_of(pending.plan), as_submitted, strict=True):
            assert np.array_equal(array, before), "a plan changed after it was submitted"
        return pending.outcome

    def counters(self) -> dict[str, int]:
        return {"recompiles": 0, "eager_steps": 0, "kernel_builds": 0}

    def shutdown(self) -> None:
        self.shut_down = True

    # --- the step ---

    def _admit(self, admission: Admission) -> None:
        assert 1 <= admission.slot <= self.limits.slots
        for plan in (pending.plan for pending, _, _ in self._in_flight):
            busy = [*plan.decode_slots.tolist(), *(span.slot for span in plan.spans)]
            assert admission.slot not in busy, "a slot has a new tenant while a step of the old one is in flight"
        self._admitted += 1
        tenant = Tenant(admission, self._admitted)
        tenant.history = [*admission.prompt.tolist(), *admission.answer.tolist()]
        self._tenants[admission.slot] = tenant

    def _write_page(self, slot: int, index: int, page: int, used: Sequence[int]) -> None:
        tenant = self._tenants[slot]
        assert slot in used, "a page is given to a slot that takes no part in the step"
        assert 1 <= page <= self.limits.pages
        assert index == len(tenant.pages), "a page table grows at its end"
        assert index * self.limits.page_size < self.limits.max_model_len
        for _, _, pages in self._in_flight:
            assert page not in pages, "a page is used again while a step that may write it is in flight"
        tenant.pages.append(page)
        self._owner[page] = tenant

    def _decode(self, slot: int) -> tuple[Tenant, bool]:
        tenant = self._tenants[slot]
        assert tenant.prefilled, "a slot decodes before its prompt is computed"
        assert tenant.length == len(tenant.history) - 1, "a slot decodes without a sampled token"
        self._compute(tenant, tenant.history[-1:])
        return tenant, True

    def _prefill(self, span: Any) -> tuple[Tenant, bool]:
        tenant, size = self._tenants[span.slot], self.limits.page_size
        known = len(tenant.admission.prompt) + len(tenant.admission.answer)
        stop = span.start + len(span.ids)
        assert len(span.ids) > 0
        assert span.start == tenant.length, "spans follow each other"
        assert stop <= known
        assert span.samples == (stop == known)
        assert span.start % size == 0, "a chunk starts with a page"
        assert span.samples or stop % size == 0, "a chunk ends with a page, or with the prompt"
        assert span.ids.tolist() == tenant.history[span.start : stop]
        self._compute(tenant, span.ids.tolist())
        return tenant, span.samples

    def _compute(self, tenant: Tenant, ids: Sequence[int]) -> None:
        """Write the tokens' "keys and values": the tokens themselves, where they stand, and whose they are."""
        for token in ids:
            place = divmod(tenant.length, self.limits.page_size)
            assert place[0] < len(tenant.pages), "a token has no page"
            where = tenant.pages[place[0]], place[1]
            assert tenant.length < self.limits.max_model_len
            self._token[where], self._position[where], self._tenant[where] = token, tenant.length, tenant.number
            tenant.length += 1
        assert all(self._owner[page] is tenant for page in tenant.pages), "two live slots have a page in common"

    def _read(self, tenant: Tenant) -> list[int]:
        """The sequence so far, as attention finds it."""
        pages = np.array(tenant.pages)
        tokens, positions, tenants = (
            part[pages].ravel()[: tenant.length] for part in (self._token, self._position, self._tenant)
        )
        assert (tokens != NOTHING).all(), "a position is read that was never written"
        assert (positions == np.arange(tenant.length)).all()
        assert (tenants == tenant.number).all(), "a position is read that another request wrote"
        return [int(token) for token in tokens]

    def _sample(self, tenants: Sequence[Tenant], plan: StepPlan) -> StepResult:
        tokens, chosen = [], []
        for tenant in tenants:
            admission = tenant.admission
            sequence = self._read(tenant)
            assert sequence == tenant.history, "what was computed is not what was asked for and sampled"
            banned = admission.stop_ids if tenant.generated < admission.sampling.min_tokens else ()
            token = next_token(sequence, admission.seed, self.limits.vocab, banned)
            self.sampled.append(Sampled(plan.number, admission.seed, tenant.generated))
            tenant.history.append(token)
            tokens.append(token)
            chosen.append(logprob(sequence))
        assert [tenant.admission.slot for tenant in tenants] == plan.sampling_slots.tolist()
        logprobs = None
        if any(tenant.admission.sampling.logprobs for tenant in tenants):
            # The alternatives: the token itself and its successor, a little less likely.
            ids = np.full((len(tokens), MAX_LOGPROBS), -1, np.int32)
            values = np.full((len(tokens), MAX_LOGPROBS), -np.inf, np.float32)
            ids[:, 0], ids[:, 1] = tokens, np.array(tokens) + 1
            values[:, 0], values[:, 1] = chosen, np.array(chosen) - 1
            logprobs = Logprobs(np.array(chosen, np.float32), ids, values)
        return StepResult(np.array(tokens, np.int32), logprobs)


def check_types(plan: StepPlan) -> None:
    """A plan is numpy and numbers, of exactly these kinds."""
    assert plan.page_writes.dtype == np.int32
    assert plan.page_writes.shape == (len(plan.page_writes), 3)
    for array in arrays_of(plan):
        assert type(array) is np.ndarray
        assert array.dtype == np.int32
        assert array.ndim == 1 or array is plan.page_writes
    assert type(plan.number) is int
    assert type(plan.tokens) is int
    for span in plan.spans:
        assert (type(span.slot), type(span.start), type(span.samples)) == (int, int, bool)
    for admission in plan.admissions:
        assert (type(admission.slot), type(admission.seed)) == (int, int)


def arrays_of(plan: StepPlan) -> list[Int32]:
    arrays = [plan.page_writes, plan.decode_slots, plan.sampling_slots, *(span.ids for span in plan.spans)]
    return arrays + [part for admission in plan.admissions for part in (admission.prompt, admission.answer)]


def make_request(
    number: int,
    prompt: Int32 | int,
    max_tokens: int,
    *,
    stop_ids: tuple[int, ...] = (),
    incremental: bool = False,
    **sampling: Any,
) -> Request:
    """A request whose seed is its number; a prompt that is only a length has made-up ids."""
    ids = np.arange(number, number + prompt, dtype=np.int32) % 7 if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(number, ids, params, number, stop_ids, len(ids) + max_tokens, incremental or params.logprobs)
