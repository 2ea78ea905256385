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
from numpy.typing import NDArray

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


def digest_of(tokens: Sequence[int], before: int = 0) -> int:
    """Of a whole sequence, or of tokens that follow a sequence whose digest is known."""
    return zlib.crc32(np.array(tokens, np.int32).tobytes(), before)


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
    lives: list[int] = field(default_factory=list)  # of each page, how often it had been given out when it came
    length: int = 0  # tokens in its pages
    history: list[int] = field(default_factory=list)  # prompt, answer, and what was sampled since

    @property
    def generated(self) -> int:
        return len(self.history) - len(self.admission.prompt)

    @property
    def known(self) -> int:
        return len(self.admission.prompt) + len(self.admission.answer)

    @property
    def prefilled(self) -> bool:
        """Whether the last token of its history was sampled here, and is yet to be computed."""
        return self.length >= self.known


@dataclass
class Pending:
    device: SimulatedDevice
    plan: StepPlan
    outcome: StepResult

    def ready(self) -> bool:
        return self.device.ahead

    def result(self) -> StepResult:
        return self.device.land(self)


@dataclass(frozen=True)
class Sampled:
    """A token that was sampled."""

    step: int
    seed: int
    index: int  # in the answer


def joined(outcomes: Sequence[StepResult], step_seconds: float) -> StepResult:
    """The result of several steps in a row."""
    tokens, logprobs = np.concatenate([outcome.tokens for outcome in outcomes]), None
    if parts := [outcome.logprobs for outcome in outcomes if outcome.logprobs is not None]:
        names = ("chosen", "top_ids", "top")
        logprobs = Logprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    return StepResult(tokens, logprobs, step_seconds * len(outcomes))


