"""A scheduler and a simulated device, moved by hand, and compared at every event with what must hold."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
import pytest
from brute_force import ExpectedCache
from simulated import Pending, SimulatedDevice, digest_of, uninterrupted

from fastgraph.control.forecast import Forecast
from fastgraph.control.pages import Lease
from fastgraph.control.plan import NULL_PAGE, Int32, Limits, StepPlan
from fastgraph.control.policy import Policy, first_come
from fastgraph.control.scheduler import Output, Scheduler
from fastgraph.control.states import Decoding, Finishing, FinishReason, Prefilling, Queued, Request, Retracted
from fastgraph.errors import RequestError

VOCAB = 24


def limits_of(
    slots: int = 4,
    pages: int = 32,
    page_size: int = 4,
    max_model_len: int = 64,
    max_step_tokens: int = 16,
    prefix_cache: bool = True,
    host_pages: int = 0,
    window: int = 0,
    multi_step: int = 1,
) -> Limits:
    sizes = (slots, pages, page_size, max_model_len, max_step_tokens, VOCAB)
    return Limits(*sizes, prefix_cache, host_pages, window, multi_step)


class Careless(Forecast):
    """Expects every answer to end at once: requests are let in while there are pages, and pushed out again."""

    def left(self, generated: Int32, most: Int32, page_size: int) -> Int32:
        return np.zeros(len(generated), np.int32)


class Driver:
    """A scheduler and a simulated device, moved by hand. Every output is compared with an uninterrupted run's."""

    def __init__(self, limits: Limits, depth: int = 0, policy: Policy = first_come, careless: bool = False) -> None:
        self.limits, self.depth, self.policy = limits, depth, policy
        self.scheduler = Scheduler(limits, policy)
        if careless:
            self.scheduler.forecast = Careless()
        self.device = SimulatedDevice(limits, depth)
        self.in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self.requests: dict[int, Request] = {}
        self.expected: dict[int, tuple[list[int], FinishReason, list[float]]] = {}
        self.stop_after: dict[int, int] = {}  # tokens after which the front finds a stop string
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.cache = ExpectedCache(limits, self.device)
        self.dropped = 0  # times pages behind the window came back
        self._listen()
        self.left = 0  # steps within which all must end, if nothing more is submitted

    def _listen(self) -> None:
        """Hear of what a plan does not show."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        drop, retract_last = pool.drop, scheduler.retract_last

        def dropping(lease: Lease, count: int) -> bool:
            if some := drop(lease, count):
                self.dropped += 1
                holding = (s for s in scheduler.states.values() if isinstance(s, (Prefilling, Decoding)))
                slot = next(s.resources.slot for s in holding if s.resources.lease is lease)
                self.cache.dropped(slot, count)
            return some

        def retracting() -> None:
            number = int(scheduler.table.request_id[scheduler.table.last()])
            retract_last()
            state = scheduler.states[number]
            self.cache.retracted(number, state.computed if isinstance(state, Retracted) else 0)

        setattr(pool, "drop", dropping)  # noqa: B010 - a method of one object
        setattr(scheduler, "retract_last", retracting)  # noqa: B010

    @property
    def evicted(self) -> int:
        """Pages that the prefix cache gave up for others."""
        return self.cache.model.evicted

    @property
    def live(self) -> list[int]:
        return [i for i in self.requests if i not in self.ended]

    def submit(self, request: Request, stop_after: int | None = None) -> None:
        self.scheduler.submit(request)
        self.requests[request.id] = request
        self.expected[request.id] = uninterrupted(request, self.limits.vocab)
        self.tokens[request.id], self.logprobs[request.id] = [], []
        if stop_after is not None:
            self.stop_after[request.id] = stop_after
        self._give_time()

    def refuse(self, request: Request) -> None:
        """Submit what can never fit, which changes nothing."""
        before = self._counts()
        with pytest.raises(RequestError):
            self.scheduler.submit(request)
        assert self._counts() == before
        self.check()

    def _counts(self) -> list[object]:
        """What a submission might change, and `check` does not compare with what it has to be."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        states, queue = dict(scheduler.states), list(scheduler.queue)
        counts = [scheduler.preemptions, scheduler.prompt_tokens, scheduler.prefix_hit_tokens, scheduler.forecast.share]
        return [states, queue, pool.free, pool.cached, *counts, scheduler._pace._quiet]

    def _give_time(self) -> None:
        # The oldest request moves with every step: by a page of its prompt or by a token.
        self.left = sum(self.requests[i].max_length + 2 + self.depth for i in self.live)

    def plan(self) -> bool:
        """Submit a step; False if there is none to submit."""
        if len(self.in_flight) > self.depth:
            return False
        plan = self.scheduler.plan()
        if plan is None:
            self.cache.planned(None)
            return False
        self.in_flight.append((plan, self.device.execute(plan)))
        self.cache.planned(plan)
        self.left -= 1
        assert self.left >= 0, "somebody starves"
        return True

    @property
    def retractable(self) -> bool:
        return not self.in_flight and bool(self.scheduler.table.running.any())

    def retract(self) -> None:
        """As if a decoding request had found no page."""
        self.scheduler.retract_last()
        self._give_time()

    def known_prefixes(self) -> dict[tuple[int, ...], int]:
        """What the prefix tree says: a page for each sequence of tokens that ends with it."""
        tree = self.scheduler.pool.tree
        prefix_of: dict[int, tuple[int, ...]] = {NULL_PAGE: ()}  # by page

        def find(page: int) -> tuple[int, ...]:
            if page not in prefix_of:
                before, key = tree._keys[page]
                prefix_of[page] = find(before) + tuple(np.frombuffer(key, np.int32).tolist())
            return prefix_of[page]

        prefixes = {find(page): page for page in tree._keys}
        assert len(prefixes) == len(tree._keys), "a prefix is known twice"
        return prefixes

    def land(self) -> list[Output]:
        plan, pending = self.in_flight.popleft()
        outputs = self.scheduler.land(plan, pending.result())
        for output in outputs:
            self.take(output)
        self.cache.landed(plan.number)
        for output in outputs:
            wanted = self.stop_after.get(output.request_id)
            if wanted is not None and len(self.tokens[output.request_id]) >= wanted:
                self.end_early(output.request_id)
        return outputs

    def end_early(self, request_id: int) -> None:
        """As the front does when a stop string was reached."""
        ended_already = request_id in self.ended
        output = self.scheduler.abort(request_id)
        assert (output is None) == ended_already
        if output is not None:
            self._end(request_id, "stop")

    def abort(self, request_id: int) -> None:
        output = self.scheduler.abort(request_id)
        assert (output is None) == (request_id in self.ended)
        if output is not None:
            assert output.finish_reason == "abort"
            self.take(output)

    def take(self, output: Output) -> None:
        number = output.request_id
        request = self.requests[number]
        assert number not in self.ended, "an output after the end"
        assert output.token_ids.dtype == np.int32
        self.tokens[number] += output.token_ids.tolist()
        if output.logprobs is not None:
            assert request.sampling.logprobs
            assert output.logprobs.top_ids[:, 0].tolist() == output.token_ids.tolist()
            self.logprobs[number] += output.logprobs.chosen.tolist()
        if not request.incremental:
            assert output.finish_reason is not None, "tokens that nobody asked for yet"
        expected, reason, logprobs = self.expected[number]
        assert self.tokens[number] == expected[: len(self.tokens[number])]
        if request.sampling.logprobs:
            assert self.logprobs[number] == logprobs[: len(self.tokens[number])]
        if output.finish_reason is not None:
            self._end(number, output.finish_reason)
            if output.finish_reason != "abort":
                assert (self.tokens[number], output.finish_reason) == (expected, reason)

    def _end(self, number: int, reason: FinishReason) -> None:
        self.ended[number] = reason
        self.cache.ended(number, len(self.requests[number].prompt) + len(self.tokens[number]))

    def step(self) -> None:
        """As the engine's loop does: submit all that may be, then read the oldest."""
        while self.plan():
            pass
        assert self.in_flight, "requests wait, and nothing moves"
        self.land()
        self.check()

    def finish(self) -> None:
        """Run until all have ended, and look whether everything is back where it belongs."""
        while self.live:
            self.step()
        while self.in_flight:
            self.land()
        self.check()
        assert self.scheduler.plan() is None
        assert self.scheduler.pool.free + self.scheduler.pool.cached == self.limits.pages
        assert self.scheduler.host.free == self.limits.host_pages
        assert self.scheduler.running == self.scheduler.waiting == len(self.scheduler.queue) == 0
        assert not self.scheduler.states
        if self.policy is not first_come:
            return
        first = [sampled for sampled in self.device.sampled if sampled.index == 0]
        assert all(a.step <= b.step for a, b in pairwise(sorted(first, key=lambda s: s.seed))), "an elder is overtaken"

    def check(self) -> None:
        """What holds between any two events."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        states = scheduler.states
        holding = [s for s in states.values() if isinstance(s, (Prefilling, Decoding, Finishing))]
        leases = [state.resources.lease for state in holding]
        assert all(not lease.pages[: lease.dropped].any() for lease in leases)
        held = Counter(page for lease in leases for page in lease.pages[lease.dropped :].tolist())
        assert pool.free + pool.leased + pool.cached == pool.total == self.limits.pages
        assert {page: count for page, count in enumerate(pool._holders.tolist()) if count} == held
        cached = list(pool.tree._unused)
        assert (len(held), len(cached)) == (pool.leased, pool.cached)
        assert sorted([*held, *cached, *pool._stack[: pool.free].tolist()]) == list(range(1, pool.total + 1))
        self.check_prefixes(held, cached)
        saved = [p for s in states.values() if isinstance(s, Retracted) for p in s.saved.pages.tolist()]
        assert scheduler.host.free + scheduler.host.leased == self.limits.host_pages
        assert sorted([*saved, *scheduler.host._stack[: scheduler.host.free].tolist()]) == list(
            range(1, self.limits.host_pages + 1)
        )
        slots = [state.resources.slot for state in holding]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(1, self.limits.slots + 1))
        assert scheduler.running == len(slots)
        assert scheduler.in_flight == len(self.in_flight)
        for state in holding:
            slot = state.resources.slot
            assert scheduler.table.request_id[slot] == state.request.id
            assert scheduler.table.capacity[slot] == len(state.resources.lease) * self.limits.page_size
            assert scheduler.table.running[slot] == (not isinstance(state, Finishing))
            assert scheduler.table.decoding[slot] == isinstance(state, Decoding)
        self.check_batch([state for state in holding if isinstance(state, Decoding)])
        queued = [span.request_id for span in scheduler.queue]
        assert sorted(queued) == sorted(i for i, s in states.items() if isinstance(s, (*Queued.__args__, Prefilling)))
        waiting = [i for i, s in states.items() if isinstance(s, Queued)]
        assert scheduler.waiting == len(waiting)
        if self.policy is first_come:
            assert queued == sorted(queued)
            assert all(i > s.request.id for i in waiting for s in holding if not isinstance(s, Finishing))
        assert {i for i, s in states.items() if not isinstance(s, Finishing)} == set(self.live)

    def check_batch(self, decoding: list[Decoding]) -> None:
        """What the table remembers of the slots that decode is what there is to say of them now."""
        table, batch = self.scheduler.table, self.scheduler.table.batch()
        left = {s.resources.slot: s.request.max_length - 1 - int(table.scheduled[s.resources.slot]) for s in decoding}
        ready = sorted(slot for slot, steps in left.items() if steps > 0)
        assert batch.slots.tolist() == ready
        if ready:
            assert batch.left == min(left[slot] for slot in ready)
            assert batch.room == min(int(table.capacity[slot] - table.scheduled[slot]) for slot in ready)

    def check_prefixes(self, held: Mapping[int, int], cached: list[int]) -> None:
        """The prefix tree knows all that it should, in the right pages; a page outlives those that follow it."""
        prefixes, size = self.known_prefixes(), self.limits.page_size
        assert prefixes == self.cache.model.page
        assert set(cached) <= set(prefixes.values())
        assert set(prefixes.values()) <= {*held, *cached}
        for prefix, page in prefixes.items():
            tokens, places, digests = self.device.cells[page].T.tolist()
            assert tokens == list(prefix[-size:])
            assert places == list(range(len(prefix) - size, len(prefix)))
            assert digests[-1] == digest_of(prefix)
            before = prefixes.get(prefix[:-size], NULL_PAGE)
            if page in held:
                assert before == NULL_PAGE or before in held
            elif before in cached:
                assert cached.index(page) < cached.index(before), "a page would go before one that follows it"
        if not self.limits.prefix_cache:
            assert not prefixes


def drive(
    requests: Iterable[Request],
    limits: Limits,
    depth: int = 0,
    policy: Policy = first_come,
    careless: bool = False,
) -> Driver:
    driver = Driver(limits, depth, policy, careless)
    for request in requests:
        driver.submit(request)
    driver.finish()
    return driver
