"""What the scheduler does with prompts, pages and slots, one behaviour each; and what a step of it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver import VOCAB, Driver, drive, limits_of
from simulated import make_request, uninterrupted

from fastgraph.control.plan import Limits, StepResult
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request
from fastgraph.errors import RequestError


def stop_id_at(request: Request, index: int) -> int:
    """A token that the request's answer has at `index` for the first time."""
    answer, _, _ = uninterrupted(request, VOCAB)
    assert answer.index(answer[index]) == index
    return answer[index]


def test_a_prompt_above_the_token_budget_is_chunked_while_others_decode() -> None:
    driver = Driver(limits_of(max_step_tokens=12))
    driver.submit(make_request(1, 3, 12))
    driver.step()
    driver.submit(make_request(2, 30, 2))
    driver.finish()
    chunks = [(len(plan.decode_slots), [len(s.ids) for s in plan.spans]) for plan in driver.device.plans if plan.spans]
    # One decode row leaves 11 tokens, which are two pages; the last chunk is what is left of the prompt.
    assert chunks == [(0, [3]), (1, [8]), (1, [8]), (1, [8]), (1, [6])]


def test_several_prompts_share_a_step_and_the_last_one_is_cut() -> None:
    driver = Driver(limits_of(max_step_tokens=16))
    for number in (1, 2, 3):
        driver.submit(make_request(number, 6, 2))
    assert driver.plan()
    assert [(s.slot, len(s.ids), s.samples) for s in driver.device.plans[0].spans] == [
        (1, 6, True),
        (2, 6, True),
        (3, 4, False),
    ]
    driver.finish()


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 1), (0.01, 3), (0.002, 3), (0.001, 5), (0.0001, 8)])
def test_short_decode_steps_are_planned_together(seconds: float, most: int) -> None:
    driver = Driver(limits_of(multi_step=8))
    driver.device.step_seconds = seconds
    driver.submit(make_request(1, 3, 40))
    driver.finish()
    repeats = [plan.repeats for plan in driver.device.plans]
    assert repeats[:2] == [1, 1]  # the prompt, and the step that shows how long one takes
    assert max(repeats) == most
    assert sum(repeats) == 40


def test_the_longer_nobody_came_the_more_steps_are_planned_together() -> None:
    driver = Driver(limits_of(slots=2, pages=64, max_model_len=120, multi_step=8))
    driver.device.step_seconds = 0.005
    driver.submit(make_request(1, 3, 110))
    while driver.scheduler.table.known[1] < 100:
        driver.step()
    alone = [plan.repeats for plan in driver.device.plans]
    assert alone == sorted(alone)
    assert alone[:20] == [1] * 20  # 100 ms, of which a tenth is two steps
    assert alone[21:24] == [2] * 3
    assert max(alone) == 6  # 32 ms, and never more
    driver.submit(make_request(2, 3, 30))
    driver.finish()
    assert {plan.repeats for plan in driver.device.plans[len(alone) : len(alone) + 19]} == {1}


def test_decode_steps_are_planned_one_by_one_while_somebody_waits() -> None:
    driver = Driver(limits_of(slots=1, multi_step=8))
    for number in (1, 2):
        driver.submit(make_request(number, 3, 20))
    driver.finish()
    first, second = (
        [plan.repeats for plan in driver.device.plans if plan.number in part] for part in (range(21), range(21, 99))
    )
    assert set(first) == {1}
    assert max(second) == 5


def test_pages_are_admitted_for_a_chunk_not_for_the_prompt() -> None:
    driver = Driver(limits_of(pages=16, max_step_tokens=8))
    driver.submit(make_request(1, 40, 2))
    leased = []
    for _ in range(5):
        assert driver.plan()
        leased.append(driver.scheduler.pool.leased)
        driver.land()
    assert leased == [2, 4, 6, 8, 10]
    driver.finish()


