"""What prompts have in common is computed once; and no more is let in than there is going to be room for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from driver import VOCAB, Driver, drive, limits_of
from hypothesis import given
from hypothesis import strategies as st
from simulated import make_request, uninterrupted

from fastgraph.control.forecast import Forecast, peak
from fastgraph.control.plan import Int32
from fastgraph.control.states import Request


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


def prompt_of(length: int, kind: int = 0) -> Int32:
    return np.random.default_rng(kind).integers(0, VOCAB, length).astype(np.int32)


def cached(driver: Driver) -> list[int]:
    """Tokens that each admission found computed, in order."""
    return [admission.computed for plan in driver.device.plans for admission in plan.admissions]


# --- prefixes ---


@pytest.mark.parametrize("depth", range(3))
def test_parallel_samples_compute_their_prompt_once(depth: int) -> None:
    limits = limits_of(slots=16, pages=400, max_model_len=128, max_step_tokens=64)
    driver = drive([make_request(i, prompt_of(50), 10) for i in range(1, 129)], limits, depth)
    assert driver.device.computed == 50 + 127 * 2 + 128 * 9  # the others compute the two tokens of the last page
    assert driver.scheduler.prefix_hit_tokens == 127 * 48
    assert driver.scheduler.prompt_tokens == 128 * 50
    # All the slots are at work from the second step on.
    assert [len(plan.spans) for plan in driver.device.plans[:2]] == [1, 15]


def test_samples_of_a_prompt_of_many_chunks_wait_for_it() -> None:
    limits = limits_of(slots=4, pages=100, max_model_len=128, max_step_tokens=20)
    driver = drive([make_request(i, prompt_of(90), 4) for i in (1, 2, 3, 4)], limits)
    assert cached(driver) == [0, 88, 88, 88]


def test_prompts_that_differ_wait_for_nobody() -> None:
    limits = limits_of(slots=8, pages=100, max_step_tokens=64)
    driver = drive([make_request(i, prompt_of(8, kind=i), 4) for i in range(1, 9)], limits)
    assert len(driver.device.plans[0].spans) == 8


def test_a_common_beginning_is_shared_and_the_rest_is_not() -> None:
    limits = limits_of(slots=8, pages=100, max_step_tokens=64)
    prompts = [np.concatenate([prompt_of(14), prompt_of(9, kind=i)]) for i in range(1, 6)]
    driver = drive([make_request(i, prompt, 4) for i, prompt in enumerate(prompts, 1)], limits)
    assert cached(driver) == [0, 12, 12, 12, 12]
    assert [len(plan.spans) for plan in driver.device.plans[:2]] == [1, 4]


@pytest.mark.parametrize(("length", "computed"), [(16, 4), (17, 1), (15, 3), (4, 4), (3, 3)])
def test_a_prompt_that_was_there_before_computes_its_last_page_alone(length: int, computed: int) -> None:
    driver = drive([make_request(1, prompt_of(length), 1)], limits_of())
    before = driver.device.computed
    driver.submit(make_request(2, prompt_of(length), 1))
    driver.finish()
    assert driver.device.computed - before == computed


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("stops", [False, True])
def test_the_next_turn_of_a_conversation_finds_the_answer_up_to_its_last_token(depth: int, stops: bool) -> None:
    """The KV of an answer's last token is never written, unless another was sampled after it."""
    first = make_request(1, prompt_of(9), 20)
    if stops:
        answer = uninterrupted(first, VOCAB)[0]
        first = make_request(1, prompt_of(9), 20, stop_ids=(answer[11],))
    answer, reason, _ = uninterrupted(first, VOCAB)
    assert reason == ("stop" if stops else "length")
    driver = drive([first], limits_of(), depth)
    written = 9 + len(answer) - (not stops)
    driver.submit(make_request(2, ids(*first.prompt.tolist(), *answer, 3, 4, 5), 5))
    driver.finish()
    assert cached(driver) == [0, written - written % 4]


def test_an_aborted_prompts_pages_serve_the_next_one() -> None:
    driver = Driver(limits_of(max_step_tokens=12), depth=1)
    driver.submit(make_request(1, prompt_of(40), 4))
    assert driver.plan()
    assert driver.plan()
    driver.abort(1)
    driver.submit(make_request(2, prompt_of(40), 4))
    driver.finish()
    assert cached(driver) == [0, 24]


def test_what_is_cached_is_counted_when_a_request_is_let_in_and_not_when_it_came() -> None:
    """While it waits for a slot, pages come and go."""
    driver = Driver(limits_of(slots=1, max_step_tokens=12))
    driver.submit(make_request(1, prompt_of(40), 4))
    driver.submit(make_request(2, prompt_of(40), 4))
    driver.step()
    driver.finish()
    assert cached(driver) == [0, 36]
    driver = Driver(limits_of(slots=1, pages=10, max_model_len=41, max_step_tokens=12))
    for number, kind in ((1, 0), (2, 1), (3, 0)):
        driver.submit(make_request(number, prompt_of(36, kind), 4))
    driver.finish()
    assert cached(driver) == [0, 0, 0]  # the second needed all the pages


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    driver = drive([make_request(i, prompt_of(20), 4) for i in (1, 2, 3)], limits_of(prefix_cache=False))
    assert cached(driver) == [0, 0, 0]
    assert (driver.scheduler.prefix_hit_tokens, driver.scheduler.pool.cached) == (0, 0)
    assert len(driver.device.plans[0].spans) == 1  # 16 tokens a step; and nobody waits for pages to be shared


