"""Queues and pages in, `StepPlan` out: continuous batching, prefill chunks riding with decode, cached prefixes."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from math import isnan
from numbers import Real
from typing import NamedTuple

import numpy as np

from fastgraph.control.draft import Draft
from fastgraph.control.forecast import Forecast, peak
from fastgraph.control.growth import PAGES_AHEAD, Growth
from fastgraph.control.pace import Pace
from fastgraph.control.pages import PagePool
from fastgraph.control.plan import Admission, Int32, Limits, Logprobs, PrefillSpan, StepPlan, StepResult
from fastgraph.control.policy import Policy, first_come
from fastgraph.control.prefix import page_keys
from fastgraph.control.queues import Span, SpanQueue
from fastgraph.control.states import (
    Decoding,
    Finishing,
    FinishReason,
    Past,
    Prefilling,
    Queued,
    Request,
    Retracted,
    Running,
    State,
    Waiting,
    admit,
    check,
    decode,
    finish,
    release,
    restore,
    retract,
    save,
)
from fastgraph.control.table import SlotTable
from fastgraph.errors import RequestError


class Output(NamedTuple):
    """What the front learns of a request: new tokens if it is incremental, all of them when it ends."""

    request_id: int
    token_ids: Int32  # [new tokens]
    logprobs: Logprobs | None  # a row per new token
    finish_reason: FinishReason | None
    past: Past


class Scheduler:
    """Owns every request's state, the pages and the slots. Not thread-safe: one loop drives it."""

    def __init__(self, limits: Limits, policy: Policy = first_come) -> None:
        self.limits, self.policy = limits, policy
        self.table = SlotTable(limits)
        self.pool = PagePool(limits.pages)
        self.host = PagePool(limits.host_pages)
        self.queue = SpanQueue()
        self.forecast = Forecast()
        self.states: dict[int, State] = {}
        self._growth = Growth(limits, self.table, self.pool, self.states)
        self.preemptions = 0
        self.preemptions_saved = 0  # of these, with the pages kept on the host
        self.prompt_tokens = 0  # of all requests that got a slot
        self.prefix_hit_tokens = 0  # of these, found in the prefix tree
        self._free_slots = list(range(limits.slots, 0, -1))  # a stack; the lowest is taken first
        self._finishing: deque[Finishing] = deque()  # oldest last step first
        self._snapshots: list[Int32] = []  # for the next plan, each [pages, 2]
        self._planned = 0  # number of the newest step
        self._landed = 0  # number of the newest step whose result is in
        self._pace = Pace(limits.multi_step)

    @property
    def in_flight(self) -> int:
        return self._planned - self._landed

    @property
    def waiting(self) -> int:
        return sum(isinstance(state, Queued) for state in self.states.values())

    @property
    def running(self) -> int:
        return self.limits.slots - len(self._free_slots)

    # --- requests come and go ---

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if it could never run."""
        check(request, self.limits)
        number = self.policy(request)
        if not isinstance(number, Real) or isnan(number):
            raise RequestError(f"the policy has not given this request a number, but {number!r}")
        self._pace.came()
        self._enqueue(Waiting(request, np.empty(0, np.int32), Past(float(number), 0.0, 0.0, 0)), 0)

    def abort(self, request_id: int) -> Output | None:
        """End a request now, wherever it is; its tokens so far come back. None if it has ended already."""
        match self.states.get(request_id):
            case (Waiting() | Retracted()) as queued:
                answer, past, incremental = queued.answer, queued.past, queued.request.incremental
                self.queue.remove(request_id)
                if isinstance(queued, Retracted):
                    queued.saved.release()
                del self.states[request_id]
            case (Prefilling() | Decoding()) as running:
                slot, incremental = running.resources.slot, running.request.incremental
                answer, past = self.table.answer(slot), self.table.past[slot]
                self._finish(running)
                self._release_landed()
            case _:
                return None
        return Output(request_id, answer[:0] if incremental else answer, None, "abort", past)

    def _enqueue(self, state: Queued, computed: int) -> None:
        request = state.request
        self.states[request.id] = state
        span = Span(request.id, computed, len(request.prompt) + len(state.answer))
        self.queue.push(span, state.past.number)

    def _finish(self, state: Running) -> None:
        if isinstance(state, Prefilling):
            self.queue.remove(state.request.id)
        slot = state.resources.slot
        self._publish(state, self._planned)
        generated, prompt = int(self.table.known[slot] - self.table.prompt[slot]), len(state.request.prompt)
        if isinstance(state, Decoding):  # of an answer that has not begun, nothing can be learnt
            self.forecast.ended(generated, state.request.max_length - prompt)
        self.table.retire(slot)
        finishing = finish(state, self._planned)
        self.states[state.request.id] = finishing
        self._finishing.append(finishing)

    def _publish(self, state: Running, step: int) -> None:
        """Let other requests find the full pages that `step` and those before it write."""
        lease, size = state.resources.lease, self.limits.page_size
        if self.limits.prefix_cache and not lease.dropped:
            # Past a window's length pages are given back while others follow them, which the tree does not allow.
            tokens = self.table.written(state.resources.slot)[: self.limits.window or None]
            self.pool.publish(lease, page_keys(tokens[lease.published * size :], size), step)

    def _release_landed(self) -> None:
        """Free what finished requests held, once no step in flight can write it."""
        while self._finishing and self._finishing[0].last_step <= self._landed:
            state = self._finishing.popleft()
            self._free_slots.append(state.resources.slot)
            del self.states[release(state).request.id]

    # --- planning ---

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do until a step in flight lands or a request comes."""
        draft = Draft()
        if self.table.batch().room < self.limits.multi_step and not self._give_pages(draft):
            return None
        batch = self.table.batch()
        self._prefill(self.limits.max_step_tokens - len(batch.slots), draft)
        if not len(batch.slots) and not draft.spans:
            return None
        repeats = 1 if draft.spans or self.queue.head else self._pace.steps()
        if repeats > 1:
            repeats = min(repeats, batch.left, batch.room)
        self.table.schedule(batch, repeats)
        self._planned += 1
        snapshots, self._snapshots = self._snapshots, []
        return draft.plan(self._planned, batch.slots, repeats, snapshots)

    def _give_pages(self, draft: Draft) -> bool:
        """Give pages to the decoding slots that need some for this plan. False if steps in flight must land first."""
        slots = self.table.batch().slots
        if (cramped := self.table.cramped(slots, self.limits.multi_step)).size:
            self._growth.drop_behind(cramped)
            if not self._make_room(slots):
                return False
            waiting = self.queue.head is not None
            self._growth.extend_decoding(self.table.batch().slots, self.running, waiting, draft)
        return True

    def _make_room(self, slots: Int32) -> bool:
        """Retract requests until every decoding slot that needs a page can have one.

        False if steps are in flight: they must land first, for they may free pages, and a retracted request's
        answer must be complete.
        """
        while len(self.table.cramped(slots)) > self.pool.available:
            if self.in_flight:
                return False
            self.retract_last()
            self.forecast.missed()
            slots = self.table.batch().slots
        return True

    def retract_last(self) -> None:
        """Take slot and pages from the running request that is last in the policy's order. No step may be in flight.

        Its pages are copied to the host if there is room for all of them; if not, they are computed again.
        """
        assert not self.in_flight
        slot = self.table.last()
        state = self.states[int(self.table.request_id[slot])]
        assert isinstance(state, (Prefilling, Decoding))
        answer, past, computed = self.table.answer(slot), self.table.past[slot], int(self.table.scheduled[slot])
        self._publish(state, self._planned)
        pages = state.resources.lease.pages[: -(-computed // self.limits.page_size)]
        self.queue.remove(state.request.id)
        self.table.retire(slot)
        self._free_slots.append(slot)
        self.preemptions += 1
        if len(pages) <= self.host.free and not state.resources.lease.dropped:
            saved = self.host.lease(len(pages))
            self.preemptions_saved += 1
            self._snapshots.append(np.stack([pages, saved.pages], axis=1))
            self._enqueue(save(state, answer, past, computed, saved), computed)
        else:
            self._enqueue(retract(state, answer, past), 0)

    def _prefill(self, budget: int, draft: Draft) -> None:
        """Fill the step's token budget from the head of the queue. The head is never overtaken."""
        while head := self.queue.head:
            state = self.states[head.request_id]
            if isinstance(state, Queued):
                tokens = self._admit(state, head, budget, draft)
            else:
                assert isinstance(state, Prefilling)
                self._growth.drop_behind(np.array([state.resources.slot]))
                tokens = self._chunk(head, budget, len(state.resources.lease) + self.pool.available)
            if not tokens:
                break
            state = self.states[head.request_id]
            assert isinstance(state, Prefilling)
            span, slot = self.queue.bite(tokens), state.resources.slot
            self._growth.extend(state, span.stop, draft)
            samples = span.stop == int(self.table.known[slot])
            ids = self.table.tokens[slot, span.start : span.stop].copy()
            draft.spans.append(PrefillSpan(slot, span.start, ids, samples))
            self.table.scheduled[slot] = span.stop
            self._publish(state, self._planned + 1)
            if not samples:
                break  # the rest of the prompt is next, and a slot has one row in a step
            budget -= tokens
            self.states[head.request_id] = decode(state)
            self.table.begin(slot)

    def _chunk(self, span: Span, budget: int, pages: int) -> int:
        """How many of the span's tokens a step can take: page-aligned unless they end it."""
        size = self.limits.page_size
        stop = min(span.start + budget, span.stop, pages * size)
        if stop < span.stop:
            stop -= stop % size
        return max(stop - span.start, 0)

    def _admit(self, state: Queued, head: Span, budget: int, draft: Draft) -> int:
        """Give the head a slot and the pages that hold its beginning already, its own saved ones or cached ones.

        Returns how many of its tokens the step can take; 0 if it has to wait.
        """
        if not self._free_slots:
            return 0
        request, size = state.request, self.limits.page_size
        known = np.concatenate([request.prompt, state.answer])
        # The last token is computed in any case, for its logits.
        keys = page_keys(known[:-1], size) if self.limits.prefix_cache else ()
        found, being_written = self.pool.tree.find(keys, self._planned + 1)
        cached = len(found) * size
        span = Span(head.request_id, max(head.start, cached), head.stop)
        room = self.pool.available - len(self.pool.unheld(found))
        tokens = self._chunk(span, budget, len(found) + room)
        # What another prompt is having computed in this very step can be shared in the next one.
        if being_written or not tokens or not self._fits(state, len(known) - cached, room):
            return 0
        slot = self._free_slots.pop()
        self.table.admit(slot, state, span.start, cached)
        lease = self.pool.share(found)
        draft.write_pages(slot, 0, lease.pages)
        if isinstance(state, Retracted):
            saved = state.saved.pages[len(found) :]
            self.states[request.id] = restored = restore(state, slot, lease)
            self._growth.extend(restored, span.start, draft)
            draft.restores.append(np.stack([saved, restored.resources.lease.pages[len(found) :]], axis=1))
        else:
            self.states[request.id] = admit(state, slot, lease)
        if not state.past.admitted:
            self.prompt_tokens += len(request.prompt)
            self.prefix_hit_tokens += cached
        draft.admissions.append(
            Admission(slot, request.sampling, request.seed, request.stop_ids, request.prompt, state.answer, span.start)
        )
        self.queue.bite(span.start - head.start)
        return tokens

    def _fits(self, state: Queued, tokens: int, room: int) -> bool:
        """Whether a newcomer, with `tokens` in pages of its own, and all that decodes are expected to find room.

        What decodes has the pages it holds, and `room` pages besides. A request alone always fits: see `check`.
        """
        table, size = self.table, self.limits.page_size
        slots = np.flatnonzero(table.decoding)
        if not len(slots):
            return True
        prompt, longest = len(state.request.prompt), state.request.max_length
        all_of_it = table.limit[slots].sum() - table.capacity[slots].sum() + longest - prompt + tokens
        if all_of_it // size + len(slots) + 1 <= room:
            return True  # most often, and soon said
        own = np.append(table.scheduled[slots] - table.shared[slots], tokens)
        generated = np.append(table.known[slots] - table.prompt[slots], len(state.answer))
        most = np.append(table.limit[slots] - table.prompt[slots], longest - prompt)
        held = int((table.capacity[slots] - table.shared[slots]).sum()) // size
        left = self.forecast.left(generated, most, size)
        # A request grows until pages come back from behind the window, and no further.
        largest = self.limits.window and self.limits.window * (1 + self.limits.prefix_cache) + PAGES_AHEAD * size
        return peak(own, left, size, largest) <= held + room

    # --- results ---

    def land(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take a step's tokens in, oldest step first. Tokens of requests that have ended meanwhile are dropped."""
        self._landed = plan.number
        self._pace.took(result.seconds, 0 if plan.spans else plan.repeats)
        tokens = result.tokens.reshape(plan.repeats, -1)
        rows = self.table.running[plan.sampling_slots].nonzero()[0]
        slots = plan.sampling_slots[rows]
        taken, stopped, full = self.table.land(slots, tokens if len(rows) == tokens.shape[1] else tokens[:, rows])
        ended = stopped | full
        told = (ended | self.table.incremental[slots]).nonzero()[0]
        outputs: list[Output] = []
        if len(told):  # in most steps there is nothing to tell, or of all that they go on
            at, nothing = slots[told], repeat(None)
            ids, pasts = self.table.request_id[at].tolist(), [self.table.past[slot] for slot in at.tolist()]
            outputs = list(map(Output, ids, tokens[:, rows[told]].T, nothing, nothing, pasts))
            # Token j of row i stands at i + j * width.
            width, first = tokens.shape[1], rows[told]
            last = first + taken[told] * width
            for i in (ended[told] | (result.logprobs is not None)).nonzero()[0].tolist():
                reason: FinishReason | None = "stop" if stopped[told[i]] else "length" if full[told[i]] else None
                outputs[i] = self._complete(outputs[i], result, slice(first[i], last[i], width), int(at[i]), reason)
        self._release_landed()
        return outputs

    def _complete(
        self, output: Output, result: StepResult, rows: slice, slot: int, reason: FinishReason | None
    ) -> Output:
        """The output of a request that ends, or that may have log-probabilities."""
        state = self.states[output.request_id]
        assert isinstance(state, Decoding)
        logprobs = None
        if state.request.incremental:
            tokens = result.tokens[rows]
            if result.logprobs is not None and state.request.sampling.logprobs and len(tokens):
                logprobs = result.logprobs.rows(rows)
        else:
            tokens = self.table.answer(slot)
        if reason is not None:
            self._finish(state)
        return output._replace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