def test_a_long_prompt_waits_for_room_rather_than_push_others_out() -> None:
    driver = Driver(limits_of(pages=8, max_model_len=33, max_step_tokens=64))
    driver.submit(make_request(1, 15, 4))
    driver.step()
    driver.submit(make_request(2, 30, 2))
    while 1 not in driver.ended:  # it holds four pages and may want a fifth, of eight
        assert driver.plan()
        assert not driver.device.plans[-1].admissions
        driver.land()
    driver.finish()
    assert driver.scheduler.preemptions == 0


def test_a_long_prompt_starts_before_there_are_pages_for_all_of_it() -> None:
    """Where nothing decodes that would need them first."""
    driver = Driver(limits_of(pages=8, max_model_len=33, max_step_tokens=64), depth=1)
    driver.submit(make_request(1, 15, 2))
    driver.submit(make_request(2, 30, 2))
    assert driver.plan()
    driver.abort(1)  # its pages come back when the step has landed
    assert driver.plan()
    assert [len(span.ids) for span in driver.device.plans[-1].spans] == [16]
    driver.finish()


def test_decode_rows_leave_page_tables_alone_between_growths() -> None:
    """Pages are handed out a few at a time, so that most steps change nothing but the tokens."""
    limits = limits_of(slots=100, pages=1000, page_size=4, max_model_len=64, max_step_tokens=500)
    driver = drive([make_request(number, 4, 28) for number in range(1, 101)], limits)
    decoding = [plan for plan in driver.device.plans if not plan.spans]
    assert len(decoding) == 27
    assert sum(len(plan.page_writes) > 0 for plan in decoding) == 2


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        Scheduler(limits_of()).submit(make_request(1, 0, 1))


def test_a_prompt_longer_than_max_model_len_is_refused_with_the_bound() -> None:
    scheduler = Scheduler(limits_of(max_model_len=64))
    with pytest.raises(RequestError, match=r"the prompt has 64 tokens; with max_model_len 64 it may have 63 at most"):
        scheduler.submit(make_request(1, 64, 1))
    assert not scheduler.states
    scheduler.submit(make_request(2, 63, 1))


def test_an_answer_that_cannot_fit_is_refused_with_the_bound() -> None:
    with pytest.raises(RequestError, match=r"60 prompt tokens and max_tokens 5 make 65; max_model_len is 64"):
        Scheduler(limits_of(max_model_len=64)).submit(make_request(1, 60, 5))


def test_a_request_larger_than_the_pool_is_refused_with_the_bound() -> None:
    scheduler = Scheduler(limits_of(pages=8, page_size=4, max_model_len=64))
    with pytest.raises(RequestError, match="the KV pool holds 32 tokens"):
        scheduler.submit(make_request(1, 30, 4))
    with pytest.raises(RequestError, match="the KV pool holds 32 tokens"):
        scheduler.submit(make_request(1, 40, 1))


@pytest.mark.parametrize("depth", range(4))
def test_a_request_that_just_fits_the_pool_is_served(depth: int) -> None:
    """The last token is never computed: it needs no place in the pool."""
    limits = limits_of(pages=8, page_size=4, max_model_len=33, max_step_tokens=8)
    driver = drive([make_request(number, prompt, 33 - prompt) for number, prompt in enumerate((30, 1, 32), 1)], limits)
    assert [len(driver.tokens[i]) for i in (1, 2, 3)] == [3, 32, 1]


@pytest.mark.parametrize("depth", range(4))
def test_an_end_of_text_as_the_first_token_is_an_answer_of_no_tokens(depth: int) -> None:
    request = make_request(1, 5, 8)
    request = replace(request, stop_ids=(stop_id_at(request, 0),))
    for incremental in (False, True):
        driver = drive([replace(request, incremental=incremental)], limits_of(), depth)
        assert (driver.tokens[1], driver.ended[1]) == ([], "stop")


def test_any_of_several_stop_ids_ends_a_request() -> None:
    plain = make_request(1, 5, 12)
    for index in (1, 2, 4):
        token = stop_id_at(plain, index)
        for stop_ids in ((token,), (token, VOCAB + 1), (VOCAB + 3, VOCAB + 2, token)):
            driver = drive([replace(plain, stop_ids=stop_ids)], limits_of())
            assert (len(driver.tokens[1]), driver.ended[1]) == (index, "stop")


