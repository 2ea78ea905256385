"""The decision log: nothing that was decided is lost, and the scheduler decides it all again from the log alone."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import LIMITS, VOCAB, ask, outcome, running
from simulated import SimulatedDevice, make_request
from typer.testing import CliRunner

import fastgraph
from fastgraph.cli import app
from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.control import trace
from fastgraph.control.plan import Limits, StepPlan
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request
from fastgraph.control.trace import Trace, replay
from fastgraph.engine import Ask, Engine
from fastgraph.errors import ConfigError, EngineDied, FastgraphWarning, RequestError, TraceError

ROOT = Path(__file__).parent.parent
TIGHT = Limits(slots=4, pages=12, page_size=4, max_model_len=49, max_step_tokens=24, vocab=VOCAB)


def record(path: Path, depth: int, limits: Limits = TIGHT) -> list[StepPlan]:
    """A run with everything in it: a pool too small for all, stop ids, aborts, log-probabilities. Returns its plans."""
    chance = random.Random(depth)
    with running(depth, limits) as (engine, device):
        engine.observe(Trace(str(path), limits, {"model": "none"}))
        # These come at once, and need 24 pages of 12 while all decode: one of them must go for a while.
        crowd = [Ask([number] * 4, SamplingParams(max_tokens=18), number, ()) for number in range(4)]
        tickets = engine.submit_all(crowd)
        for ticket in tickets:
            ticket.future.result()
        for number in range(4, 40):
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 30))]
            bias = {3: 1.5} if number % 5 == 0 else {}
            options: dict[str, Any] = {"logprobs": number % 4 == 0, "temperature": number % 2, "logit_bias": bias}
            tickets.append(ask(engine, prompt, seed=number, stop=(number % VOCAB,), max_tokens=18, **options))
            if number % 20 == 19:
                engine.forget_prefixes()
            if number % 7 == 6:
                tickets[-3].future.result()
                engine.abort([tickets[-1].request.id, tickets[-2].request.id])
        for ticket in tickets:
            outcome(ticket)
        assert engine.stats()["preemptions"] > 0
    return device.plans


def events(path: Path) -> list[tuple[str, Any]]:
    return [next(iter(json.loads(line).items())) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("depth", range(3))
@pytest.mark.parametrize(
    "limits",
    [
        TIGHT,
        replace(TIGHT, host_pages=20),
        replace(TIGHT, prefix_cache=False),
        replace(TIGHT, multi_step=4, host_pages=20),  # how many, is decided by how long the device took
    ],
)
def test_a_replay_plans_what_the_run_planned(tmp_path: Path, depth: int, limits: Limits) -> None:
    path = tmp_path / "trace.jsonl"
    plans = record(path, depth, limits)
    assert any(len(plan.restores) for plan in plans) == (limits.host_pages > 0)
    assert any(plan.repeats > 1 for plan in plans) == (limits.multi_step > 1)
    found = replay(str(path))
    assert (found.difference, found.whole) == (None, True)
    aborts = sum(kind == "abort" for kind, _ in events(path))
    assert (found.requests, found.aborts, found.steps) == (40, aborts, len(plans))
    assert aborts >= 10


def test_the_log_says_all_that_was_planned_and_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    plans = record(path, depth=1)
    (first, header), *rest = events(path)
    assert first == "trace"
    assert Limits(**header["limits"]) == TIGHT
    assert header["about"] == {"model": "none"}
    logged = [value for kind, value in rest if kind == "plan" and value is not None]
    assert [plan["number"] for plan in logged] == [plan.number for plan in plans]
    for there, plan in zip(logged, plans, strict=True):
        assert there["decode_slots"] == plan.decode_slots.tolist()
        assert there["page_writes"] == plan.page_writes.tolist()
        assert [span["ids"] for span in there["spans"]] == [span.ids.tolist() for span in plan.spans]
        assert [a["prompt"] for a in there["admissions"]] == [a.prompt.tolist() for a in plan.admissions]
    landed = [value for kind, value in rest if kind == "land"]
    assert [value["number"] for value in landed] == [plan.number for plan in plans]
    assert [len(value["tokens"]) for value in landed] == [len(plan.sampling_slots) for plan in plans]
    assert rest[-1] == ("end", "the engine was closed")


def line_of(path: Path, wanted: Callable[[str, Any], bool]) -> int:
    """Index of the first line that is such an event."""
    return next(i for i, (kind, value) in enumerate(events(path)) if wanted(kind, value))


def tamper(path: Path, place: int, change: Callable[[Any], None]) -> None:
    lines = path.read_text().splitlines(keepends=True)
    event = json.loads(lines[place])
    change(event)
    lines[place] = json.dumps(event) + "\n"
    path.write_text("".join(lines))


def test_a_plan_that_was_changed_is_found_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, depth=0)
    place = line_of(path, lambda kind, value: kind == "plan" and value and value["number"] > 3 and value["page_writes"])
    plan = events(path)[place][1]
    number, was = plan["number"], plan["page_writes"][0][2]
    tamper(path, place, lambda event: event["plan"]["page_writes"][0].__setitem__(2, was + 1))
    found = replay(str(path))
    assert found.difference == (
        f"line {place + 1}, step {number}: plan.page_writes[0][2] is {was} now, and {was + 1} in the log"
    )
    assert found.steps == number - 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: plan["decode_slots"].append(9), "the length of plan.decode_slots is"),
        (lambda plan: plan["spans"][0].update(start=False), "plan.spans[0].start is 0 now, and false in the log"),
        (lambda plan: plan.update(number=3), "plan.number is 1 now, and 3 in the log"),
        (lambda plan: plan.pop("spans"), "plan is {"),
    ],
)
def test_whatever_differs_is_named(tmp_path: Path, change: Callable[[Any], None], says: str) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, depth=0)
    place = line_of(path, lambda kind, value: kind == "plan" and value is not None)
    tamper(path, place, lambda event: change(event["plan"]))
    assert f"line {place + 1}, step 1: {says}" in str(replay(str(path)).difference)


def test_a_step_that_is_planned_no_more_and_one_that_never_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, depth=0)
    place = line_of(path, lambda kind, value: kind == "plan" and value is None)
    tamper(path, place, lambda event: event.update(plan={"number": 1}))
    assert "plan is null now" in str(replay(str(path)).difference)
    tamper(path, place, lambda event: event.update(plan=None))
    place = line_of(path, lambda kind, value: kind == "plan" and value is not None)
    tamper(path, place, lambda event: event.update(plan=None))
    assert "and null in the log" in str(replay(str(path)).difference)


def test_a_request_that_the_policy_refuses_fails_alone_in_a_replay_too(tmp_path: Path) -> None:
    def policy(request: Request) -> float:
        return float("nan") if len(request.prompt) == 3 else 0.0

    path, device = tmp_path / "trace.jsonl", SimulatedDevice(TIGHT)
    engine = Engine(lambda: device, 0, policy)
    engine.observe(Trace(str(path), TIGHT, {}))
    tickets = engine.submit_all([Ask([1] * length, SamplingParams(max_tokens=9), 0, ()) for length in (9, 3, 20)])
    with pytest.raises(RequestError, match="policy"):
        tickets[1].future.result()
    assert len(outcome(tickets[0])[0]) == len(outcome(tickets[2])[0]) == 9
    engine.close()
    assert replay(str(path), lambda limits: Scheduler(limits, policy)).difference is None


def test_an_input_that_was_changed_shows_in_the_plans(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, depth=0)
    place = line_of(path, lambda kind, value: kind == "submit" and value["id"] == 2)
    tamper(path, place, lambda event: event["submit"]["prompt"].append(1))
    assert "plan." in str(replay(str(path)).difference)


@pytest.mark.parametrize(
    ("place", "line", "says"),
    [
        (0, "nonsense", "line 1: this is not of a trace"),
        (0, '{"plan":null}', "line 1: this is not of a trace: the first line"),
        (0, '{"trace":{"version":99}}', "has version 99"),
        (0, f'{{"trace":{{"version":{trace.VERSION},"limits":{{"slots":1e99}}}}}}', "its limits are whole numbers"),
        (3, "{", "line 4: this is not of a trace"),
        (3, f'{{"land":{{"number":1,"tokens":[{2**31}],"seconds":0}}}}', "line 4: this is not of a trace"),
        (3, "[]", "line 4: this is not of a trace"),
        (3, '{"land":{}}', "line 4: this is not of a trace"),
        (3, '{"trace":{}}', "line 4: this is not of a trace: the first line, and no other"),
        (3, '{"submit":{"prompt":[1]}}', "line 4: this is not of a trace"),
        (3, '{"retract":3}', "line 4: this is not of a trace: nothing is known of 'retract'"),
        (3, '{"land":{"number":77,"tokens":[],"seconds":0}}', "line 4: step 77 is not the oldest of those in flight"),
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path: Path, place: int, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, depth=0)
    lines = path.read_text().splitlines()
    lines[place] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError) as caught:
        replay(str(path))
    assert says in str(caught.value)


def test_no_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        replay(str(tmp_path / "nothing"))
    (tmp_path / "empty").touch()
    with pytest.raises(TraceError, match="empty"):
        replay(str(tmp_path / "empty"))


def test_what_stands_before_a_cut_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, depth=0)
    path.write_bytes(path.read_bytes()[:-30])
    found = replay(str(path))
    assert (found.whole, found.difference) == (False, None)
    assert found.steps > 10


def test_a_trace_that_stops_before_its_engine_ended_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, depth=0)
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[-1].startswith(b'{"end"')
    path.write_bytes(b"".join(lines[:-1]))
    found = replay(str(path))
    assert (found.whole, found.difference) == (False, None)


# --- while it is written ---


def test_an_idle_engine_has_written_all(tmp_path: Path) -> None:
    """So that a process that is killed while it waits has lost nothing."""
    path = tmp_path / "trace.jsonl"
    with running() as (engine, device):
        engine.observe(Trace(str(path), LIMITS, {}))
        outcome(ask(engine, [1, 2, 3]))
        engine.stats()  # by now the loop has come round, and found nothing to plan
        assert [value["number"] for kind, value in events(path) if kind == "plan" and value] == [
            plan.number for plan in device.plans
        ]
        assert events(path)[-1] == ("plan", None)


def test_a_scheduler_that_fails_fails_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: Scheduler) -> StepPlan | None:
        plan = plan_well(self)
        if plan is not None and plan.number == 4:
            raise AssertionError("a page has two owners")
        return plan

    plan_well = Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", faulty)
    path = tmp_path / "trace.jsonl"
    with running() as (engine, _):
        engine.observe(Trace(str(path), LIMITS, {}))
        with pytest.raises(EngineDied):
            outcome(ask(engine, [1, 2, 3]))
    found = replay(str(path))
    assert found.difference is not None
    assert found.difference.endswith("after step 3: the scheduler fails, AssertionError: a page has two owners")
    monkeypatch.setattr(Scheduler, "plan", plan_well)
    assert replay(str(path)).difference is None


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError("No space left on device")

        flush = close = lambda self: None

    path = tmp_path / "trace.jsonl"
    log = Trace(str(path), LIMITS, {})
    log._file.close()
    monkeypatch.setattr(log, "_file", Full())
    with pytest.warns(FastgraphWarning, match="ends before its time: No space left"):
        log.submitted(make_request(1, 3, 4))
    log.aborted(1)  # without another warning, which would be an error here
    log.ended(EngineDied("closed"))


def test_an_observer_that_is_ignored_hears_no_more(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with running() as (engine, _):
        log = Trace(str(path), LIMITS, {})
        engine.observe(log)
        outcome(ask(engine, [1, 2, 3]))
        engine.ignore(log)
        outcome(ask(engine, [1, 2, 3]))
        log.ended(EngineDied("no longer told"))
    assert sum(kind == "submit" for kind, _ in events(path)) == 1


def test_sampling_parameters_come_back_as_they_were(tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "top_k": 3, "logit_bias": {5: -1.0}, "stop": ("x",), "stop_token_ids": (4,)}
    request = make_request(1, np.array([1, 2], np.int32), 4, stop_ids=(4,), **sampling)
    again = trace._request(json.loads(json.dumps(trace._plain(request))))
    assert again.sampling == request.sampling == SamplingParams(max_tokens=4, **sampling)
    assert (again.id, again.seed, again.stop_ids, again.max_length) == (1, 1, (4,), 6)
    assert again.prompt.tolist() == [1, 2]


# --- as a user meets it ---

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip


def test_from_load_model_to_the_command_line(tmp_path: Path) -> None:
    shape, path = tmp_path / "tiny.json", tmp_path / "trace.jsonl"
    shape.write_text(json.dumps(TINY))
    options = {"load_format": "dummy", "device": "cpu", "compile": "off", "token": "secret"}
    with fastgraph.load_model(str(shape), trace=str(path), **options) as llm:
        llm.generate([[1, 2, 3], [4, 5]], max_tokens=5)
    assert "secret" not in path.read_text()
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 0, result.output
    assert "2 requests, 0 aborts, " in result.output
    assert "every plan is the one in the trace" in result.output
    tamper(path, 4, lambda event: event["plan"].update(number=8))
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 1
    assert "plan.number is 1 now, and 8 in the log" in result.output


def test_ctrl_c_loses_nothing(tmp_path: Path) -> None:
    shape, path = tmp_path / "tiny.json", tmp_path / "trace.jsonl"
    shape.write_text(json.dumps({**TINY, "max_position_embeddings": 8192}))
    code = (
        "import sys, fastgraph\n"
        "options = dict(load_format='dummy', device='cpu', compile='off', kv_pages=5000, trace=sys.argv[2])\n"
        "with fastgraph.load_model(sys.argv[1], **options) as llm:\n"
        "    print('ready', flush=True)\n"
        "    llm.generate([[1, 2, 3]] * 6, max_tokens=8000)\n"
    )
    command = [sys.executable, "-c", code, str(shape), str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    found = replay(str(path))
    assert (found.requests, found.aborts, found.whole, found.difference) == (6, 6, True, None)
    assert found.steps > 10
    assert events(path)[-1][0] == "end"


def test_a_trace_that_cannot_be_written_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="no folder to write the trace"):
        EngineConfig(trace="/nowhere/at/all.jsonl")


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the trace cannot be written"):
        Trace(str(tmp_path), LIMITS, {})
