"""The engine thread: many callers at once, each with its own answer, and none that waits for ever."""

from __future__ import annotations

import _thread
import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated import SimulatedDevice, uninterrupted

from fastgraph.config import SamplingParams
from fastgraph.control.plan import Limits, StepPlan
from fastgraph.engine import Engine, Ticket
from fastgraph.errors import EngineDied, RequestError
from fastgraph.text import TextStream

VOCAB = 24
LIMITS = Limits(slots=4, pages=40, page_size=4, max_model_len=128, max_step_tokens=24, vocab=VOCAB)
PATIENCE = 60.0  # seconds after which a caller has been forgotten

ALPHABET: Any = SimpleNamespace(special_ids=frozenset(), leading=b"", token_bytes=lambda i: bytes([97 + i]))


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + i) for i in tokens)


class Gate:
    """Lets the device run no more than so many steps. Something to hold an engine in the middle of its work."""

    def __init__(self, steps: int = 0) -> None:
        self._tickets = threading.Semaphore(steps)
        self.waiting = threading.Event()  # the engine has come to a step that it may not run yet
        self._open = False

    def __call__(self, plan: StepPlan) -> None:
        if not self._open and not self._tickets.acquire(blocking=False):
            self.waiting.set()
            assert self._tickets.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._open = True
        self._tickets.release()


@contextmanager
def running(
    depth: int = 0, limits: Limits = LIMITS, on_step: Callable[[StepPlan], None] | None = None
) -> Iterator[tuple[Engine, SimulatedDevice]]:
    device = SimulatedDevice(limits, depth, on_step)
    engine = Engine(lambda: device, depth)
    try:
        yield engine, device
    finally:
        if isinstance(on_step, Gate):
            on_step.open()
        engine.close()


def ask(engine: Engine, prompt: list[int], seed: int = 0, stop: tuple[int, ...] = (), **options: Any) -> Ticket:
    sampling = {name: options.pop(name) for name in list(options) if name not in ("text", "on_text")}
    return engine.submit(prompt, SamplingParams(**{"max_tokens": 12, **sampling}), seed=seed, stop_ids=stop, **options)


def expected(ticket: Ticket) -> tuple[list[int], str]:
    return uninterrupted(ticket.request, VOCAB)[:2]


def outcome(ticket: Ticket) -> tuple[list[int], str]:
    answer = ticket.future.result(PATIENCE)
    return answer.token_ids, answer.finish_reason


def baseline(engine: Any) -> bool:
    """Whether everything is back, once what is in flight has landed."""
    deadline = time.monotonic() + PATIENCE
    while engine.stats()["pages_free"] < LIMITS.pages and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = engine.stats()
    return (stats["pages_free"], stats["running"], stats["waiting"]) == (LIMITS.pages, 0, 0)


# --- answers ---


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
            ([1], {"stop": (VOCAB,)}, f"stop_token_ids {VOCAB} is not in the vocabulary"),
            ([1], {"stop": tuple(range(24)) * 2}, "48 stop ids, the model's own included; 32 is the most"),
            ([1], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias {VOCAB} is not in the vocabulary"),
        ):
            with pytest.raises(RequestError, match=message):
                ask(engine, prompt, **options)
        after = ask(engine, [4, 5])
        gate.open()
        assert outcome(before) == expected(before)
        assert outcome(after) == expected(after)


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


# --- the engine's end ---


def assert_dead(engine: Engine, message: str) -> None:
    """Every later call fails at once, and what has nothing to do does nothing."""
    with pytest.raises(EngineDied, match=message):
        ask(engine, [1])
    with pytest.raises(EngineDied, match=message):
        engine.stats()
    engine.abort(None)
    engine.abort([1])
    engine.close()
    assert not engine._thread.is_alive()


