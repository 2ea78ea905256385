"""The benches: that they ask the same of every engine, and that their figures mean what their names say."""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import fastgraph
from fastgraph.bench import latency, measure, roofline, shapes, steps, with_shape, workloads
from fastgraph.bench.measure import Run
from fastgraph.bench.roofline import Roofline
from fastgraph.bench.workloads import Turn, Workload
from fastgraph.cli import app
from fastgraph.config import EngineConfig
from fastgraph.errors import ConfigError, RequestError

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip
MACHINE = Roofline(weights=1000, kv_token=10, bandwidth=100.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[fastgraph.LLM]:
    with fastgraph.load_model(str(tiny), load_format="dummy", device="cpu", compile="off", max_decode_bs=4) as llm:
        yield llm


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


# --- workloads ---


@pytest.mark.parametrize(
    ("workload", "digest"),
    [
        (workloads.latency(), "c8b6ed175a204d8e"),
        (workloads.chat(50), "c9731e6c679f84e5"),
        (workloads.repeated_sampling(3, 5), "52978c5fa7a2bd21"),
        (workloads.multi_turn(2, 3), "85aaa83c772b8e4c"),
    ],
)
def test_a_workload_never_changes_or_old_figures_could_not_be_compared(workload: Workload, digest: str) -> None:
    requests = [[list(turn.ids), turn.max_tokens] for session in workload for turn in session]
    assert hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16] == digest


def test_chat_lengths_have_the_median_and_the_tail_that_they_claim() -> None:
    turns = [session[0] for session in workloads.chat(2000)]
    prompts, answers = [len(turn.ids) for turn in turns], [turn.max_tokens for turn in turns]
    assert statistics.median(prompts) == pytest.approx(120, rel=0.1)
    assert statistics.median(answers) == pytest.approx(180, rel=0.1)
    assert (max(prompts), max(answers), min(prompts + answers)) == (2048, 1024, 4)
    assert np.std(np.log(prompts)) == pytest.approx(1.1, rel=0.1)


def test_repeated_sampling_shares_its_prompts() -> None:
    sessions = workloads.repeated_sampling(prompts=2, samples=3, n_in=10)
    assert [sessions[0][0].ids, sessions[3][0].ids] == [sessions[2][0].ids, sessions[5][0].ids]
    assert sessions[0][0].ids != sessions[3][0].ids


def test_a_users_own_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": [5, 6], "max_tokens": 3}\n\n{"prompt": [7]}\n')
    assert workloads.from_file(path, None, 300) == [[Turn([5, 6], 3, False)], [Turn([7], 256, False)]]


