"""What a start says on stderr where that is no terminal: enough to see what takes so long, and not more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
from terminal_helpers import PATIENCE, ROOT, THREADS

from fastgraph import terminal
from fastgraph.terminal import Loading


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_WORTH_A_LINE_IN_A_LOG", 0.3)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # by which a person says that there is a terminal after all
        monkeypatch.delenv(name, raising=False)


def test_a_log_has_a_line_of_a_phase_that_lasts_and_another_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with Loading() as loading:
        loading.tell("reading", None)
        loading.tell("compiling", None)
        time.sleep(0.5)
        for share in (0.0, 0.5, 0.9):
            loading.tell("loading", share)
        for share in (0.9, 1.0):
            time.sleep(0.25)
            loading.tell("loading", share)
        loading.tell("warming up", None)
    said = capsys.readouterr()
    lines = [f"fastgraph: {phase}{rest}" for phase in ("compiling", "loading") for rest in (r" \.\.\.", r": \d+\.\d s")]
    assert re.fullmatch("".join(f"{line}\n" for line in lines), said.err)
    assert said.out == ""


def test_the_line_comes_while_the_phase_lasts_and_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    phase = "fetching " + "a\x1b[31m" * 40
    with Loading() as loading:
        loading.tell(phase, None)
        deadline, said = time.monotonic() + 60, ""
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
            time.sleep(0.01)
    assert said == "fastgraph: " + phase.replace("\x1b", "\ufffd") + " ...\n"


def test_nothing_is_said_of_what_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    with Loading() as loading:
        loading.tell("reading", None)
    time.sleep(0.5)
    assert capsys.readouterr().err == ""


def test_a_start_says_its_phases_on_stderr_and_only_the_answer_on_stdout() -> None:
    code = "from fastgraph import cli, terminal\nterminal._WORTH_A_LINE_IN_A_LOG = 0.0\ncli.main()"
    options = ["--max-decode-bs", "1", "--max-model-len", "256", "--temperature", "0", "--max-tokens", "10"]
    done = subprocess.run(
        [sys.executable, "-c", code, "chat", "What is the capital of France?", *options, "--device", "cpu"],
        env={**os.environ, **THREADS, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "fastgraph:" not in done.stdout
    lines = done.stderr.splitlines()
    assert all(re.fullmatch(r"fastgraph: [a-zA-Z (),]+( \.\.\.|: \d+\.\d s)", line) for line in lines), done.stderr
    assert {"fastgraph: importing torch ...", "fastgraph: loading weights ...", "fastgraph: warming up ..."} < set(
        lines
    )