def test_min_tokens_lets_the_end_of_text_pass_at_exactly_that_index() -> None:
    """The device bans it before; the scheduler takes it from there on, and not one token later."""
    every = tuple(range(VOCAB - 1))  # all but one token end the text
    for least in range(6):
        request = make_request(1, 5, 10, stop_ids=every, min_tokens=least)
        driver = drive([request], limits_of())
        answer = driver.tokens[1]
        assert answer[:least] == [VOCAB - 1] * least
        assert set(answer) <= {VOCAB - 1}
        assert (answer, driver.ended[1]) == uninterrupted(request, VOCAB)[:2]


@pytest.mark.parametrize("depth", range(4))
def test_max_tokens_of_one_is_one_token_and_no_decode_step(depth: int) -> None:
    driver = drive([make_request(number, 4, 1) for number in (1, 2, 3)], limits_of(), depth)
    assert [len(driver.tokens[i]) for i in (1, 2, 3)] == [1, 1, 1]
    assert all(len(plan.decode_slots) == 0 for plan in driver.device.plans)


@pytest.mark.parametrize("depth", range(4))
def test_no_step_is_spent_on_tokens_past_max_tokens(depth: int) -> None:
    driver = drive([make_request(1, 4, 9)], limits_of(), depth)
    assert driver.device.computed == 4 + 8


@pytest.mark.parametrize("depth", range(4))
def test_tokens_that_come_after_a_stop_are_dropped(depth: int) -> None:
    plain = make_request(1, 4, 20, incremental=True)
    request = replace(plain, stop_ids=(stop_id_at(plain, 3),))
    driver = drive([request, make_request(2, 4, 20)], limits_of(), depth)
    assert len(driver.tokens[1]) == 3
    late = [s for s in driver.device.sampled if s.seed == 1 and s.index > 3]
    assert len(late) == depth  # they were computed, being in flight, and no more of them than that


def test_pages_and_slots_are_not_used_again_before_the_steps_in_flight_land() -> None:
    driver = Driver(limits_of(slots=1), depth=2)
    driver.submit(make_request(1, 4, 20))
    driver.submit(make_request(2, 4, 20))
    while driver.plan():
        pass
    assert len(driver.in_flight) == 3
    driver.abort(1)
    assert driver.scheduler.pool.leased > 0
    assert driver.scheduler.plan() is None  # the slot is still written to
    driver.land()
    driver.land()
    assert driver.scheduler.pool.leased > 0
    driver.land()
    assert driver.scheduler.pool.leased == 0
    driver.finish()


@pytest.mark.parametrize("depth", range(4))
def test_an_abort_returns_pages_and_slots_to_the_baseline(depth: int) -> None:
    driver = Driver(limits_of(slots=2, pages=12), depth)
    for number in range(1, 7):
        driver.submit(make_request(number, 6, 20, incremental=number % 2 == 0))
    for _ in range(4):
        driver.step()
    for number in range(1, 7):
        driver.abort(number)
    while driver.in_flight:
        driver.land()
    driver.finish()
    assert set(driver.ended.values()) == {"abort"}
    assert any(driver.tokens[number] for number in (1, 2))


def test_an_aborted_request_gives_what_it_has_wherever_it_is() -> None:
    driver = Driver(limits_of(slots=1, max_step_tokens=8))
    driver.submit(make_request(1, 20, 20))
    driver.submit(make_request(2, 4, 20))
    driver.step()
    driver.abort(2)  # waiting
    driver.abort(1)  # in the middle of its prompt
    driver.submit(make_request(3, 4, 20))
    for _ in range(5):
        driver.step()
    driver.abort(3)  # decoding
    assert driver.tokens == {1: [], 2: [], 3: uninterrupted(driver.requests[3], VOCAB)[0][:5]}
    driver.finish()