def test_a_text_may_have_any_character_in_it(tmp_path: Path) -> None:
    path, words = tmp_path / "mine.jsonl", "one\u2028two\x85three"
    path.write_text(json.dumps({"prompt": words}, ensure_ascii=False) + "\r\n" + '{"prompt": "four"}', encoding="utf-8")
    read: list[str] = []
    tokenizer: Any = SimpleNamespace(encode=lambda text: [len(read), read.append(text) or 1])
    assert len(workloads.from_file(path, tokenizer, 300)) == 2
    assert read == [words, "four"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a request is"),
        ('{"max_tokens": 3}', "line 2: a request is"),
        ('{"prompt": [1], "temperature": 1}', "line 2: a request is"),
        ('{"prompt": []}', "line 2: a prompt is"),
        ('{"prompt": ["a"]}', "line 2: a prompt is"),
        ('{"prompt": [true]}', "line 2: a prompt is"),
        ('{"prompt": [1, -1]}', "line 2: a prompt is"),
        ('{"prompt": [300]}', "line 2: a prompt is text or a list of token ids below 300"),
        ('{"prompt": [1], "max_tokens": 0}', "line 2: max_tokens must be"),
        ('{"prompt": [1], "max_tokens": true}', "line 2: max_tokens must be"),
        ('{"prompt": "text"}', "line 2: the prompt is text"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"prompt": [5]}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        workloads.from_file(path, None, 300)


def test_a_line_whose_text_the_tokenizer_refuses_is_named(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "mine.jsonl", cast(Any, SimpleNamespace())
    path.write_text(r'{"prompt": "half \ud800"}')
    tokenizer.encode = Mock(side_effect=RequestError("no text"))
    with pytest.raises(ConfigError, match="line 1: no text"):
        workloads.from_file(path, tokenizer, 300)


# --- figures ---


def test_percentiles_of_known_values() -> None:
    values = [30.0, 10.0, 20.0, 50.0, 40.0]
    assert [measure.percentile(values, share) for share in (0.0, 0.5, 0.9, 1.0)] == [10.0, 30.0, 46.0, 50.0]
    assert measure.percentile([7.0], 0.99) == 7.0
    assert measure.percentile([], 0.5) is None


def test_a_spread_hides_no_repeat() -> None:
    assert measure.spread([3.0, 1.0, 9.0]) == {"median": 3.0, "min": 1.0, "max": 9.0, "all": [3.0, 1.0, 9.0]}
    assert measure.spread([None])["median"] is None


def test_the_decode_step_is_measured_only_while_every_request_decodes() -> None:
    """Two requests, the second admitted two steps late; a step takes 1 s while both decode, and 3 s before."""
    first = Run(10, [0] * 6, 3.0, 12.0, [3.0, 6.0, 9.0, 10.0, 11.0, 12.0])
    second = Run(20, [0] * 6, 9.01, 14.01, [9.01, 10.01, 11.01, 12.01, 13.0, 14.0])
    step, context = latency._decode_step([first, second])
    assert step == pytest.approx(1.0)
    # Three steps: contexts (10 + 3) + (20 + 1), then one more each twice.
    assert context == pytest.approx(statistics.mean([34, 36, 38]))


def test_one_token_answers_have_no_decode_step() -> None:
    assert latency._decode_step([Run(10, [0], 1.0, 1.0, [1.0])])[0] is None
    assert Run(10, [0], 1.0, 1.0, []).tpot is None


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_a_step_reads_are_those_of_transformers_model(tied: bool) -> None:
    config = {**TINY, "tie_word_embeddings": tied}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    read = sum(parameter.numel() for parameter in theirs.parameters())
    if not tied:
        read -= theirs.model.embed_tokens.weight.numel()  # a step looks up a few rows
    found = roofline.roofline_of(config, torch.bfloat16, roofline.Peaks(1e9, 1e12, 1e12))
    assert found.weights == 2 * read
    assert found.kv_token == 2 * 2 * 2 * 2 * 8  # layers, k and v, kv heads, head_dim, bytes
    assert found.token_flops + found.head_flops == 2 * read


def test_a_step_reads_the_experts_that_its_rows_come_upon() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "mlp_only_layers": [0]}
    config = {**TINY, **sizes, "architectures": ["Qwen3MoeForCausalLM"]}
    found = roofline.roofline_of(config, torch.bfloat16, roofline.Peaks(1e9, 1e12, 1e12))
    layers, hidden = TINY["num_hidden_layers"] - 1, TINY["hidden_size"]
    expert = 3 * 5 * hidden
    assert found.experts == 2 * layers * 8 * expert
    assert found.step_bytes(1, 0) == pytest.approx(found.weights + 2 * layers * 2 * expert)
    chance = np.random.default_rng(0)
    met = [len({e for _ in range(5) for e in chance.permutation(8)[:2]}) for _ in range(20_000)]
    assert found.step_bytes(5, 0) == pytest.approx(found.weights + 2 * layers * np.mean(met) * expert, rel=0.01)
    assert found.token_flops + found.head_flops == found.weights + 2 * layers * 2 * expert


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3.1-8b", 8_030_261_248), ("llama-3.2-1b", 1_235_814_400), ("qwen3-0.6b", 596_049_920)],
)
def test_shipped_shapes_have_as_many_parameters_as_the_published_models(name: str, parameters: int) -> None:
    path = with_shape(EngineConfig(model=name.upper(), load_format="dummy")).model
    assert path is not None
    config = json.loads(Path(path).read_text())
    with torch.device("meta"):
        kind = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}[config["model_type"]]
        model = kind(kind.config_class(**config))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.__class__.__name__ in config["architectures"]
    assert name in shapes()


def test_a_shapes_name_means_the_shape_only_with_random_weights() -> None:
    assert with_shape(EngineConfig(model="llama-3.2-1b")).model == "llama-3.2-1b"
    assert with_shape(EngineConfig(load_format="dummy")).model is None


