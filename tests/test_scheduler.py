"""The scheduler changes when a request's tokens come, and never which: any history, against an uninterrupted run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from driver import VOCAB, Driver, limits_of
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import make_request, uninterrupted

from fastgraph.control.plan import Limits
from fastgraph.control.policy import first_come
from fastgraph.control.states import Request

SOAK = float(os.environ.get("FASTGRAPH_SOAK", "1"))  # times the usual number of events

Draw = Callable[[int, int], int]  # a whole number between two, both included


def draws_of(data: st.DataObject) -> Draw:
    return lambda low, high: data.draw(st.integers(low, high))


def draw_limits(draw: Draw) -> Limits:
    size, slots, pages = draw(1, 4), draw(1, 4), draw(1, 12)
    longest = (pages * size + 1, 24)[draw(0, 1)]
    return limits_of(
        slots,
        pages,
        size,
        max(longest, 2),
        slots + size + draw(0, 8),
        prefix_cache=draw(0, 3) > 0,
        host_pages=max(draw(-4, 12), 0),
        window=max(draw(-9, 9), 0),
        multi_step=(1, 2, 8)[draw(0, 2)],
    )


def draw_request(draw: Draw, number: int, limits: Limits, earlier: Sequence[Request] = ()) -> Request:
    """Any request that can be served. Few beginnings, so that many are alike, and some go on where an answer ended."""
    longest = min(limits.max_model_len, limits.pool_tokens + 1)
    kind = draw(0, 3)
    if kind == 0 and earlier:
        before = earlier[draw(0, len(earlier) - 1)]
        told = [*before.prompt.tolist(), *uninterrupted(before, VOCAB)[0], draw(0, 1)]
        prompt = np.array(told[: longest - 1], np.int32)
    else:
        prompt = (np.arange(draw(1, longest - 1), dtype=np.int32) + kind) % 7
    max_tokens = draw(1, longest - len(prompt))
    return make_request(
        number,
        prompt,
        max_tokens,
        stop_ids=tuple(sorted({draw(0, VOCAB - 1) for _ in range(draw(0, 3))})),
        incremental=bool(draw(0, 1)),
        min_tokens=draw(0, max_tokens) if draw(0, 1) else 0,
        logprobs=bool(draw(0, 1)),
    )


def draw_impossible(draw: Draw, number: int, limits: Limits) -> Request:
    """A request that can never be served: by a token, or by many, or for want of one to start from."""
    longest = min(limits.max_model_len, limits.pool_tokens + 1)
    match draw(0, 2):
        case 0:
            return make_request(number, limits.max_model_len + draw(0, 3), 1)
        case 1:
            prompt = draw(1, longest)
            return make_request(number, prompt, longest - prompt + draw(1, 40))
        case _:
            return make_request(number, 0, draw(1, longest))


class AnyHistory(RuleBasedStateMachine):
    """Requests come, steps are submitted and land, requests are pushed out and ended, in any order whatever."""

    driver: Driver

    @initialize(data=st.data(), depth=st.integers(0, 3), careless=st.booleans())
    def build(self, data: st.DataObject, depth: int, careless: bool) -> None:
        self.driver = Driver(draw_limits(draws_of(data)), depth, careless=careless)

    @rule(data=st.data(), stop_after=st.none() | st.integers(1, 6))
    def submit(self, data: st.DataObject, stop_after: int | None) -> None:
        earlier = list(self.driver.requests.values())
        request = draw_request(draws_of(data), len(earlier) + 1, self.driver.limits, earlier)
        self.driver.submit(request, stop_after if request.incremental else None)

    @rule(data=st.data())
    def submit_what_never_fits(self, data: st.DataObject) -> None:
        self.driver.refuse(draw_impossible(draws_of(data), len(self.driver.requests) + 1, self.driver.limits))

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def land(self) -> None:
        self.driver.land()

    @precondition(lambda self: self.driver.live)
    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.driver.live:
                self.driver.step()

    @precondition(lambda self: self.driver.retractable)
    @rule()
    def retract(self) -> None:
        self.driver.retract()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.requests))))

    @rule()
    def abort_of_a_stranger(self) -> None:
        assert self.driver.scheduler.abort(len(self.driver.requests) + 1) is None

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()
            event(f"preemptions: {min(self.driver.scheduler.preemptions, 3)}")


AnyHistory.TestCase.settings = settings(
    max_examples=int(80 * SOAK), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyHistory = AnyHistory.TestCase


def shortest_first(request: Request) -> float:
    return len(request.prompt)


def walk(chance: random.Random, events: int) -> Driver:
    """The same by chance, which is faster, so that it goes further; everything is checked after every event."""
    policy = first_come if chance.random() < 0.6 else shortest_first
    driver = Driver(draw_limits(chance.randint), chance.randint(0, 3), policy, careless=chance.random() < 0.7)
    crowd = chance.choice([2, 6, 20])  # requests at once
    for _ in range(events):
        die = chance.random()
        if die < 0.2 and len(driver.live) < crowd:
            earlier = list(driver.requests.values())[-8:]
            request = draw_request(chance.randint, len(driver.requests) + 1, driver.limits, earlier)
            stop_after = chance.randint(1, 6) if request.incremental and chance.random() < 0.3 else None
            driver.submit(request, stop_after)
        elif die < 0.25 and driver.requests:
            driver.abort(chance.choice(driver.live) if driver.live else 1)
        elif die < 0.26:
            driver.refuse(draw_impossible(chance.randint, len(driver.requests) + 1, driver.limits))
        elif die < 0.28:
            while driver.in_flight:
                driver.land()
            if driver.retractable:
                driver.retract()
        elif die < 0.6 and driver.in_flight:
            driver.land()
        else:
            driver.plan()
        driver.check()
    driver.finish()
    return driver


@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_events_by_chance(part: int) -> None:
    chance = random.Random(part)
    seen = {"preemptions": 0, "hits": 0, "restores": 0, "evictions": 0, "drops": 0, "repeats": 0}
    for _ in range(int(50 * SOAK)):
        driver = walk(chance, 200)
        seen["preemptions"] += driver.scheduler.preemptions
        seen["hits"] += driver.scheduler.prefix_hit_tokens
        seen["restores"] += sum(len(plan.restores) for plan in driver.device.plans)
        seen["evictions"] += driver.evicted
        seen["drops"] += driver.dropped
        seen["repeats"] += sum(plan.repeats - 1 for plan in driver.device.plans)
    assert all(count > 10 * SOAK for count in seen.values()), seen


@settings(max_examples=int(80 * SOAK), deadline=None)
@given(st.data())
def test_a_request_gets_the_same_tokens_whatever_the_limits(data: st.DataObject) -> None:
    """Every number of slots, pages and step tokens, and every depth. `Driver` compares with the uninterrupted run."""
    draw, smallest = draws_of(data), limits_of(1, 6, 2, 13, 3)
    requests = [draw_request(draw, i, smallest) for i in range(1, draw(1, 6) + 1)]
    for _ in range(3):
        size, slots = draw(1, 4), draw(1, 5)
        pages = -(-12 // size) + draw(0, 20)
        sizes = slots, pages, size, 13, slots + size + draw(0, 20)
        limits = limits_of(*sizes, draw(0, 1) > 0, draw(0, 8), max(draw(-5, 8), 0), draw(1, 4))
        driver = Driver(limits, draw(0, 3))
        for request in requests:
            driver.submit(request)
        driver.finish()
        assert driver.tokens == {r.id: uninterrupted(r, VOCAB)[0] for r in requests}


@pytest.mark.parametrize("host_pages", [0, 5, 40])
@pytest.mark.parametrize("depth", range(4))
def test_pressure_that_preempts_over_and_over_changes_no_token(depth: int, host_pages: int) -> None:
    chance = random.Random(depth)
    limits = limits_of(slots=6, pages=9, page_size=2, max_model_len=19, max_step_tokens=9, host_pages=host_pages)
    driver = Driver(limits, depth, careless=True)
    for number in range(1, 61):
        prompt = chance.randint(1, 12)
        logprobs = chance.random() < 0.5
        driver.submit(make_request(number, prompt, 18 - prompt, stop_ids=(number % VOCAB,), logprobs=logprobs))
    driver.finish()
    assert driver.scheduler.preemptions > 10
    assert {driver.ended[i] for i in driver.ended} == {"stop", "length"}
    assert any(len(plan.restores) for plan in driver.device.plans) == (host_pages > 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [0, 2])
def test_what_is_behind_the_window_of_a_long_request_makes_room_for_others(depth: int, prefix_cache: bool) -> None:
    """Eight requests of 70 tokens would need 144 pages; with a window of 8 tokens, a fraction of them is enough."""
    most = {}
    for window in (0, 8):
        driver = Driver(limits_of(8, 72, 4, 80, 32, prefix_cache, window=window), depth)
        for number in range(1, 9):
            driver.submit(make_request(number, 30, 40))
        most[window] = 0
        while driver.live:
            driver.step()
            most[window] = max(most[window], driver.scheduler.running)
        driver.finish()
    assert most[0] < 8
    assert most[8] == 8
    assert driver.scheduler.preemptions == 0
    assert driver.dropped > 20  # each time several pages