def test_a_preempted_request_resumes_with_the_same_answer_and_is_counted() -> None:
    """Its history, log-probabilities and token count survive; `Driver` compares each."""
    limits = limits_of(slots=3, pages=6, page_size=4, max_model_len=24, max_step_tokens=16)
    requests = [make_request(number, 4, 19, logprobs=number == 2) for number in (1, 2)]
    driver = drive(requests, limits, careless=True)
    assert driver.scheduler.preemptions == 1
    admitted = [(a.seed, len(a.answer)) for plan in driver.device.plans for a in plan.admissions]
    assert admitted[:2] == [(1, 0), (2, 0)]
    assert admitted[2][0] == 2  # the newest had to go
    assert admitted[2][1] > 0
    assert len(driver.logprobs[2]) == 19


def test_the_newest_is_preempted_and_the_oldest_never() -> None:
    limits = limits_of(slots=4, pages=10, page_size=2, max_model_len=21, max_step_tokens=16)
    driver = drive([make_request(number, 2, 18) for number in (1, 2, 3, 4)], limits, careless=True)
    assert driver.scheduler.preemptions > 0
    again = [a.seed for plan in driver.device.plans for a in plan.admissions][4:]
    assert 1 not in again
    assert 4 in again
    ends = {s.seed: s.step for s in driver.device.sampled}
    assert ends[1] < ends[2] < ends[3] < ends[4]


def test_a_preempted_request_comes_back_once_not_over_and_over() -> None:
    """It waits until the pool holds all of it: to start on what is free would be to lose it again."""
    limits = limits_of(slots=3, pages=40, page_size=2, max_model_len=64, max_step_tokens=64)
    requests = [make_request(1, 2, 60), make_request(2, 2, 60), make_request(3, 40, 20)]
    driver = drive(requests, limits)
    least = sum(request.max_length - 1 for request in requests)
    assert driver.scheduler.preemptions <= 2
    assert driver.device.computed <= least + 60 * driver.scheduler.preemptions


def test_a_stream_of_newcomers_does_not_starve_the_old() -> None:
    driver = Driver(limits_of(slots=2, pages=6, page_size=2, max_model_len=13, max_step_tokens=6))
    for number in range(1, 60):
        driver.submit(make_request(number, 6, 6))
        driver.step()
    waited = [s.step - s.seed for s in driver.device.sampled if s.index == 0]
    assert driver.device.sampled[0].seed == 1
    assert waited == sorted(waited)  # each waits for those before it, and for nobody else
    driver.finish()


def test_a_queue_that_is_long_is_aborted_in_a_moment() -> None:
    """The work for one request does not grow with those that wait."""
    scheduler = Scheduler(limits_of())

    def calls_of(count: int) -> int:
        for number in range(1, count + 1):
            scheduler.submit(make_request(number, 4, 4))
        return count_operations(lambda: [scheduler.abort(number) for number in range(count, 0, -1)])

    assert calls_of(2000) <= 11 * calls_of(200)


# --- cost ---


def count_operations(function: Callable[[], Any], times: int = 1) -> int:
    """Lines and calls of Python that `function` takes, whatever the machine is doing besides."""
    count = 0

    def trace(frame: Any, kind: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    def profile(frame: Any, kind: str, argument: Any) -> None:
        nonlocal count
        count += kind == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        for _ in range(times):
            function()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


def decoding_batch(size: int, incremental: bool = False) -> Callable[[], None]:
    """A step of `size` decoding requests, page growth included as it comes."""
    limits = Limits(size, size * 64, 16, 1024, size * 32, VOCAB)
    scheduler = Scheduler(limits)
    for number in range(1, size + 1):
        scheduler.submit(make_request(number, 32, 900, incremental=incremental))

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.land(plan, StepResult(np.zeros(len(plan.sampling_slots), np.int32), None))

    while np.count_nonzero(scheduler.table.decoding) < size:
        step()  # the prompts; those that begin alike wait for each other
    return step


def test_a_step_of_a_thousand_decoding_requests_costs_about_what_one_of_ten_does() -> None:
    few, many = (count_operations(decoding_batch(size), times=200) for size in (10, 1000))
    assert few > 200 * 20  # it counts something
    assert many < 3 * few


def test_each_of_a_thousand_streams_costs_a_step_no_more_than_making_its_output() -> None:
    few, many = (count_operations(decoding_batch(size, incremental=True), times=20) for size in (10, 1000))
    assert (many - few) / 20 / 990 < 10