# --- on an engine ---


def test_runs_have_the_lengths_that_were_asked_for_and_every_arrival(llm: fastgraph.LLM) -> None:
    turns = [Turn([1, 2, 3], 5), Turn([29_999, 7], 1)]  # the second's id is past this vocabulary
    took, runs = measure.run_together(llm, turns, clocked=True)
    assert [(run.prompt_tokens, len(run.token_ids), len(run.arrivals)) for run in runs] == [(3, 5, 5), (2, 1, 1)]
    assert 0 < runs[0].ttft <= runs[0].total <= took
    assert runs[0].arrivals == sorted(runs[0].arrivals)
    _, unclocked = measure.run_together(llm, turns)
    assert [run.token_ids for run in unclocked] == [run.token_ids for run in runs]
    assert unclocked[0].arrivals == []


def test_a_batch_that_would_wait_in_a_queue_is_refused(llm: fastgraph.LLM) -> None:
    with pytest.raises(ConfigError, match="pass --max-decode-bs 5"):
        latency.bench(
            llm, MACHINE, batches=[5], n_in=4, n_out=4, repeats=1, temperature=0, seed=0, tell=lambda *_: None
        )


def test_latency_by_the_command_line(tiny: Path) -> None:
    arguments = ("-m", tiny, "--load-format", "dummy", "--compile", "off", "--dtype", "float32", "--device", "cpu")
    result = run("latency", *arguments, "--batch", "2,1", "--n-in", 8, "--n-out", 6, "--repeats", 3, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        for name in ("ttft", "tpot", "itl_p50", "itl_p95", "output_tokens_per_second", "decode_step", "roofline_share"):
            assert len(row[name]["all"]) == 3
            assert row[name]["min"] == min(row[name]["all"])
            assert row[name]["median"] == statistics.median(row[name]["all"])
            assert row[name]["max"] == max(row[name]["all"])
            assert row[name]["min"] > 0
    assert found["counters"] == {"recompiles": 0, "eager_steps": 0, "kernel_builds": 0, "preemptions": 0}
    assert [found["engine"][name] for name in ("device", "dtype", "compile")] == ["cpu", "float32", "off"]
    assert "token" not in found["engine"]
    # The table went to stderr, plain.
    assert "TTFT ms" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("latency", "--batch", "1,zero"), 2, "takes sizes like"),
        (("latency", "--batch", "0"), 2, "takes sizes like"),
        (("latency", "--context", ""), 2, "takes sizes like"),
        (("latency", "--prefill", ""), 2, "takes sizes like"),
        (("latency", "--repeats", "0"), 2, "repeats"),
        (("latency", "--json", "/nowhere/at/all.json"), 1, "no folder to write"),
        (("latency", "--json", "/"), 1, "cannot be written"),
        (("latency", "--device", "cpu", "--profile"), 1, "kernels of a GPU"),
        (("latency", "-m", "./nothing.json", "--load-format", "dummy"), 1, "llama-3.2-1b"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())


# --- steps ---


