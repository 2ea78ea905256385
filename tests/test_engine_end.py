"""However an engine ends, everybody who waits is told, and nothing of it is left behind."""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import wait as wait_for_all
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_helpers import ALPHABET, LIMITS, PATIENCE, Gate, ask, baseline, running
from simulated import SimulatedDevice

from fastgraph.config import SamplingParams
from fastgraph.control.loop import Observer
from fastgraph.control.plan import Limits, StepPlan
from fastgraph.control.states import Request
from fastgraph.engine import Ask, Engine, Ticket
from fastgraph.errors import EngineDied
from fastgraph.text import TextStream


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


@pytest.mark.parametrize("depth", [0, 2])
def test_no_step_begins_once_the_end_is_asked_for(depth: int) -> None:
    gate = Gate(4)
    with running(depth, on_step=gate) as (engine, device):
        ask(engine, [1] * 4, max_tokens=100)
        assert gate.waiting.wait(PATIENCE)
        closer = threading.Thread(target=engine.close)
        closer.start()
        while engine._loop._commands.empty():
            time.sleep(0.001)
        gate.open()
        closer.join(PATIENCE)
        assert device.steps <= 5 + depth  # the one at the gate, and those that went out before the command was seen


def test_ctrl_c_however_often_leaves_no_thread_at_work() -> None:
    """At Python's end a thread that is still inside torch would bring the process down."""
    gate = Gate(4)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    try:
        with running(on_step=gate) as (engine, device):
            ask(engine, [1] * 4, max_tokens=100)
            assert gate.waiting.wait(PATIENCE)

            def hammer() -> None:
                for _ in range(3):
                    time.sleep(0.05)
                    os.kill(os.getpid(), signal.SIGINT)
                gate.open()

            hammering = threading.Thread(target=hammer)
            hammering.start()
            with pytest.raises(KeyboardInterrupt):
                engine.close()
            hammering.join(PATIENCE)
            assert device.shut_down
            assert_dead(engine, "closed")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_policy_that_exits_reaches_everybody() -> None:
    def policy(request: Request) -> float:
        if request.id == 3:
            raise SystemExit(3)
        return 0.0

    device = SimulatedDevice(LIMITS)
    engine = Engine(lambda: device, 0, policy)
    ask(engine, [1], max_tokens=3).future.result(PATIENCE)
    tickets = engine.submit_all([Ask([1], SamplingParams(max_tokens=100), 0, ()) for _ in range(3)])
    for ticket in tickets:
        with pytest.raises((EngineDied, SystemExit)):
            ticket.future.result(PATIENCE)
    engine._thread.join(PATIENCE)
    assert device.shut_down
    assert_dead(engine, "SystemExit")


def test_an_observer_that_fails_at_the_end_keeps_nobody_waiting() -> None:
    class Failing(Observer):
        def ended(self, error: Exception) -> None:
            raise OSError("no space left")

    gate = Gate(4)
    with running(on_step=gate) as (engine, device):
        engine.observe(Failing())
        ticket = ask(engine, [1] * 4, max_tokens=100)
        assert gate.waiting.wait(PATIENCE)
        closer = threading.Thread(target=engine.close)
        closer.start()
        gate.open()
        closer.join(PATIENCE)
        with pytest.raises(EngineDied, match="closed"):
            ticket.future.result(PATIENCE)
        assert device.shut_down
        assert_dead(engine, "closed")


def test_commands_keep_no_step_waiting_for_long() -> None:
    gate = Gate(2)
    with running(on_step=gate) as (engine, device):
        ticket = ask(engine, [1] * 4, max_tokens=100)
        assert gate.waiting.wait(PATIENCE)
        steps: list[int] = []
        told = [engine._loop.call(lambda: steps.append(device.steps)) for _ in range(1000)]
        gate.open()
        told[-1].result(PATIENCE)
        assert len(set(steps)) >= 9
        engine.abort([ticket.request.id])


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


def test_a_stream_can_be_read_piece_by_piece(simulated_llm: Callable[..., Any]) -> None:
    with simulated_llm() as llm:
        options = {"max_tokens": 8, "ignore_eos": True, "seed": 1}
        whole = llm.generate("a b c", **options)
        stream = llm.stream("a b c", **options)
        first = next(stream)
        assert first + "".join(stream) == whole.text
        with pytest.raises(StopIteration):
            next(stream)


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


def test_when_one_of_several_answers_fails_the_others_are_aborted(
    simulated_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(request: Any) -> float:
        if request.id == 2:
            raise ZeroDivisionError
        return 0.0

    with simulated_llm(policy=fails_once) as llm:
        aborted: list[int] = []
        monkeypatch.setattr(llm.engine, "abort", aborted.extend)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(llm.agenerate("a b c", n=3, max_tokens=8))
        assert {1, 3} <= set(aborted)


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
    thread = llm.engine._thread
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
