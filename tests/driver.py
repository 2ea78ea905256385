"""A scheduler and a simulated device, moved by hand, and compared at every event with what must hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from simulated import Pending, SimulatedDevice, uninterrupted

from fastgraph.control.plan import Limits, StepPlan
from fastgraph.control.scheduler import Output, Scheduler
from fastgraph.control.states import Decoding, Finishing, FinishReason, Prefilling, Request, Waiting

VOCAB = 24


def limits_of(
    slots: int = 4, pages: int = 32, page_size: int = 4, max_model_len: int = 64, max_step_tokens: int = 16
) -> Limits:
    return Limits(slots, pages, page_size, max_model_len, max_step_tokens, VOCAB)


class Driver:
    """A scheduler and a simulated device, moved by hand. Every output is compared with an uninterrupted run's."""

    def __init__(self, limits: Limits, depth: int = 0) -> None:
        self.limits, self.depth = limits, depth
        self.scheduler = Scheduler(limits)
        self.device = SimulatedDevice(limits, depth)
        self.in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self.requests: dict[int, Request] = {}
        self.expected: dict[int, tuple[list[int], FinishReason, list[float]]] = {}
        self.stop_after: dict[int, int] = {}  # tokens after which the front finds a stop string
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.left = 0  # steps within which all must end, if nothing more is submitted

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
        # The oldest request moves with every step: by a page of its prompt or by a token.
        self.left = sum(self.requests[i].max_length + 2 + self.depth for i in self.live)

    def plan(self) -> bool:
        """Submit a step; False if there is none to submit."""
        if len(self.in_flight) > self.depth:
            return False
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.in_flight.append((plan, self.device.execute(plan)))
        self.left -= 1
        assert self.left >= 0, "somebody starves"
        return True

    def land(self) -> list[Output]:
        plan, pending = self.in_flight.popleft()
        outputs = self.scheduler.land(plan, pending.result())
        for output in outputs:
            self.take(output)
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
        self.ended.setdefault(request_id, "stop")

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
            self.ended[number] = output.finish_reason
            if output.finish_reason != "abort":
                assert (self.tokens[number], output.finish_reason) == (expected, reason)

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
        assert self.scheduler.pool.free == self.limits.pages
        assert self.scheduler.running == self.scheduler.waiting == len(self.scheduler.queue) == 0
        assert not self.scheduler.states
        first = [sampled for sampled in self.device.sampled if sampled.index == 0]
        assert all(a.step <= b.step for a, b in pairwise(sorted(first, key=lambda s: s.seed))), "an elder is overtaken"

    def check(self) -> None:
        """What holds between any two events."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        states = scheduler.states
        holding = [s for s in states.values() if isinstance(s, (Prefilling, Decoding, Finishing))]
        pages = [page for state in holding for page in state.resources.lease.pages.tolist()]
        assert pool.free + pool.leased == pool.total == self.limits.pages
        assert len(pages) == len(set(pages)) == pool.leased
        assert sorted([*pages, *pool._stack[: pool.free].tolist()]) == list(range(1, pool.total + 1))
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
        queued = [span.request_id for span in scheduler.queue]
        assert queued == sorted(queued)
        assert queued == sorted(i for i, s in states.items() if isinstance(s, (Waiting, Prefilling)))
        waiting = [i for i, s in states.items() if isinstance(s, Waiting)]
        assert scheduler.waiting == len(waiting)
        assert all(i > s.request.id for i in waiting for s in holding if not isinstance(s, Finishing))
        assert {i for i, s in states.items() if not isinstance(s, Finishing)} == set(self.live)


def drive(requests: Iterable[Request], limits: Limits, depth: int = 0) -> Driver:
    driver = Driver(limits, depth)
    for request in requests:
        driver.submit(request)
    driver.finish()
    return driver