def test_steps_are_measured_in_every_arm_and_prompts_may_be_longer_than_contexts(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "steps.json"
    options = ("--batch", "1,3", "--n-in", 8, "--n-out", 4, "--context", "40,100", "--prefill", "9,200", "--repeats", 2)
    found = run("latency", "--model", tiny, "--load-format", "dummy", "--arms", "eager", *options, "--json", report)
    assert found.exit_code == 0, found.output
    written = json.loads(report.read_text())
    steps, peaks = written["steps"], written["roofline"]
    assert [(row["batch"], row["context"]) for row in steps["decode"]] == [(1, 40), (3, 40), (1, 100), (3, 100)]
    for row in steps["decode"]:
        assert row["tokens_per_second"]["all"] == pytest.approx([row["batch"] / step for step in row["step"]["all"]])
        assert row["flops"] > 0
        held = row["batch"] * row["mean_context"]["median"]
        assert row["bytes"] == pytest.approx(peaks["weights"] + held * peaks["kv_token"])
        least, most = row["mean_context"]["min"], row["mean_context"]["max"]
        assert most - least == 24 + 1  # the steps of a measurement, and the one before it
        assert least < row["context"] < most
    assert [row["tokens"] for row in steps["prefill"]] == [9, 200]
    assert steps["counters"]["eager"]["recompiles"] == 0
    assert "Prefill of 200 tokens (eager)" in found.output
    assert steps["prefill"][0]["rested_seconds"]["all"] == []  # a CPU's clock does not come down
    assert "After a rest" not in found.output
    assert "eager: recompiles 0, eager steps 0" in found.output


def test_a_gpu_prefills_one_prompt_after_another_and_then_each_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    class Arm:
        def prefill(self, tokens: int) -> float:
            did.append(f"prefill {tokens}")
            return 0.25 if did[-2:-1] == ["rest"] else 0.5  # its clock is higher then

    monkeypatch.setattr("fastgraph.bench.steps.sleep", lambda seconds: did.append("rest"))
    peaks = Roofline(weights=0, kv_token=0, bandwidth=1.0, token_flops=10, matmul=1000.0, lasting=500.0)
    row = steps._prefill_row(cast(steps.Arm, Arm()), 20, 2, peaks, torch.device("cuda"))
    assert did == ["prefill 20"] * 3 + ["rest", "prefill 20"] * 2
    assert row["matmul_share"]["all"] == [0.4, 0.4]  # 200 FLOP in half a second
    assert row["lasting_share"]["all"] == [0.8, 0.8]
    assert row["rested_share"]["all"] == [0.8, 0.8]


def test_a_batch_is_whole_when_it_is_measured_though_its_prompts_take_many_steps(tmp_path: Path) -> None:
    shape, report = tmp_path / "long.json", tmp_path / "steps.json"
    shape.write_text(json.dumps(TINY | {"max_position_embeddings": 512}))
    few = ("--max-decode-bs", 16, "--page-size", 16, "--max-step-tokens", 32)
    options = ("--batch", 16, "--n-in", 8, "--n-out", 4, "--context", 120, "--prefill", 9, "--repeats", 1, *few)
    found = run("latency", "-m", shape, "--load-format", "dummy", "--arms", "eager", *options, "--json", report)
    assert found.exit_code == 0, found.output
    (row,) = json.loads(report.read_text())["steps"]["decode"]
    assert row["mean_context"]["median"] == pytest.approx(120, abs=1)  # counted over 16, so none had ended


def test_an_arm_that_is_named_twice_is_built_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], steps.build_device
    monkeypatch.setattr(steps, "build_device", lambda *arguments: built.append(arguments) or build(*arguments))
    few = ("--n-in", 8, "--n-out", 2, "--context", 9, "--prefill", 9, "--repeats", 1)
    found = run("latency", "-m", tiny, "--load-format", "dummy", "--batch", 1, "--arms", "eager,eager", *few)
    assert found.exit_code == 0, found.output
    assert len(built) == 1


def test_the_collector_is_spared_while_steps_are_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, decode = [], steps.Arm.decode

    def look(arm: steps.Arm) -> steps.Timing:
        frozen.append(gc.get_freeze_count())
        return decode(arm)

    monkeypatch.setattr(steps.Arm, "decode", look)
    few = ("--n-in", 8, "--n-out", 2, "--context", 9, "--prefill", 9, "--repeats", 1)
    found = run("latency", "-m", tiny, "--load-format", "dummy", "--batch", 1, "--arms", "eager", *few)
    assert found.exit_code == 0, found.output
    assert min(frozen) > 100_000
    assert not gc.get_freeze_count()


def test_an_arm_that_does_not_exist_is_refused(tiny: Path) -> None:
    found = run("latency", "--model", tiny, "--load-format", "dummy", "--n-out", 2, "--arms", "warp")
    assert found.exit_code != 0
    assert "there is no arm warp" in str(found.output) + str(found.exception)


@pytest.mark.parametrize(
    "options", [("--prefill", "9000", "--context", "9"), ("--context", "9000"), ("--arms", "graphs"), ("--arms", "")]
)
def test_steps_that_cannot_be_measured_are_refused_before_requests_are(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr("fastgraph.bench.latency.bench", lambda *_, **__: pytest.fail("measured first"))
    result = run("latency", "-m", str(tiny), "--load-format", "dummy", "--device", "cpu", *options)
    assert result.exit_code == 1
    assert options[1] in result.stderr
