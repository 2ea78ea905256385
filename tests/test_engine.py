"""The engine thread: many callers at once, each with its own answer, and its own end if it wants one early."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import tracemalloc
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import ALPHABET, LIMITS, PATIENCE, VOCAB, Gate, ask, baseline, expected, letters, outcome, running
from simulated import SimulatedDevice, uninterrupted

from fastgraph.config import MAX_LOGIT_BIAS, SamplingParams
from fastgraph.control.plan import Limits, StepPlan
from fastgraph.control.states import Request
from fastgraph.control.trace import Trace
from fastgraph.device.slots import Slots
from fastgraph.engine import Ask, Engine, Ticket
from fastgraph.errors import RequestError
from fastgraph.text import TextStream


@pytest.mark.parametrize("depth", range(4))
def test_many_threads_at_once_each_get_their_own_answer(depth: int) -> None:
    tickets: list[Ticket] = []

    def client(number: int) -> None:
        chance = random.Random(number)
        for turn in range(8):
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
            ticket = ask(engine, prompt, seed=8 * number + turn, stop=(number,), logprobs=turn % 2 == 0)
            tickets.append(ticket)
            if turn % 3 == 0:
                ticket.future.result(PATIENCE)

    with running(depth) as (engine, _):
        clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(PATIENCE)
        assert len(tickets) == 64
        for ticket in tickets:
            assert outcome(ticket) == expected(ticket)
        assert baseline(engine)
    assert sorted(t.request.id for t in tickets) == list(range(1, 65))


def test_log_probabilities_come_with_each_token() -> None:
    with running() as (engine, _):
        plain, asked = ask(engine, [1, 2], seed=1), ask(engine, [1, 2], seed=1, logprobs=True, top_logprobs=2)
        answer = asked.future.result(PATIENCE)
        assert plain.future.result(PATIENCE).logprobs is None
    tokens, _, logprobs = uninterrupted(asked.request, VOCAB)
    assert answer.logprobs is not None
    assert [(t.token_id, t.logprob) for t in answer.logprobs] == list(zip(tokens, logprobs, strict=True))
    for entry in answer.logprobs:
        assert list(entry.top) == [entry.token_id, entry.token_id + 1]
        assert list(entry.top.values()) == pytest.approx([entry.logprob, entry.logprob - 1])


def test_text_comes_in_pieces_that_join_to_the_whole() -> None:
    pieces: list[str] = []
    with running() as (engine, _):
        ticket = ask(engine, [3, 4], text=TextStream(ALPHABET), on_text=pieces.append)
        answer = ticket.future.result(PATIENCE)
    assert "".join(pieces) == answer.text == letters(expected(ticket)[0])
    assert len(pieces) == 12


@pytest.mark.parametrize("depth", range(4))
def test_a_stop_string_ends_a_request_and_is_cut_with_its_tokens_logprobs(depth: int) -> None:
    pieces: list[str] = []
    with running(depth) as (engine, device):
        whole = letters(outcome(ask(engine, [5], seed=2, max_tokens=40))[0])
        stop = whole[6:9]
        text = TextStream(ALPHABET, (stop,))
        ticket = ask(engine, [5], seed=2, max_tokens=40, text=text, on_text=pieces.append, logprobs=True)
        answer = ticket.future.result(PATIENCE)
        assert baseline(engine)
    end = whole.index(stop)
    assert (answer.text, answer.finish_reason) == (whole[:end], "stop")
    assert "".join(pieces) == answer.text
    assert letters(answer.token_ids) == whole[: end + 3]  # the tokens that the string was found in
    assert answer.logprobs is not None
    assert [t.token_id for t in answer.logprobs] == answer.token_ids
    assert device.computed < 40 + 1 + end + 3 + depth + 1  # no more steps than were in flight


def test_a_stop_string_that_ends_with_the_last_token_is_a_stop_and_no_length() -> None:
    with running() as (engine, _):
        whole = letters(outcome(ask(engine, [5], seed=2))[0])
        answer = ask(engine, [5], seed=2, text=TextStream(ALPHABET, (whole[-2:],))).future.result(PATIENCE)
    assert whole.index(whole[-2:]) == len(whole) - 2
    assert (answer.text, answer.finish_reason) == (whole[:-2], "stop")


@pytest.mark.parametrize("depth", range(4))
def test_a_stop_string_wins_over_the_end_of_text_that_follows_it(depth: int) -> None:
    """With steps in flight, both may have been sampled before either is seen."""
    with running(depth) as (engine, _):
        tokens, _ = outcome(ask(engine, [5], seed=2))
        at = next(i for i in range(3, 12) if tokens.index(tokens[i]) == i)
        stop = letters(tokens[at - 2 : at])
        ticket = ask(engine, [5], seed=2, stop=(tokens[at],), text=TextStream(ALPHABET, (stop,)))
        answer = ticket.future.result(PATIENCE)
    assert (answer.text, answer.finish_reason) == (letters(tokens[: at - 2]), "stop")


def test_nothing_grows_with_the_requests_that_were_served() -> None:
    """Requests of five hundred different lengths leave no more behind than a few do, which fill the prefix cache."""
    limits = Limits(slots=4, pages=160, page_size=4, max_model_len=600, max_step_tokens=700, vocab=VOCAB)

    def serve(lengths: range) -> int:
        for length in lengths:
            outcome(ask(engine, [1] * length, seed=length, max_tokens=2))
        device.plans.clear()
        device.sampled.clear()
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/fastgraph/*")])
        return sum(trace.size for trace in ours.traces)

    with running(limits=limits) as (engine, device):
        tracemalloc.start()
        try:
            before, after = serve(range(590, 580, -1)), serve(range(11, 511))
        finally:
            tracemalloc.stop()
    assert after - before < 30_000  # bytes; the requests' own tokens are half a million


def test_times_are_in_order_and_count_from_the_submission() -> None:
    gate = Gate()
    with running(on_step=gate) as (engine, _):
        tickets = [ask(engine, [1] * 8, seed=i, max_tokens=20) for i in range(9)]
        assert gate.waiting.wait(PATIENCE)
        time.sleep(0.2)
        gate.open()
        timings = [ticket.future.result(PATIENCE).timing for ticket in tickets]
    assert all(0 <= t.queued <= t.ttft <= t.total for t in timings)
    assert timings[0].ttft >= timings[0].queued + 0.2  # a slot at once, but no step
    assert timings[-1].queued >= 0.2


def test_a_refused_request_harms_no_other() -> None:
    gate = Gate(2)
    with running(on_step=gate) as (engine, _):
        before = ask(engine, [1, 2, 3])
        assert gate.waiting.wait(PATIENCE)
        for prompt, options, message in (
            ([], {}, "the prompt is empty"),
            ([1] * 128, {}, "the prompt has 128 tokens; with max_model_len 128 it may have 127 at most"),
            ([1] * 120, {"max_tokens": 9}, "120 prompt tokens and max_tokens 9 make 129; max_model_len is 128"),
            ([1, VOCAB], {}, f"prompt token {VOCAB} is not in the vocabulary of {VOCAB} tokens"),
            ([1, -1], {}, "prompt token -1 is not in the vocabulary"),
            ([1, 2**32 + 1], {}, f"prompt token {2**32 + 1} is not in the vocabulary"),
            ([1], {"stop": (VOCAB,)}, f"stop_token_ids {VOCAB} is not in the vocabulary"),
            ([1], {"stop": tuple(range(24)) * 2}, "48 stop ids, the model's own included; 32 is the most"),
            ([1], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias {VOCAB} is not in the vocabulary"),
            ([1], {"seed": 2**63}, f"seed must be a whole number from 0 to 2\\*\\*63 - 1, not {2**63}"),
            ([1], {"seed": -1}, "seed must be a whole number"),
            ([1], {"seed": None}, "seed must be a whole number"),
            ([1], {"max_tokens": None, "min_tokens": 128}, "min_tokens 128 is above the 127 tokens that the context"),
        ):
            with pytest.raises(RequestError, match=message):
                ask(engine, prompt, **options)
        after = ask(engine, [4, 5])
        gate.open()
        assert outcome(before) == expected(before)
        assert outcome(after) == expected(after)


NO_IDS = [[True], [1, 2.0], b"four", bytearray(b"four"), "x", "", [[1]], [None], {1, 2}, 5, None]
NO_IDS += [np.array([1.0]), np.array([True]), np.array([[1]])]


@pytest.mark.parametrize("wrong", NO_IDS)
def test_what_is_no_list_of_token_ids_is_refused(wrong: Any) -> None:
    with running() as (engine, _):
        with pytest.raises(RequestError, match="prompt must be a list of token ids, not "):
            ask(engine, wrong)
        with pytest.raises(RequestError, match="stop_ids must be a list of token ids, not "):
            ask(engine, [1], stop=wrong)
        ticket = ask(engine, np.array([1, 2]))  # type: ignore[arg-type]
        assert outcome(ticket) == expected(ticket)


def test_numpys_numbers_are_taken_as_pythons_and_may_change_afterwards(tmp_path: Path) -> None:
    gate, tables = Gate(), Slots(LIMITS, VOCAB, torch.device("cpu"))

    def step(plan: StepPlan) -> None:
        gate(plan)
        tables.apply(plan)  # the real ones count in int32

    with running(on_step=step) as (engine, _):
        engine.observe(Trace(str(tmp_path / "trace"), LIMITS, {}))
        before = ask(engine, [1])
        prompt, stop = np.array([1, 2, 3]), np.array([5, 6])
        wanted = Ask(prompt, SamplingParams(max_tokens=12), np.int32(7), stop)  # type: ignore[arg-type]
        (ticket,) = engine.submit_all([wanted])
        prompt[:], stop[:] = VOCAB, VOCAB
        gate.open()
        assert outcome(before) == expected(before)
        assert outcome(ticket) == expected(ticket)
        plain = ask(engine, [1, 2, 3], seed=7, stop=(5, 6))
        assert outcome(ticket) == outcome(plain)


def test_a_bias_that_changes_after_it_was_asked_for_ends_nothing() -> None:
    gate, tables = Gate(), Slots(LIMITS, VOCAB, torch.device("cpu"))

    def step(plan: StepPlan) -> None:
        gate(plan)
        tables.apply(plan)

    bias = {1: 0.5}
    with running(on_step=step) as (engine, _):
        tickets = [ask(engine, [1]), ask(engine, [2], logit_bias=bias)]
        bias.update(dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))
        gate.open()
        assert [outcome(ticket) for ticket in tickets] == [expected(ticket) for ticket in tickets]


def test_what_needs_the_text_of_an_answer_is_refused_without_it() -> None:
    with running() as (engine, _):
        for wrong in (Ask([1], SamplingParams(stop=("a",)), 0, ()), Ask([1], SamplingParams(), 0, (), on_text=print)):
            with pytest.raises(RequestError, match="stop strings and on_text need the text of the answer"):
                engine.submit_all([wrong])


def test_a_reader_that_fails_ends_its_own_request_alone() -> None:
    def read(piece: str) -> None:
        raise ZeroDivisionError("the reader's own fault")

    with running() as (engine, _):
        bad = ask(engine, [1], text=TextStream(ALPHABET), on_text=read)
        good = [ask(engine, [2], seed=i, max_tokens=30) for i in range(6)]
        with pytest.raises(ZeroDivisionError, match="own fault"):
            bad.future.result(PATIENCE)
        assert [outcome(ticket) for ticket in good] == [expected(ticket) for ticket in good]
        assert baseline(engine)


def test_a_cancelled_wait_neither_ends_the_request_nor_the_engine() -> None:
    """asyncio cancels the future that it waits for; the engine has still to give the answer to it."""
    gate = Gate(1)

    async def give_up(ticket: Ticket) -> None:
        waiter = asyncio.wrap_future(ticket.future)
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    with running(on_step=gate) as (engine, _):
        ticket = ask(engine, [1, 2])
        assert gate.waiting.wait(PATIENCE)
        asyncio.run(give_up(ticket))
        assert not ticket.future.cancelled()
        gate.open()
        assert outcome(ticket) == expected(ticket)
        assert outcome(ask(engine, [3]))[1] == "length"


# --- ends before their time ---


@pytest.mark.parametrize("depth", [0, 2])
def test_an_abort_gives_what_there_is_and_returns_all_pages(depth: int) -> None:
    gate = Gate(5)
    with running(depth, on_step=gate) as (engine, _):
        tickets = [ask(engine, [1] * 4, seed=i, max_tokens=100) for i in range(6)]  # two of them have to wait
        reads = ask(engine, [1], text=TextStream(ALPHABET))
        assert gate.waiting.wait(PATIENCE)
        engine.abort([tickets[0].request.id, tickets[5].request.id])
        engine.abort([tickets[1].request.id, tickets[1].request.id, 999])
        engine.abort([reads.request.id])
        gate.open()
        for ticket in (tickets[0], tickets[1], tickets[5]):
            tokens, reason = outcome(ticket)
            assert reason == "abort"
            assert tokens == expected(ticket)[0][: len(tokens)]
            assert len(tokens) < 100
        assert outcome(tickets[5]) == ([], "abort")
        assert reads.future.result(PATIENCE).text == ""
        for ticket in tickets[2:5]:
            assert outcome(ticket) == expected(ticket)
        engine.abort([tickets[2].request.id])  # it has ended: no error
        assert baseline(engine)


def test_abort_all_ends_all_and_the_next_request_is_served() -> None:
    gate = Gate(5)
    with running(on_step=gate) as (engine, _):
        tickets = [ask(engine, [1] * 4, seed=i, max_tokens=100) for i in range(30)]
        assert gate.waiting.wait(PATIENCE)
        engine.abort(None)
        late = ask(engine, [2])
        gate.open()
        assert {outcome(ticket)[1] for ticket in tickets} == {"abort"}
        assert outcome(late) == expected(late)
        assert baseline(engine)


def test_stats_are_of_now_while_requests_run() -> None:
    gate = Gate(5)
    with running(on_step=gate) as (engine, _):
        tickets = [ask(engine, [1] * 4, seed=i, max_tokens=30) for i in range(7)]
        assert gate.waiting.wait(PATIENCE)
        asked: Future[dict[str, int]] = Future()
        thread = threading.Thread(target=lambda: asked.set_result(engine.stats()))
        thread.start()
        gate._tickets.release()
        stats = asked.result(PATIENCE)
        assert {"pages_total", "pages_free", "pages_cached", "running", "waiting"} < set(stats)
        assert {"recompiles", "eager_steps", "preemptions", "prefix_hit_tokens"} < set(stats)
        assert (stats["running"], stats["waiting"], stats["pages_total"]) == (4, 3, LIMITS.pages)
        assert 0 < stats["pages_free"] < LIMITS.pages
        gate.open()
        thread.join()
        assert [outcome(ticket) for ticket in tickets] == [expected(ticket) for ticket in tickets]


def test_a_policy_that_fails_or_gives_no_number_harms_the_request_it_was_asked_about_alone() -> None:
    def policy(request: Request) -> float:
        return {1: 0.0, 2: float("nan"), 4: None}[int(request.prompt[0])]  # type: ignore[return-value]

    device = SimulatedDevice(LIMITS)
    engine = Engine(lambda: device, 0, policy)
    try:
        asks = [Ask([first, 5, 6], SamplingParams(max_tokens=8), 0, ()) for first in (1, 2, 3, 1, 4)]
        tickets = engine.submit_all(asks)
        assert [outcome(tickets[i]) for i in (0, 3)] == [expected(tickets[i]) for i in (0, 3)]
        for ticket, given in ((tickets[1], "nan"), (tickets[4], "None")):
            with pytest.raises(RequestError, match=f"not given this request a number, but {given}"):
                ticket.future.result(PATIENCE)
        with pytest.raises(KeyError):
            tickets[2].future.result(PATIENCE)
        assert baseline(engine)
    finally:
        engine.close()


def test_requests_of_one_call_are_refused_together_or_form_the_same_batches_every_time() -> None:
    with running() as (engine, device):
        asks = [Ask([i % VOCAB] * 5, SamplingParams(max_tokens=4 + i), i, ()) for i in range(3)]
        with pytest.raises(RequestError, match="the prompt is empty"):
            engine.submit_all([*asks, Ask([], SamplingParams(), 0, ())])
        batches = []
        for _ in range(5):
            device.plans.clear()
            for ticket in engine.submit_all(asks):
                assert outcome(ticket) == expected(ticket)
            batches.append([(len(plan.decode_slots), len(plan.spans)) for plan in device.plans])
        assert batches[0][0] == (0, 3)  # all in the first step
        assert all(batch == batches[0] for batch in batches)


def test_two_thousand_requests_half_of_them_aborted_leave_the_rest_right_and_the_pool_as_it_was() -> None:
    chance = random.Random(0)
    limits = Limits(slots=64, pages=400, page_size=4, max_model_len=64, max_step_tokens=256, vocab=VOCAB, host_pages=50)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 24))] for _ in range(400)]
    device = SimulatedDevice(limits, 2)
    engine = Engine(lambda: device, 2)
    try:
        asks = [
            Ask(prompts[i % 400], SamplingParams(max_tokens=chance.randint(1, 24)), i, (chance.randrange(VOCAB),))
            for i in range(2000)
        ]
        tickets = engine.submit_all(asks)
        aborted = set(chance.sample(range(2000), 1000))
        for i in chance.sample(sorted(aborted), len(aborted)):  # while the others go on
            engine.abort([tickets[i].request.id])
        for i, ticket in enumerate(tickets):
            tokens, reason = outcome(ticket)
            if reason == "abort":
                assert i in aborted
                assert tokens == expected(ticket)[0][: len(tokens)]
            else:
                assert (tokens, reason) == expected(ticket)
        assert sum(ticket.future.result().finish_reason == "abort" for ticket in tickets) > 500
        stats = engine.stats()
        while stats["running"]:
            stats = engine.stats()
        assert (stats["waiting"], stats["pages_free"] + stats["pages_cached"]) == (0, limits.pages)
    finally:
        engine.close()
    scheduler = engine._loop.scheduler
    assert not scheduler.states
    assert (scheduler.pool.leased, scheduler.host.leased) == (0, 0)


def test_an_answer_says_how_much_of_its_prompt_was_cached() -> None:
    with running() as (engine, _):
        first = ask(engine, [1, 2, 3] * 4, max_tokens=8)
        answer = first.future.result(PATIENCE)
        again = ask(engine, [1, 2, 3] * 4, seed=1)
        longer = ask(engine, [1, 2, 3] * 4 + answer.token_ids + [5])
        assert [ticket.future.result(PATIENCE).cached_tokens for ticket in (first, again, longer)] == [0, 8, 16]
        assert outcome(longer) == expected(longer)
        stats = engine.stats()
        assert (stats["prompt_tokens"], stats["prefix_hit_tokens"]) == (12 + 12 + 21, 8 + 16)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_that_is_about_to_run_dry_gets_its_next_step_before_the_text_is_read(ahead: bool) -> None:
    order: list[str] = []
    with running(2, on_step=lambda plan: order.append("step")) as (engine, device):
        device.ahead = ahead
        ticket = ask(engine, [1], text=TextStream(ALPHABET), on_text=lambda piece: order.append("text"))
        assert outcome(ticket) == expected(ticket)
    steps_before = [order[:place].count("step") for place, what in enumerate(order) if what == "text"]
    # Three steps are in flight when the first lands; then one follows each that lands.
    assert steps_before[:8] == [4 if ahead else 3, *range(5 if ahead else 4, 12 if ahead else 11)]
