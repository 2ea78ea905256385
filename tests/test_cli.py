"""The command line: flags reach the engine as they are written, and scripts can trust output and exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fastgraph
from fastgraph import flags, terminal
from fastgraph.cli import app
from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.engine import Timing, TokenLogprob
from fastgraph.errors import EngineDied, ModelError
from fastgraph.llm import Completion

ROOT = Path(__file__).resolve().parent.parent


class FakeLLM:
    """Records what reaches it; completes every prompt in the same way."""

    def __init__(self) -> None:
        self.config: EngineConfig | None = None
        self.prompt: str | None = None
        self.sampling: dict[str, Any] = {}
        self.error: BaseException | None = None

    def stream(self, prompt: str, **sampling: Any) -> Iterator[str]:
        self.prompt, self.sampling = prompt, sampling
        yield " Paris"
        if self.error:
            raise self.error
        yield "."

    def generate(self, prompt: str, **sampling: Any) -> Any:
        self.prompt, self.sampling = prompt, sampling
        logprobs = [TokenLogprob(5, -0.5, {5: -0.5})] if sampling.get("logprobs") else None
        answer = Completion(" Paris.", [5], "stop", logprobs, 4, 0, Timing(0.1, 0.2, 0.3))
        return [answer] * sampling["n"] if sampling.get("n", 1) > 1 else answer


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()

    @contextlib.contextmanager
    def load(config: EngineConfig) -> Iterator[FakeLLM]:
        fake.config = config
        yield fake

    monkeypatch.setattr(terminal, "load", load)
    return fake


def run(*arguments: str, given: str | bytes = "") -> Any:
    return CliRunner().invoke(app, list(arguments), input=given)


def test_every_engine_option_is_a_flag_of_its_own_name(llm: FakeLLM) -> None:
    values: dict[str, Any] = {
        "model": "somewhere", "revision": "v1", "token": "secret", "offline": True, "device": "cpu",
        "dtype": "float32", "compile": "regional", "load_format": "dummy", "chat_template": "{{ x }}",
        "max_model_len": 101, "max_decode_bs": 102, "max_capture_bs": 103, "max_step_tokens": 104, "page_size": 8,
        "max_capture_tokens": 106, "multi_step": 4,
        "kv_pages": 105, "in_flight_depth": 3, "prefix_cache": False, "host_kv_gb": 1.5, "trace": "decisions",
        "autotune": False, "kernels": {"sample": "reference"},
    }  # fmt: skip
    values = {f.name: values[f.name] for f in dataclasses.fields(EngineConfig)}
    written: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if name == "kernels":
            written += ["--kernel", "sample=reference"]
        elif isinstance(value, bool):
            written.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            written += [f"--{flag}", str(value)]
    assert run("generate", "x", *written).exit_code == 0
    assert llm.config == EngineConfig(**values)


def test_flags_that_are_left_out_leave_the_engine_and_the_model_their_defaults(llm: FakeLLM) -> None:
    assert run("generate", "x").exit_code == 0
    assert llm.config == EngineConfig()
    assert llm.sampling == {}


def test_every_sampling_option_is_a_flag_of_its_own_name(llm: FakeLLM) -> None:
    written = (
        "--temperature 0 --top-k 3 --top-p 0.5 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty -1 "
        "--frequency-penalty 2 --logit-bias 7=-100 --logit-bias 8=1.5 --seed 0 --n 2 --max-tokens 9 --min-tokens 1 "
        "--stop A --stop B --stop-token-ids 4 --stop-token-ids 5 --ignore-eos --logprobs --top-logprobs 2"
    )
    assert run("generate", "x", "--json", *written.split()).exit_code == 0
    assert set(llm.sampling) == {f.name for f in dataclasses.fields(SamplingParams)}
    assert SamplingParams.of({}, llm.sampling) == SamplingParams(
        temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1.0,
        frequency_penalty=2.0, logit_bias={7: -100.0, 8: 1.5}, seed=0, n=2, max_tokens=9, min_tokens=1,
        stop=("A", "B"), stop_token_ids=(4, 5), ignore_eos=True, logprobs=True, top_logprobs=2,
    )  # fmt: skip


def test_a_zero_is_a_value_and_not_a_flag_left_out(llm: FakeLLM) -> None:
    run("generate", "x", "--temperature", "0", "--top-k", "0", "--seed", "0")
    assert llm.sampling == {"temperature": 0.0, "top_k": 0, "seed": 0}


def test_every_flag_says_what_it_is_for() -> None:
    parameters = [*flags.ENGINE.parameters, *flags.SAMPLING.parameters]
    without = [p.name for p in parameters if not p.annotation.__metadata__[0].help]
    assert without == []


@pytest.mark.parametrize("command", ["chat", "generate", "kernels", "bench latency", "bench throughput", "bench serve"])
def test_help_names_every_flag_in_full_in_a_narrow_terminal(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"}).output
    assert "…" not in shown
    names = [parameter.name.replace("_", "-") for parameter in flags.ENGINE.parameters]
    names[names.index("kernels")] = "kernel"  # one at a time
    assert all(f"--{name} " in shown for name in names)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["--temperature", "warm"],
        ["--temperature", "-1"],
        ["--top-p", "2"],
        ["--device", "tpu"],
        ["--max-model-len", "0"],
        ["--logit-bias", "5:1"],
        ["--logit-bias", "5=1", "--logit-bias", "5=2"],
        ["--kernel", "sample=triton", "--kernel", "sample=reference"],
        ["--logprobs"],
    ],
)
def test_what_cannot_work_is_a_usage_error_before_anything_is_loaded(llm: FakeLLM, arguments: list[str]) -> None:
    result = run("generate", "x", *arguments)
    assert result.exit_code == 2
    assert llm.config is None
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_completion_is_streamed_to_stdout_alone(llm: FakeLLM) -> None:
    result = run("generate", "The capital of France is")
    assert (result.exit_code, result.stdout, result.stderr) == (0, " Paris.\n", "")
    assert llm.prompt == "The capital of France is"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_prompt_comes_from_a_pipe_without_the_newline_of_echo(llm: FakeLLM, arguments: list[str]) -> None:
    assert run("generate", *arguments, given="one\n\ntwo \n").exit_code == 0
    assert llm.prompt == "one\n\ntwo "


@pytest.mark.parametrize("given", ["", "\n"])
def test_no_prompt_is_an_error_before_anything_is_loaded_and_an_empty_one_is_a_prompt(llm: FakeLLM, given: str) -> None:
    for arguments in ([], ["-"]):
        result = run("generate", *arguments, given=given)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("error: there is no prompt: ")
    assert llm.config is None
    assert run("generate", "", given=given).exit_code == 0
    assert llm.prompt == ""


def test_a_pipe_that_is_no_text_is_an_error(llm: FakeLLM) -> None:
    result = run("generate", given=b"\xff\xfe")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: stdin is not UTF-8 text")


def test_json_is_one_object(llm: FakeLLM) -> None:
    result = run("generate", "x", "--json", "--logprobs")
    assert json.loads(result.stdout) == {
        "text": " Paris.",
        "token_ids": [5],
        "finish_reason": "stop",
        "logprobs": [{"token_id": 5, "logprob": -0.5, "top": {"5": -0.5}}],
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "timing": {"queued": 0.1, "ttft": 0.2, "total": 0.3},
    }


def test_several_answers(llm: FakeLLM) -> None:
    assert run("generate", "x", "--n", "2").stdout == " Paris.\n---\n Paris.\n"
    assert len(json.loads(run("generate", "x", "--n", "2", "--json").stdout)["completions"]) == 2


@pytest.mark.parametrize("error", [ModelError("no such model"), EngineDied("it died")])
def test_a_failure_is_one_line_and_exit_code_1(llm: FakeLLM, error: Exception) -> None:
    llm.error = error
    result = run("generate", "x")
    assert (result.exit_code, result.stdout) == (1, " Paris")
    assert result.stderr == f"error: {error}\n"


def test_an_interrupt_is_exit_code_130(llm: FakeLLM) -> None:
    llm.error = KeyboardInterrupt()
    result = run("generate", "x")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_the_version_and_no_arguments() -> None:
    assert run("--version").stdout == f"{fastgraph.__version__}\n"
    assert "chat" in run().output


def test_help_needs_no_torch() -> None:
    """It takes seconds to import, which a person who asks for help would wait."""
    code = (
        "import sys\nfrom fastgraph.cli import app\n"
        "try:\n    app(['chat', '--help'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert b"--temperature" in done.stdout


@pytest.mark.parametrize(
    ("closed", "told"), [("<&-", "told "), (">&-", ""), ("2>&-", "told all"), ("<&- >&- 2>&-", "")]
)
def test_a_stream_that_the_caller_has_closed_is_an_empty_one(closed: str, told: str) -> None:
    code = (
        "import sys; from fastgraph import cli, terminal\n"
        "def app():\n"
        "    with terminal.silent_keyboard():\n"
        "        terminal.write('told ' + terminal.piped_text())\n"
        "    sys.stderr.isatty()\n"
        "cli.app = app; cli.main()"
    )
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, input="all", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_a_missing_model_is_one_line_on_stderr_and_nothing_on_stdout() -> None:
    command = [sys.executable, "-m", "fastgraph.cli", "generate", "x", "-m", "./nowhere"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (1, "")
    said = [line for line in done.stderr.splitlines() if not line.startswith("fastgraph: ")]  # of a slow start
    assert len(said) == 1
    assert said[0].startswith("error: ")
