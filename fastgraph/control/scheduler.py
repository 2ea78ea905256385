"""Queues and pages in, `StepPlan` out: continuous batching, prefill chunks riding with decode, first in first out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from fastgraph.control.pages import PagePool
from fastgraph.control.plan import Admission, Int32, Limits, Logprobs, PrefillSpan, StepPlan, StepResult
from fastgraph.control.queues import Span, SpanQueue
from fastgraph.control.states import (
    Decoding,
    Finishing,
    FinishReason,
    Prefilling,
    Request,
    State,
    Times,
    Waiting,
    admit,
    decode,
    finish,
    release,
    retract,
)
from fastgraph.control.table import SlotTable
from fastgraph.errors import RequestError

PAGES_AHEAD = 4  # pages a decoding slot is given at once, so that most steps change no page table


@dataclass(frozen=True, slots=True)
class Output:
    """What the front learns of a request: new tokens if it is incremental, all of them when it ends."""

    request_id: int
    token_ids: Int32  # [new tokens]
    logprobs: Logprobs | None  # a row per new token
    finish_reason: FinishReason | None
    times: Times


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


class Scheduler:
    """Owns every request's state, the page pool and the slots. Not thread-safe: one loop drives it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.table = SlotTable(limits)
        self.pool = PagePool(limits.pages)
        self.queue = SpanQueue()
        self.states: dict[int, State] = {}
        self.preemptions = 0
        self._free_slots = list(range(limits.slots, 0, -1))  # a stack; the lowest is taken first
        self._finishing: deque[Finishing] = deque()  # oldest last step first
        self._planned = 0  # number of the newest step
        self._landed = 0  # number of the newest step whose result is in

    @property
    def in_flight(self) -> int:
        return self._planned - self._landed

    @property
    def waiting(self) -> int:
        return sum(isinstance(state, Waiting) for state in self.states.values())

    @property
    def running(self) -> int:
        return self.limits.slots - len(self._free_slots)

    # --- requests come and go ---

    def submit(self, request: Request) -> None:
        """Queue a request, one that `check` lets pass. Ids must grow from one to the next: they are its age."""
        check(request, self.limits)
        self._wait(Waiting(request, np.empty(0, np.int32), Times(0.0, 0.0)))

    def abort(self, request_id: int) -> Output | None:
        """End a request now, wherever it is; its tokens so far come back. None if it has ended already."""
        match self.states.get(request_id):
            case Waiting(request, answer, times):
                self.queue.remove(request_id)
                del self.states[request_id]
                return Output(request_id, answer[:0] if request.incremental else answer, None, "abort", times)
            case (Prefilling() | Decoding()) as state:
                slot, incremental = state.resources.slot, state.request.incremental
                answer, times = self.table.answer(slot), self.table.times(slot)
                self._finish(state)
                self._release_landed()
                return Output(request_id, answer[:0] if incremental else answer, None, "abort", times)
            case _:
                return None

    def _wait(self, state: Waiting) -> None:
        self.states[state.request.id] = state
        span = Span(state.request.id, 0, len(state.request.prompt) + len(state.answer))
        # What was retracted came before all that waits; ids grow with time.
        head = self.queue.head
        if head is not None and state.request.id < head.request_id:
            self.queue.push_front(span)
        else:
            self.queue.push(span)

    def _finish(self, state: Prefilling | Decoding) -> None:
        if isinstance(state, Prefilling):
            self.queue.remove(state.request.id)
        self.table.retire(state.resources.slot)
        finishing = finish(state, self._planned)
        self.states[state.request.id] = finishing
        self._finishing.append(finishing)

    def _release_landed(self) -> None:
        """Free what finished requests held, once no step in flight can write it."""
        while self._finishing and self._finishing[0].last_step <= self._landed:
            state = self._finishing.popleft()
            self._free_slots.append(state.resources.slot)
            del self.states[release(state).request.id]

    # --- planning ---

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do until a step in flight lands or a request comes."""
        slots = self.table.ready()
        writes: list[Int32] = []  # each [pages, 3], as in the plan
        if self.table.cramped(slots).size:
            if not self._make_room(slots):
                return None
            slots = self.table.ready()
            writes.append(self._grow_decoding(self.table.cramped(slots)))
        admissions: list[Admission] = []
        spans = self._prefill(self.limits.max_step_tokens - len(slots), len(slots), admissions, writes)
        if not len(slots) and not spans:
            return None
        self.table.scheduled[slots] += 1
        self._planned += 1
        page_writes = np.concatenate(writes) if writes else np.empty((0, 3), np.int32)
        return StepPlan(self._planned, tuple(admissions), page_writes, slots, tuple(spans))

    def _make_room(self, slots: Int32) -> bool:
        """Retract the newest requests until every decoding slot that needs a page can have one.

        False if steps are in flight: they must land first, for they may free pages, and a retracted request's
        answer must be complete.
        """
        while len(self.table.cramped(slots)) > self.pool.free:
            if self.in_flight:
                return False
            newest = int(self.table.request_id[self.table.running].max())
            state = self.states[newest]
            assert isinstance(state, (Prefilling, Decoding))
            slot = state.resources.slot
            answer = self.table.answer(slot)
            self.queue.remove(newest)
            self.table.retire(slot)
            self._free_slots.append(slot)
            self._wait(retract(state, answer, self.table.times(slot)))
            self.preemptions += 1
            slots = self.table.ready()
        return True

    def _grow_decoding(self, cramped: Int32) -> Int32:
        size = self.limits.page_size
        ask = -(-(self.table.limit[cramped] - 1) // size) - self.table.capacity[cramped] // size
        ask = np.minimum(ask, PAGES_AHEAD)
        if ask.sum() > self.pool.free - len(cramped):
            ask[:] = 1
        return self._grow(cramped, ask)

    def _grow(self, slots: Int32, counts: Int32) -> Int32:
        """Give running slots more pages. Returns the writes to their page tables: [pages, 3]."""
        leases = []
        for request_id in self.table.request_id[slots].tolist():
            state = self.states[request_id]
            assert isinstance(state, (Prefilling, Decoding))
            leases.append(state.resources.lease)
        pages = self.pool.grow(leases, counts)
        held = self.table.capacity[slots] // self.limits.page_size
        first = np.cumsum(counts) - counts  # where in `pages` each slot's begin
        index = np.arange(len(pages)) + np.repeat(held - first, counts)
        self.table.capacity[slots] += counts * self.limits.page_size
        return np.stack([np.repeat(slots, counts), index, pages], axis=1).astype(np.int32)

    def _prefill(
        self, budget: int, decoding: int, admissions: list[Admission], writes: list[Int32]
    ) -> list[PrefillSpan]:
        """Fill the step's token budget from the head of the queue. The head is never overtaken."""
        spans: list[PrefillSpan] = []
        while head := self.queue.head:
            state = self.states[head.request_id]
            assert isinstance(state, (Waiting, Prefilling))
            tokens = self._chunk(head, state, budget, decoding)
            if not tokens:
                break
            if isinstance(state, Waiting):
                state = self._admit(state, admissions)
            span, slot = self.queue.bite(tokens), state.resources.slot
            missing = -(-span.stop // self.limits.page_size) - len(state.resources.lease)
            if missing > 0:
                writes.append(self._grow(np.array([slot], np.int32), np.array([missing], np.int32)))
            samples = span.stop == int(self.table.known[slot])
            spans.append(PrefillSpan(slot, span.start, self.table.tokens[slot, span.start : span.stop].copy(), samples))
            self.table.scheduled[slot] = span.stop
            if not samples:
                break  # the rest of the prompt is next, and a slot has one row in a step
            budget -= tokens
            decoding += 1
            self.states[head.request_id] = decode(state)
            self.table.decoding[slot] = True
        return spans

    def _chunk(self, head: Span, state: Waiting | Prefilling, budget: int, decoding: int) -> int:
        """How many of the head's tokens this step can take: page-aligned unless they end the prompt."""
        size = self.limits.page_size
        if isinstance(state, Waiting):
            if not self._free_slots:
                return 0
            # Each decoding slot may ask for a page soon: to admit the last page away would only retract it again.
            held, spare = 0, self.pool.free - decoding
            # What was retracted comes back once there is room for all of it, or the same happens again and again.
            if state.times.admitted and -(-head.stop // size) > spare:
                return 0
        else:
            held, spare = len(state.resources.lease), self.pool.free
        stop = min(head.start + budget, head.stop, (held + max(spare, 0)) * size)
        if stop < head.stop:
            stop -= stop % size
        return max(stop - head.start, 0)

    def _admit(self, state: Waiting, admissions: list[Admission]) -> Prefilling:
        slot = self._free_slots.pop()
        self.table.admit(slot, state)
        request = state.request
        admissions.append(
            Admission(slot, request.sampling, request.seed, request.stop_ids, request.prompt, state.answer)
        )
        prefilling = admit(state, slot, self.pool.lease())
        self.states[request.id] = prefilling
        return prefilling

    # --- results ---

    def land(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take a step's tokens in, oldest step first. Tokens of requests that have ended meanwhile are dropped."""
        self._landed = plan.number
        rows = np.flatnonzero(self.table.running[plan.sampling_slots])
        slots = plan.sampling_slots[rows]
        stopped, full = self.table.land(slots, result.tokens[rows])
        outputs = []
        for i in np.flatnonzero(stopped | full | self.table.incremental[slots]).tolist():
            reason: FinishReason | None = "stop" if stopped[i] else "length" if full[i] else None
            outputs.append(self._output(int(slots[i]), int(rows[i]), result, reason))
        self._release_landed()
        return outputs

    def _output(self, slot: int, row: int, result: StepResult, reason: FinishReason | None) -> Output:
        request_id = int(self.table.request_id[slot])
        state = self.states[request_id]
        assert isinstance(state, Decoding)
        logprobs = None
        if state.request.incremental:
            tokens = result.tokens[row : row + (reason != "stop")]
            if result.logprobs is not None and state.request.sampling.logprobs and len(tokens):
                logprobs = result.logprobs.row(row)
        else:
            tokens = self.table.answer(slot)
        if reason is not None:
            self._finish(state)
        return Output(request_id, tokens, logprobs, reason, self.table.times(slot))
