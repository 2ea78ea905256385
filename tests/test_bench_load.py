"""bench throughput and bench serve: that a load is asked as it says, and that its figures mean what their names say."""

from __future__ import annotations

import gc
import json
import statistics
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_bench import TINY
from typer.testing import CliRunner

import fastgraph
from fastgraph.bench import limit, load, measure, memory, roofline, serve, steplog, throughput, with_shape, workloads
from fastgraph.bench.limit import Cost
from fastgraph.bench.roofline import Peaks, Roofline
from fastgraph.bench.steplog import StepLog, Steps
from fastgraph.bench.workloads import Turn
from fastgraph.cli import app
from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.control.loop import Observer
from fastgraph.control.plan import Admission, PrefillSpan, StepPlan, StepResult
from fastgraph.control.states import Request
from fastgraph.errors import ConfigError

MACHINE = Roofline(
    weights=1000, kv_token=10, bandwidth=100.0, token_flops=40, head_flops=4, context_flops=2, matmul=50.0, lasting=40.0
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[fastgraph.LLM]:
    with fastgraph.load_model(str(tiny), load_format="dummy", device="cpu", compile="off", max_decode_bs=4) as llm:
        yield llm


def silent(*_: object) -> None:
    pass


# --- the counted limit ---


@pytest.mark.parametrize(
    ("name", "chat", "sampling", "turns"),
    [
        ("qwen3-0.6b", 73_650, 33_638, 3608),
        ("llama-3.2-1b", 120_025, 104_219, 7749),
        ("llama-3.1-8b", 20_510, 24_307, 1540),
    ],
)
def test_the_limit_of_known_workloads_on_a_known_machine(name: str, chat: int, sampling: int, turns: int) -> None:
    """Output tokens a second, counted by another program, at 4.375 TB/s and 790 TFLOP/s with 1024 requests at once."""
    shape = json.loads(Path(str(with_shape(EngineConfig(model=name, load_format="dummy")).model)).read_text())
    machine = roofline.roofline_of(shape, torch.bfloat16, Peaks(4.375e12, 790e12, 680e12))
    for workload, expected in ((workloads.chat(1000), chat), (workloads.repeated_sampling(), sampling)):
        costs = limit.costs((turn.ids, 0, turn.max_tokens) for (turn,) in workload)
        tokens = sum(cost.answer for cost in costs)
        assert tokens / limit.seconds(machine, costs, 1024) == pytest.approx(expected, rel=1e-3)
    rounds = [[Cost(said, new, 300)] * 16 for said, new in ((0, 8000), (8300, 400), (9000, 400), (9700, 400))]
    least = sum(limit.seconds(machine, costs, 1024) for costs in rounds)
    assert 4 * 16 * 300 / least == pytest.approx(turns, rel=1e-3)


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_the_limit_is_what_stepping_one_by_one_gives(slots: int) -> None:
    chance = np.random.default_rng(slots)
    costs = [Cost(*map(int, chance.integers(1, 30, size=3))) for _ in range(20)]
    waiting = [[cost.cached + cost.new, cost.answer] for cost in costs]
    running: list[list[int]] = []
    expected = 0.0
    for cost in costs:
        seen = sum(cost.cached + i + 0.5 for i in range(cost.new))  # half of a token's view of itself
        expected += (40 * cost.new + 2 * seen) / 50
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        context = sum(length for length, _ in running)
        expected += max((1000 + 10 * context) / 100, (44 * len(running) + 2 * context) / 50)
        running = [[length + 1, left - 1] for length, left in running if left > 1]
    assert limit.seconds(MACHINE, costs, slots) == pytest.approx(expected)


def test_a_prompt_that_was_asked_before_costs_nothing_again() -> None:
    asked = [([1, 2, 3], 0, 5), ([1, 2, 3], 0, 6), ([1, 2], 0, 7), ([4] * 9, 6, 8)]
    assert limit.costs(asked) == [Cost(0, 3, 5), Cost(3, 0, 6), Cost(0, 2, 7), Cost(6, 3, 8)]


# --- steps ---


def step(
    number: int,
    decoding: Sequence[int],
    prefilled: Sequence[int] = (),
    admitted: Sequence[int] = (),
    repeats: int = 1,
) -> StepPlan:
    nothing = np.empty(0, np.int32)
    admissions = tuple(Admission(slot, SamplingParams(), 0, (), nothing, nothing, computed=0) for slot in admitted)
    spans = tuple(PrefillSpan(slot, 0, np.zeros(7, np.int32), samples=True) for slot in prefilled)
    decode_slots = np.array(decoding, np.int32)
    return StepPlan(number, admissions, np.empty((0, 3), np.int32), decode_slots, spans, repeats=repeats)


def columns(monkeypatch: pytest.MonkeyPatch, *landed: tuple[float, StepPlan]) -> Steps:
    log = StepLog()
    for at, plan in landed:
        monkeypatch.setattr(steplog, "perf_counter", lambda at=at: at)
        tokens = np.zeros(len(plan.sampling_slots), np.int32)
        log.landed(plan, StepResult(tokens, None, seconds=0.25))
    return Steps.of(log)


def test_gaps_are_from_token_to_token_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = columns(
        monkeypatch,
        (10.0, step(1, [], [1, 2], [1, 2])),
        (11.0, step(2, [1, 2])),
        (13.0, step(3, [2], [1], [1])),  # slot 1 has another tenant, whose first token this is
        (14.0, step(4, [1])),  # slot 2 had no turn
        (17.0, step(5, [1, 2])),
    )
    assert sorted(steps.gaps) == [1.0, 1.0, 1.0, 2.0, 3.0, 4.0]
    assert steps.decoding.tolist() == [0, 2, 1, 1, 2]
    assert steps.sampled.tolist() == [2, 2, 2, 1, 2]
    assert steps.computed.tolist() == [14, 2, 8, 1, 2]


def test_steps_that_were_submitted_together_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = columns(
        monkeypatch,
        (10.0, step(1, [], [1, 2], [1, 2])),
        (12.0, step(2, [1, 2], repeats=3)),
        (13.0, step(3, [2])),
    )
    assert sorted(steps.gaps) == [0.0] * 4 + [1.0, 2.0, 2.0]  # the tokens of one plan come at once
    assert steps.sampled.tolist() == [2, 6, 1]
    assert steps.computed.tolist() == [14, 6, 1]
    assert steps.repeats.tolist() == [1, 3, 1]


def test_the_steady_state_has_neither_the_filling_nor_the_emptying(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [0, 4, 10, 9, 3, 10, 9, 8, 1]
    landed = [
        (float(2**i), step(i + 1, list(range(1, rows + 1)), [11] if not rows else [])) for i, rows in enumerate(batches)
    ]
    steps = columns(monkeypatch, *landed)
    part = steps.steady()
    assert steps.decoding[part].tolist() == [9, 3, 10, 9]  # what a dip in the midst costs is in it
    assert steps.seconds(part) == 2**6 - 2**2
    one = columns(monkeypatch, (1.0, step(1, [], [1], [1])))
    assert one.seconds(one.steady()) == 0.0
    none = Steps.of(StepLog())
    assert (none.seconds(none.steady()), none.gaps.size) == (0.0, 0)


# --- throughput ---


def test_figures_add_up(llm: fastgraph.LLM) -> None:
    workload = [[Turn([n + 1] * (5 * n + 3), 6 + n)] for n in range(9)]
    prompt, output = sum(5 * n + 3 for n in range(9)), sum(6 + n for n in range(9))
    options: dict[str, Any] = {"repeats": 3, "temperature": 0.0, "seed": 0, "decode_text": False}
    row = throughput.bench(llm, MACHINE, workload, tell=silent, **options)
    assert row["requests"] == 9
    for i in range(3):
        found = {
            name: figure["all"][i] if figure["all"] else None for name, figure in row.items() if name != "requests"
        }
        assert (found["prompt_tokens"], found["output_tokens"]) == (prompt, output)
        took = found["seconds"]
        assert found["output_tokens_per_second"] == pytest.approx(output / took)
        assert found["total_tokens_per_second"] == pytest.approx((prompt + output) / took)
        assert found["limit_share"] == pytest.approx(found["limit_seconds"] / took)
        assert found["limit_share"] < found["lasting_share"] < found["limit_share"] * 50 / 40
        assert found["largest_batch"] == 4
        # A request's last token is sampled, and never computed.
        assert found["steps"] * found["step_tokens"] == pytest.approx(prompt + output - 9)
        assert 0 < found["steady_seconds"] < took
        assert 0 <= found["idle_share"] < 1
        assert 0 <= found["steady_idle_share"] < 1
        for name in load.TIMES:
            assert 0 < found[f"{name}_p50"] <= found[f"{name}_p90"] <= found[f"{name}_p99"]
        assert found["queued_p50"] <= found["ttft_p50"] <= found["e2e_p50"] <= found["e2e_p99"] <= took
        assert [found[name] for name in ("hit_rate", "padding_share", "recompiles", "eager_steps")] == [0, 0, 0, 0]
        assert found["preemptions"] == 0


def test_tokens_of_the_steady_state_and_gaps_are_those_of_the_answers(llm: fastgraph.LLM) -> None:
    log = StepLog()
    llm.engine.observe(log)
    _, runs = measure.run_together(llm, [Turn([1] * 4, 9), Turn([2] * 4, 30), Turn([3] * 4, 30)])
    llm.engine.ignore(log)
    steps = Steps.of(log)
    assert steps.sampled.sum() == sum(len(run.token_ids) for run in runs)
    assert steps.gaps.size == sum(len(run.token_ids) - 1 for run in runs)
    assert 0 < steps.busy.sum() < steps.at[-1] - steps.at[0] + steps.busy[0] + 0.1


def test_no_repeat_finds_what_an_earlier_one_computed(llm: fastgraph.LLM) -> None:
    options: dict[str, Any] = {"repeats": 2, "temperature": 0.0, "seed": 0, "decode_text": False, "tell": silent}
    chat = [[Turn([n + 1] * 60, 3)] for n in range(3)]
    assert throughput.bench(llm, MACHINE, chat, **options)["hit_rate"]["all"] == [0.0, 0.0]
    # Of 64 tokens 63 may come from the cache, which has pages of 16.
    sampling = [[Turn([9] * 64, 3)] for _ in range(4)]
    assert throughput.bench(llm, MACHINE, sampling, **options)["hit_rate"]["all"] == [3 * 48 / 256] * 2


def test_a_later_turn_has_all_that_was_said_before_as_its_prompt(llm: fastgraph.LLM) -> None:
    sessions = [[Turn([1] * 10, 4), Turn([2] * 3, 5)], [Turn([3] * 7, 2)]]
    prompts = Submitted()
    llm.engine.observe(prompts)
    first, second = throughput.all_turns(llm, sessions, 0.0, 0, False, silent)
    llm.engine.ignore(prompts)
    answer = first.runs[0].token_ids
    assert prompts.ids == [[1] * 10, [3] * 7, [1] * 10 + answer + [2] * 3]
    assert [run.prompt_tokens for run in second.runs] == [10 + 4 + 3]
    assert second.costs == [Cost(14, 3, 5)]


def test_requests_that_the_engine_would_refuse_are_counted_before_anything_runs(llm: fastgraph.LLM) -> None:
    workload = [[Turn([1] * 250, 7)], [Turn([1], 7)]]
    options: dict[str, Any] = {"repeats": 1, "temperature": 0.0, "seed": 0, "decode_text": False, "tell": silent}
    with pytest.raises(ConfigError, match="1 of 2 requests span more than the 256 tokens"):
        throughput.bench(llm, MACHINE, workload, **options)


def test_text_is_made_of_every_answer_if_asked_for(llm: fastgraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    monkeypatch.setattr(llm, "tokenizer", SimpleNamespace(eos_ids=frozenset(), decode=read.append))
    turns = [Turn([1, 2], 3), Turn([3], 2)]
    measure.run_together(llm, turns)
    assert read == []
    _, runs = measure.run_together(llm, turns, decode=True)
    assert read == [run.token_ids for run in runs]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_memory_of_the_weights_is_that_of_transformers_model(llm: fastgraph.LLM, kind: str) -> None:
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    dtype = getattr(torch, kind)
    machine = roofline.roofline_of(TINY, dtype, Peaks(1e9, 1e12, 1e12))
    found = memory.by_kind(TINY, llm.limits, machine, dtype, torch.device("cpu"))
    assert found["weights"] == dtype.itemsize * sum(parameter.numel() for parameter in theirs.parameters())
    pages = llm.limits.pages + 1
    assert found["kv"] == 2 * 2 * 2 * 8 * dtype.itemsize * 16 * pages  # k and v, layers, kv heads, head_dim
    assert found["process"] > 2**26


def test_memory_of_captured_graphs_is_a_kind_of_its_own(llm: fastgraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(device: int, pool: tuple[int, int], total: int, allocated: int) -> dict[str, Any]:
        return {"device": device, "segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    machine = roofline.roofline_of(TINY, torch.float32, Peaks(1e9, 1e12, 1e12))
    known = memory.by_kind(TINY, llm.limits, machine, torch.float32, torch.device("cpu"))
    tensors = known["weights"] + known["kv"] + 300
    segments = [segment(0, (0, 0), tensors + 50, tensors), segment(0, (0, 7), 1000, 20), segment(1, (0, 8), 9, 9)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 2 * tensors))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: tensors + 20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: tensors + 50 + 1000)
    found = memory.by_kind(TINY, llm.limits, machine, torch.float32, torch.device("cuda"))
    assert {"other": 300, "graphs": 1000, "reserved": 50, "free": 10_000}.items() <= found.items()
    assert sum(found.values()) == 2 * tensors


# --- serve ---


class Submitted(Observer):
    """When what was submitted, and how many were under way by then."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ids: list[list[int]] = []

    def submitted(self, request: Request) -> None:
        self.at.append(perf_counter())
        self.ids.append(request.prompt.tolist())


def test_arrivals_are_independent_of_each_other() -> None:
    """Gaps of a Poisson process are distributed exponentially: the spread is the mean, and a third exceed 1.1 of it."""
    gaps = np.diff([0.0, *serve.poisson(4.0, 20_000, seed=1)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert (gaps > 0.25 * np.log(3)).mean() == pytest.approx(1 / 3, rel=0.03)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    assert serve.poisson(4.0, 5, seed=1) == serve.poisson(4.0, 5, seed=1) != serve.poisson(4.0, 5, seed=2)


def test_no_session_begins_before_its_time(llm: fastgraph.LLM) -> None:
    log, begins = Submitted(), [0.0, 0.05, 0.3]
    llm.engine.observe(log)
    start = perf_counter()
    played = serve.play(llm, [[Turn([n + 1] * 3, 2)] for n in range(3)], begins, 3, 0.0, 0, False, silent)
    llm.engine.ignore(log)
    assert len(log.at) == 3
    for at, begin in zip(log.at, begins, strict=True):
        assert at - start >= begin
    assert log.at[1] - start < 0.3  # nor does it wait for others
    assert played.seconds >= 0.3


@pytest.mark.parametrize("at_once", [1, 3])
def test_so_many_sessions_are_under_way_and_no_more(llm: fastgraph.LLM, at_once: int) -> None:
    class Running(Observer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def landed(self, plan: StepPlan, result: StepResult) -> None:
            self.seen.append(len(plan.decode_slots) + len(plan.spans))

    log = Running()
    llm.engine.observe(log)
    played = serve.play(llm, [[Turn([n + 1] * 3, 12)] for n in range(9)], [0.0] * 9, at_once, 0.0, 0, False, silent)
    llm.engine.ignore(log)
    assert len(played.runs) == 9
    assert max(log.seen) == at_once


def test_a_session_goes_on_with_its_own_answers_without_waiting_for_others(llm: fastgraph.LLM) -> None:
    workload = [[Turn([1] * 5, 3), Turn([2] * 2, 3), Turn([3], 2)], [Turn([4] * 4, 60)]]
    log = Submitted()
    llm.engine.observe(log)
    shares: list[float] = []
    played = serve.play(llm, workload, [0.0, 0.0], 2, 0.0, 0, False, shares.append)
    llm.engine.ignore(log)
    assert [run.prompt_tokens for run in played.runs] == [5, 5 + 3 + 2, 5 + 3 + 2 + 3 + 1, 4]
    first, second, third, _ = (run.token_ids for run in played.runs)
    assert log.ids[2:] == [[1] * 5 + first + [2] * 2, [1] * 5 + first + [2] * 2 + second + [3]]
    assert len(third) == 2
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_an_engine_that_dies_ends_the_bench(tiny: Path) -> None:
    with fastgraph.load_model(str(tiny), load_format="dummy", device="cpu", compile="off") as llm:
        threading.Timer(0.2, llm.close).start()
        with pytest.raises(fastgraph.errors.EngineDied):
            serve.play(llm, [[Turn([1], 200)]] * 500, [0.0] * 500, 4, 0.0, 0, False, silent)


# --- by the command line ---


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_throughput_by_the_command_line(tiny: Path, tmp_path: Path) -> None:
    mine, out, trace = tmp_path / "mine.jsonl", tmp_path / "found.json", tmp_path / "trace.jsonl"
    mine.write_text("".join(f'{{"prompt": {[1] * (n + 1)}, "max_tokens": {n + 2}}}\n' for n in range(9)))
    arguments = ("-m", tiny, "--load-format", "dummy", "--compile", "off", "--device", "cpu", "--max-decode-bs", 4)
    load = ("--workload", mine, "--requests", 8, "--repeats", 2)
    result = run("throughput", *arguments, *load, "--json", out, "--trace", trace)
    assert result.exit_code == 0, result.output
    for heading in ("output tok/s", "share of the limit %", "steady device idle %", "TTFT", "E2E", "Memory: weights"):
        assert heading in result.stdout
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["requests"] == 8
    assert row["prompt_tokens"]["all"] == [sum(range(1, 9))] * 2
    assert row["output_tokens"]["all"] == [sum(range(2, 10))] * 2
    for speed, seconds in zip(row["output_tokens_per_second"]["all"], row["seconds"]["all"], strict=True):
        assert speed == pytest.approx(sum(range(2, 10)) / seconds)
    assert row["limit_share"]["median"] == statistics.median(row["limit_share"]["all"])
    assert found["memory"].keys() == {"weights", "kv", "process"}
    assert found["roofline"]["matmul"] > 1e8
    assert CliRunner().invoke(app, ["replay", str(trace)]).exit_code == 0


def test_several_workloads_run_one_after_the_other(tiny: Path, tmp_path: Path) -> None:
    arguments = ("-m", tiny, "--load-format", "dummy", "--compile", "off", "--device", "cpu", "--max-model-len", 250)
    files = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for number, file in enumerate(files, 1):
        file.write_text(json.dumps({"prompt": [number] * 9, "max_tokens": 3}) + "\n")
    result = run("throughput", *arguments, "--repeats", 1, "--workload", f"{files[0]},{files[1]}", "--json", "-")
    assert result.exit_code == 0, result.output
    assert [row["workload"] for row in json.loads(result.stdout)["rows"]] == [str(file) for file in files]
    assert all(f"{file}, 1 requests" in result.stderr for file in files)


@pytest.mark.parametrize("load", [("--rate", 200), ("--concurrency", 2)])
def test_serve_by_the_command_line(tiny: Path, load: tuple[str, int]) -> None:
    arguments = ("-m", tiny, "--load-format", "dummy", "--compile", "off", "--device", "cpu", "--max-model-len", 250)
    lines = "\n".join(json.dumps({"prompt": [n] * 9, "max_tokens": 5}) for n in range(1, 7))
    mine = tiny.with_name("mine.jsonl")
    mine.write_text(lines)
    result = run("serve", *arguments, *load, "--workload", mine, "--repeats", 2, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["bench"] == "serve"
    assert found["options"][load[0].strip("-")] == load[1]
    assert found["rows"][0]["output_tokens"]["all"] == [30, 30]
    assert found["rows"][0]["largest_batch"]["max"] <= (2 if load[0] == "--concurrency" else 6)
    assert "TTFT" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("throughput", "--workload", "chat,nonsense"), 1, "there is no workload nonsense"),
        (("throughput", "--workload", "x" * 300), 1, "there is no workload xxx"),
        (("serve",), 2, "either --rate, above 0, or --concurrency"),
        (("serve", "--rate", 1, "--concurrency", 1), 2, "either --rate, above 0, or --concurrency"),
        (("serve", "--rate", 0), 2, "either --rate, above 0, or --concurrency"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(arguments: tuple[object, ...], code: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())


def test_text_without_a_tokenizer_is_refused(tiny: Path) -> None:
    arguments = ("-m", tiny, "--load-format", "dummy", "--compile", "off", "--device", "cpu", "--decode-text")
    result = run("throughput", *arguments)
    assert result.exit_code == 1
    assert "without --decode-text" in " ".join(result.stderr.split())


def test_the_collector_is_spared_what_was_there_before_the_runs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, warm_up = [], measure.warm_up

    def look(*arguments: Any) -> None:
        frozen.append(gc.get_freeze_count())
        warm_up(*arguments)

    monkeypatch.setattr(measure, "warm_up", look)
    arguments = ("-m", tiny, "--load-format", "dummy", "--compile", "off", "--device", "cpu", "--max-decode-bs", 4)
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": [1, 2, 3], "max_tokens": 2}')
    found = run("throughput", *arguments, "--workload", mine, "--repeats", 1)
    assert found.exit_code == 0, found.output
    assert frozen[0] > 100_000
    assert not gc.get_freeze_count()