@pytest.mark.parametrize("depth", [0, 2])
def test_close_ends_the_thread_and_tells_all_who_wait(depth: int) -> None:
    gate = Gate(6)
    with running(depth, on_step=gate) as (engine, device):
        tickets = [ask(engine, [1] * 4, seed=i, max_tokens=100) for i in range(9)]
        assert gate.waiting.wait(PATIENCE)
        closers = [threading.Thread(target=engine.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        gate.open()
        for closer in closers:
            closer.join(PATIENCE)
        for ticket in tickets:
            with pytest.raises(EngineDied, match="the engine was closed"):
                ticket.future.result(PATIENCE)
        assert device.shut_down
        assert_dead(engine, "the engine was closed")


def test_a_request_may_close_the_engine_from_its_own_text() -> None:
    """The collector may run a forgotten engine's `close` in any thread, this one too."""
    with running() as (engine, device):
        ticket = ask(engine, [1], text=TextStream(ALPHABET), on_text=lambda piece: engine.close())
        with pytest.raises(EngineDied, match="closed"):
            ticket.future.result(PATIENCE)
        engine._thread.join(PATIENCE)
        assert device.shut_down


@pytest.mark.parametrize("where", ["execute", "result"])
@pytest.mark.parametrize("error", [MemoryError("out of it"), SystemExit(3)], ids=["error", "exit"])
def test_a_failing_device_reaches_everybody_with_its_cause(where: str, error: BaseException) -> None:
    gate = Gate(4)

    def on_step(plan: StepPlan) -> None:
        gate(plan)
        if plan.number == 6 and where == "execute":
            raise error

    with running(on_step=on_step) as (engine, device):
        if where == "result":
            real = device.land
            device.land = lambda pending: real(pending) if pending.plan.number < 6 else _raise(error)  # type: ignore[method-assign]
        tickets = [ask(engine, [1] * 4, seed=i, max_tokens=100) for i in range(9)]
        pieces: list[str] = []
        tickets.append(ask(engine, [1], text=TextStream(ALPHABET), on_text=pieces.append))
        gate.open()
        for ticket in tickets:
            with pytest.raises(EngineDied, match=f"must be made anew: {type(error).__name__}: {error}") as caught:
                ticket.future.result(PATIENCE)
            assert caught.value.__cause__ is error
        assert_dead(engine, type(error).__name__)
        assert device.shut_down


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("end", ["close", "fail"])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_forgotten_who_submits_while_the_engine_ends(end: str, seed: int) -> None:
    """A request that was submitted, but not yet taken, when the thread ended."""
    chance = random.Random(seed)
    last = chance.randint(1, 30)

    def on_step(plan: StepPlan) -> None:
        if end == "fail" and plan.number == last:
            raise MemoryError

    tickets: list[Ticket] = []

    def client() -> None:
        try:
            while True:
                tickets.append(ask(engine, [1], max_tokens=3))
        except EngineDied:
            pass

    with running(on_step=on_step) as (engine, _):
        clients = [threading.Thread(target=client) for _ in range(4)]
        for thread in clients:
            thread.start()
        time.sleep(chance.random() * 0.02)
        if end == "close":
            engine.close()
        for thread in clients:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        done, forgotten = wait_for_all([ticket.future for ticket in tickets], PATIENCE)
    assert not forgotten
    assert all(future.exception() is None or isinstance(future.exception(), EngineDied) for future in done)


def test_the_error_after_the_end_does_not_keep_its_callers_alive() -> None:
    class Thing:
        pass

    with running() as (engine, _):
        engine.close()

    def call() -> weakref.ref[Thing]:
        thing = Thing()  # held by this frame, which the error's traceback holds
        with pytest.raises(EngineDied):
            engine.stats()
        return weakref.ref(thing)

    things = [call() for _ in range(5)]
    gc.collect()
    assert [thing() for thing in things[:-1]] == [None] * 4


def test_a_build_that_fails_is_raised_where_the_engine_is_made() -> None:
    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room"):
        Engine(lambda: _raise(MemoryError("no room")), 0)
    too_large = SimpleNamespace(limits=Limits(2**40, 1, 1, 2**20, 1, 1))
    with pytest.raises((MemoryError, ValueError)):
        Engine(lambda: too_large, 0)  # type: ignore[arg-type, return-value]
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_an_interrupt_during_the_build_leaves_no_thread_behind() -> None:
    device = SimulatedDevice(LIMITS)
    go_on = threading.Event()
    thread: list[threading.Thread] = []

    def build() -> SimulatedDevice:
        thread.append(threading.current_thread())
        _thread.interrupt_main()
        assert go_on.wait(PATIENCE)
        return device

    with pytest.raises(KeyboardInterrupt):
        Engine(build, 0)
    go_on.set()
    thread[0].join(PATIENCE)
    assert not thread[0].is_alive()
    assert device.shut_down


# --- the LLM around it ---


@pytest.fixture
def simulated_llm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The default model's tokenizer, and a device that is simulated."""
    import fastgraph
    from fastgraph.device import builder

    def build(config: Any, checkpoint: Any, device: Any, vocab: int, progress: Any) -> SimulatedDevice:
        return SimulatedDevice(Limits(4, 40, 4, 128, 24, vocab), config.in_flight_depth or 0)

    monkeypatch.setattr(builder, "build_device", build)
    return fastgraph.load_model


def test_a_stream_that_is_left_early_is_aborted(simulated_llm: Callable[..., Any]) -> None:
    with simulated_llm() as llm:
        stream = llm.stream("a b c", max_tokens=100, ignore_eos=True)
        for _ in stream:
            break
        completion = stream.completion
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) < 100
        assert baseline(llm)


def test_coroutines_stream_generate_and_give_up(simulated_llm: Callable[..., Any]) -> None:
    async def all_of_it() -> None:
        options = {"max_tokens": 60, "ignore_eos": True, "seed": 1}
        whole = await llm.agenerate("a b c", **options)
        assert "".join([piece async for piece in llm.astream("a b c", **options)]) == whole.text
        async for _ in llm.astream("a b c", **options):
            break
        tasks = [asyncio.ensure_future(llm.agenerate("a b c", max_tokens=100, ignore_eos=True)) for _ in range(6)]
        await asyncio.sleep(0.01)
        for task in tasks[1:]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[0].finish_reason == "length"
        assert all(isinstance(result, asyncio.CancelledError) for result in results[1:])

    with simulated_llm() as llm:
        asyncio.run(all_of_it())
        assert baseline(llm)


def test_a_stream_tells_of_the_engines_end(simulated_llm: Callable[..., Any]) -> None:
    with simulated_llm() as llm:
        stream = llm.stream("a b c", max_tokens=100, ignore_eos=True)

        async def read() -> None:
            async for _ in llm.astream("a b c", max_tokens=100, ignore_eos=True):
                llm.close()

        with pytest.raises(EngineDied, match="closed"):
            asyncio.run(read())
        with pytest.raises(EngineDied, match="closed"):
            list(stream)


def test_letting_go_of_an_llm_ends_its_thread(simulated_llm: Callable[..., Any]) -> None:
    llm = simulated_llm()
    thread = llm._engine._thread
    assert str(llm.generate("a", max_tokens=2)) is not None
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_interpreter_ends_with_a_request_running_and_nothing_closed() -> None:
    code = """
import sys
sys.path.insert(0, "tests")
from simulated import SimulatedDevice
from fastgraph.control.plan import Limits
from fastgraph.device import builder
import fastgraph
builder.build_device = lambda *args: SimulatedDevice(Limits(4, 4000, 4, 16000, 24, args[3]))
llm = fastgraph.load_model()
stream = llm.stream("a b c", max_tokens=15000, ignore_eos=True)
print(len(next(iter(stream))) > 0)
other = llm.stream("a b c", max_tokens=15000, ignore_eos=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")
