"""The scheduler changes when a request's tokens come, and never which: any history, against an uninterrupted run."""

from __future__ import annotations

import os
import random

import pytest
from driver import VOCAB, Driver, limits_of
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import make_request, uninterrupted

from fastgraph.control.plan import Limits
from fastgraph.control.states import Request

SOAK = float(os.environ.get("FASTGRAPH_SOAK", "1"))  # times the usual number of examples


def draw_limits(data: st.DataObject) -> Limits:
    size, slots = data.draw(st.integers(1, 4), "page size"), data.draw(st.integers(1, 4), "slots")
    pages = data.draw(st.integers(1, 12), "pages")
    longest = data.draw(st.sampled_from([pages * size + 1, 24]), "longest")
    step_tokens = slots + size + data.draw(st.integers(0, 8), "more step tokens")
    return limits_of(slots, pages, size, max(longest, 2), step_tokens)


def draw_request(data: st.DataObject, number: int, limits: Limits) -> Request:
    """Any request that can be served."""
    longest = min(limits.max_model_len, limits.pool_tokens + 1)
    prompt = data.draw(st.integers(1, longest - 1), "prompt")
    max_tokens = data.draw(st.integers(1, longest - prompt), "max_tokens")
    stop_ids = data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=3), "stop ids")
    return make_request(
        number,
        prompt,
        max_tokens,
        stop_ids=tuple(sorted(stop_ids)),
        incremental=data.draw(st.booleans(), "incremental"),
        min_tokens=data.draw(st.integers(0, max_tokens), "min_tokens"),
        logprobs=data.draw(st.booleans(), "logprobs"),
    )


class AnyHistory(RuleBasedStateMachine):
    """Requests come, steps are submitted and land, and requests are ended, in any order whatever."""

    driver: Driver

    @initialize(data=st.data(), depth=st.integers(0, 3))
    def build(self, data: st.DataObject, depth: int) -> None:
        self.driver = Driver(draw_limits(data), depth)
        self.count = 0

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        self.count += 1
        request = draw_request(data, self.count, self.driver.limits)
        stop_after = data.draw(st.none() | st.integers(1, 6), "stop string after") if request.incremental else None
        self.driver.submit(request, stop_after)

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

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.requests))))

    @rule()
    def abort_of_a_stranger(self) -> None:
        assert self.driver.scheduler.abort(self.count + 1) is None

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()
            event(f"preemptions: {min(self.driver.scheduler.preemptions, 3)}")


AnyHistory.TestCase.settings = settings(
    max_examples=int(120 * SOAK), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyHistory = AnyHistory.TestCase


@settings(max_examples=int(80 * SOAK), deadline=None)
@given(st.data())
def test_a_request_gets_the_same_tokens_whatever_the_limits(data: st.DataObject) -> None:
    """Every number of slots, pages and step tokens, and every depth. `Driver` compares with the uninterrupted run."""
    smallest = limits_of(1, 6, 2, 13, 3)
    requests = [draw_request(data, i, smallest) for i in range(1, data.draw(st.integers(1, 6)) + 1)]
    for _ in range(3):
        size = data.draw(st.sampled_from([1, 2, 3, 4]))
        slots = data.draw(st.integers(1, 5))
        pages = -(-12 // size) + data.draw(st.integers(0, 20))
        limits = limits_of(slots, pages, size, 13, slots + size + data.draw(st.integers(0, 20)))
        driver = Driver(limits, data.draw(st.integers(0, 3)))
        for request in requests:
            driver.submit(request)
        driver.finish()
        assert driver.tokens == {r.id: uninterrupted(r, VOCAB)[0] for r in requests}


@pytest.mark.parametrize("depth", range(4))
def test_pressure_that_preempts_over_and_over_changes_no_token(depth: int) -> None:
    chance = random.Random(depth)
    driver = Driver(limits_of(slots=6, pages=9, page_size=2, max_model_len=19, max_step_tokens=9), depth)
    for number in range(1, 31):
        prompt = chance.randint(1, 12)
        logprobs = chance.random() < 0.5
        driver.submit(make_request(number, prompt, 18 - prompt, stop_ids=(number % VOCAB,), logprobs=logprobs))
    driver.finish()
    assert driver.scheduler.preemptions > 10
    assert {driver.ended[i] for i in driver.ended} == {"stop", "length"}