class SimulatedDevice:
    """Implements `fastgraph.control.plan.Device`, and the builder's part of `DeviceHandle` for an `Engine`."""

    def __init__(self, limits: Limits, depth: int = 0, on_step: Callable[[StepPlan], None] | None = None) -> None:
        self.limits = limits
        self.depth = depth
        self.on_step = on_step
        self.step_seconds = 0.001  # that it claims a step to take
        self.steps = 0
        self.computed = 0  # tokens
        self.sampled: list[Sampled] = []
        self.plans: list[StepPlan] = []
        self.shut_down = False
        self.ahead = False  # whether every step has run by the time it is asked for
        # With copies of the plan's arrays, and those whose pages the step may read or write.
        self._in_flight: deque[tuple[Pending, list[Int32], list[Tenant]]] = deque()
        self.tenants: dict[int, Tenant] = {}
        self._admitted = 0
        self._owner: dict[int, int] = {}  # of a page: the number of the tenant who may write it
        self._life = [0] * (limits.pages + 1)  # how often a page was given to somebody to write
        # [pages, page_size, 3] of (token, position, digest of all tokens up to here), on the device and on the host
        self.cells = np.full((limits.pages + 1, limits.page_size, 3), NOTHING, np.int64)
        self._host_cells = np.full((limits.host_pages + 1, limits.page_size, 3), NOTHING, np.int64)

    # --- what the control plane calls ---

    def execute(self, plan: StepPlan) -> Pending:
        assert not self.shut_down
        if self.on_step is not None:
            self.on_step(plan)
        check_types(plan)
        self.steps += 1
        assert plan.number == self.steps, "steps are numbered one by one"
        assert len(self._in_flight) <= self.depth, "more steps in flight than allowed"
        assert 0 < plan.tokens // plan.repeats <= self.limits.max_step_tokens
        assert plan.repeats == 1 or (plan.repeats <= self.limits.multi_step and not plan.spans)
        used = [*plan.decode_slots.tolist(), *(span.slot for span in plan.spans)]
        assert len(used) == len(set(used)), "a slot has two rows in one step"
        assert NULL_SLOT not in used
        for admission in plan.admissions:
            self._admit(admission)
            assert any(span.slot == admission.slot for span in plan.spans), "a slot is taken before it is needed"
        self._copy_pages(plan)
        for slot, index, page in plan.page_writes.tolist():
            self._write_page(slot, index, page, used, page in plan.restores[:, 1])
        for admission in plan.admissions:
            self._check_beginning(self.tenants[admission.slot])
        outcomes = []
        for _ in range(plan.repeats):
            rows = [self._decode(slot) for slot in plan.decode_slots.tolist()]
            rows += [self._prefill(span) for span in plan.spans]
            outcomes.append(self._sample([tenant for tenant, samples in rows if samples], plan))
        self.computed += plan.tokens
        pending = Pending(self, plan, joined(outcomes, self.step_seconds))
        tenants = [tenant for tenant, _ in rows]
        self._in_flight.append((pending, [array.copy() for array in arrays_of(plan)], tenants))
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
        tenant = Tenant(admission, self._admitted, length=admission.computed)
        tenant.history = [*admission.prompt.tolist(), *admission.answer.tolist()]
        assert 0 <= tenant.length < tenant.known, "there is nothing left to take logits from"
        self.tenants[admission.slot] = tenant

    def _copy_pages(self, plan: StepPlan) -> None:
        for page, host_page in plan.snapshots.tolist():
            assert 1 <= host_page <= self.limits.host_pages
            self._host_cells[host_page] = self.cells[page]
        for host_page, page in plan.restores.tolist():
            self.cells[page] = self._host_cells[host_page]
        # Of snapshots the last one counts: the request of an earlier one may have been ended before the plan was made.
        restored = plan.restores[:, 1].tolist()
        assert len(set(restored)) == len(restored), "two pages are restored to one place"

    def _check_beginning(self, tenant: Tenant) -> None:
        """What a request finds computed must be its own beginning, written by earlier steps."""
        if tenant.length:
            assert self._read(tenant) == tenant.history[: tenant.length], "cached pages of another prompt"

    def _write_page(self, slot: int, index: int, page: int, used: Sequence[int], restored: bool) -> None:
        tenant = self.tenants[slot]
        assert slot in used, "a page is given to a slot that takes no part in the step"
        assert 1 <= page <= self.limits.pages
        assert index == len(tenant.pages), "a page table grows at its end"
        assert index * self.limits.page_size < self.limits.max_model_len
        if restored or index * self.limits.page_size >= tenant.admission.computed:
            for tenants in (tenants for _, _, tenants in self._in_flight):
                for other in tenants:  # what is behind its window, no later step reads or writes
                    busy = other.pages[self._seen(other, other.length + 1) :]
                    assert page not in busy, "a page is used again while a step that may write it is in flight"
            self._owner[page] = tenant.number
            self._life[page] += 1
        else:  # shared: to be read alone
            assert self.limits.prefix_cache
        tenant.pages.append(page)
        tenant.lives.append(self._life[page])

    def _decode(self, slot: int) -> tuple[Tenant, bool]:
        tenant = self.tenants[slot]
        assert tenant.prefilled, "a slot decodes before its prompt is computed"
        assert tenant.length == len(tenant.history) - 1, "a slot decodes without a sampled token"
        self._compute(tenant, tenant.history[-1:])
        return tenant, True

    def _prefill(self, span: Any) -> tuple[Tenant, bool]:
        tenant, size = self.tenants[span.slot], self.limits.page_size
        known = tenant.known
        stop = span.start + len(span.ids)
        assert len(span.ids) > 0
        assert span.start == tenant.length, "spans follow each other"
        assert stop <= known
        assert span.samples == (stop == known)
        assert span.start % size == 0 or stop == known, "a chunk starts with a page, or is what was not saved"
        assert span.samples or stop % size == 0, "a chunk ends with a page, or with the prompt"
        assert span.ids.tolist() == tenant.history[span.start : stop]
        self._compute(tenant, span.ids.tolist())
        return tenant, span.samples

    def _compute(self, tenant: Tenant, ids: Sequence[int]) -> None:
        """Write the tokens' "keys and values": the token, where it stands, and what attention sees before it."""
        first = self._seen(tenant, tenant.length + 1)
        seen = first * self.limits.page_size
        assert self._cells_of(tenant)[seen:, 0].tolist() == tenant.history[seen : tenant.length], "the window is gone"
        digest = int(self._cells_of(tenant)[-1, 2]) if tenant.length > seen else digest_of(tenant.history[:seen])
        for token in ids:
            index, offset = divmod(tenant.length, self.limits.page_size)
            assert index < len(tenant.pages), "a token has no page"
            assert self._owner[tenant.pages[index]] == tenant.number, "a page is written that belongs to somebody else"
            assert tenant.length < self.limits.max_model_len
            digest = digest_of([token], digest)
            self.cells[tenant.pages[index], offset] = token, tenant.length, digest
            tenant.length += 1
        assert tenant.lives[first:] == [self._life[page] for page in tenant.pages[first:]], (
            "a page was given away while it was in use"
        )

    def _read(self, tenant: Tenant) -> list[int]:
        """The sequence so far, as attention finds it: what is behind the window, it never looks at."""
        seen = self._seen(tenant, tenant.length) * self.limits.page_size
        cells = self._cells_of(tenant)[seen:]
        assert len(cells) == tenant.length - seen, "a position has no page"
        assert (cells != NOTHING).all(), "a position is read that was never written"
        assert (cells[:, 1] == np.arange(seen, tenant.length)).all()
        assert cells[-1, 2] == digest_of(tenant.history[: tenant.length]), "written after other tokens than these"
        return [*tenant.history[:seen], *(int(token) for token in cells[:, 0])]

    def _seen(self, tenant: Tenant, length: int) -> int:
        """The first page that the last token of a sequence of `length` looks back to."""
        return max(0, length - self.limits.window) // self.limits.page_size if self.limits.window else 0

    def _cells_of(self, tenant: Tenant) -> NDArray[np.int64]:
        """[length, 3]"""
        cells: NDArray[np.int64] = self.cells[tenant.pages].reshape(-1, 3)[: tenant.length]
        return cells

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
        slots = [tenant.admission.slot for tenant in tenants]
        assert slots == plan.sampling_slots.tolist()
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
    assert plan.snapshots.shape == (len(plan.snapshots), 2)
    assert plan.restores.shape == (len(plan.restores), 2)
    for array in arrays_of(plan):
        assert type(array) is np.ndarray
        assert array.dtype == np.int32
        assert array.ndim == 1 or any(array is table for table in (plan.page_writes, plan.snapshots, plan.restores))
    assert type(plan.number) is int
    assert type(plan.tokens) is int
    for span in plan.spans:
        assert (type(span.slot), type(span.start), type(span.samples)) == (int, int, bool)
    for admission in plan.admissions:
        assert (type(admission.slot), type(admission.seed), type(admission.computed)) == (int, int, int)


def arrays_of(plan: StepPlan) -> list[Int32]:
    arrays = [plan.page_writes, plan.snapshots, plan.restores, plan.decode_slots, plan.sampling_slots]
    arrays += [span.ids for span in plan.spans]
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