def test_cached_pages_are_given_up_before_anybody_is_pushed_out() -> None:
    limits = limits_of(slots=2, pages=16, max_model_len=64)
    driver = drive([make_request(1, prompt_of(30), 10)], limits)
    assert driver.scheduler.pool.cached > 8
    driver.submit(make_request(2, prompt_of(20, kind=1), 40))
    driver.finish()
    assert driver.scheduler.preemptions == 0
    assert driver.evicted > 0


# --- how much is let in ---


def chatty(count: int, max_tokens: int) -> list[Request]:
    """Requests whose answers are some eight tokens long, whatever they might be."""
    return [make_request(i, prompt_of(8, kind=i), max_tokens, stop_ids=(1, 2, 3)) for i in range(1, count + 1)]


@pytest.mark.parametrize("host_pages", [0, 40])
def test_where_answers_are_short_memory_is_used_and_nobody_is_pushed_out(host_pages: int) -> None:
    limits = limits_of(slots=64, pages=100, max_model_len=400, max_step_tokens=128, host_pages=host_pages)
    lengths = [len(uninterrupted(request, VOCAB)[0]) for request in chatty(150, 380)]
    assert np.mean(lengths) < 12
    driver = drive(chatty(150, 380), limits)
    assert driver.scheduler.preemptions <= 3
    careful = Driver(limits)
    careful.scheduler.forecast = KeepsAll()
    for request in chatty(150, 380):
        careful.submit(request)
    careful.finish()
    assert careful.scheduler.preemptions == 0
    assert driver.device.steps < careful.device.steps / 4


class KeepsAll(Forecast):
    """Keeps room for all that an answer may come to."""

    def left(self, generated: Int32, most: Int32, page_size: int) -> Int32:
        return (most - generated).astype(np.int32)


def test_answers_as_long_as_they_may_be_push_few_out_and_none_over_and_over() -> None:
    """After a short spell the forecast was far too low: it learns, and every step goes on to be of use."""
    limits = limits_of(slots=64, pages=100, max_model_len=120, max_step_tokens=128)
    driver = drive(chatty(50, 110), limits)
    before = driver.scheduler.preemptions
    for number in range(101, 161):
        driver.submit(make_request(number, prompt_of(8, kind=number), 100))
    driver.finish()
    assert driver.scheduler.preemptions - before < 25
    times = [sum(a.seed == number for p in driver.device.plans for a in p.admissions) for number in range(101, 161)]
    assert max(times) <= 4
    careless = Driver(limits, careless=True)
    for number in range(101, 161):
        careless.submit(make_request(number, prompt_of(8, kind=number), 100))
    careless.finish()
    assert careless.scheduler.preemptions > 4 * (driver.scheduler.preemptions - before)


@pytest.mark.parametrize("multi_step", [1, 8])
def test_pages_given_ahead_push_few_out(multi_step: int) -> None:
    """Who knows how long answers get lets in as many as there is room for, and the room is about enough."""
    chance = random.Random(multi_step)
    limits = limits_of(48, 300, max_model_len=260, max_step_tokens=64, prefix_cache=False, multi_step=multi_step)
    driver = Driver(limits)
    driver.scheduler.forecast = KeepsAll()
    for number in range(100):
        driver.submit(make_request(number, chance.randint(5, 125), chance.randint(12, 125)))
    driver.finish()
    assert driver.scheduler.preemptions <= 4


def test_who_gives_up_before_an_answer_begins_teaches_nothing() -> None:
    driver = Driver(limits_of(slots=8, pages=40, max_model_len=100, prefix_cache=False))
    driver.submit(make_request(1, 60, 30))
    driver.plan()
    driver.abort(1)
    assert driver.scheduler.forecast.share == 0.5
    driver.finish()


def test_a_request_alone_needs_no_forecast() -> None:
    limits = limits_of(slots=4, pages=10, max_model_len=41)
    driver = Driver(limits)
    driver.scheduler.forecast = KeepsAll()
    for number in (1, 2, 3):
        driver.submit(make_request(number, prompt_of(8, kind=number), 33))
    driver.finish()
    assert driver.scheduler.preemptions == 0


def test_the_forecast_follows_what_answers_come_to() -> None:
    forecast = Forecast()
    for _ in range(10):
        forecast.ended(10, 100)
    assert forecast.share == pytest.approx((0.5 + 10 * 0.1) / 11)
    for _ in range(1000):
        forecast.ended(30, 100)
    assert forecast.share == pytest.approx(0.3, abs=1e-3)
    for _ in range(200):
        forecast.ended(90, 100)
    assert forecast.share > 0.8  # the recent ones weigh most
    forecast.missed()
    assert 0.85 < forecast.share <= 1
    made, most = ids(0, 10, 95, 100), ids(100, 100, 100, 100)
    forecast.share = 0.25
    assert forecast.left(made, most, 16).tolist() == [25, 16, 5, 0]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8), st.integers(1, 8))
def test_the_peak_is_the_worst_moment_to_come(requests: Sequence[tuple[int, int]], size: int) -> None:
    tokens, left = (ids(*column) for column in zip(*requests, strict=True))
    worst = 0
    for time in range(61):  # each gets a token in every step until it ends
        worst = max(worst, sum(-(-(now + time) // size) for now, more in requests if more >= time))
    assert worst <= peak(tokens, left, size) <= worst + len(requests) + 1
