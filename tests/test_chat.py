"""The chat on the real model: in this process, in a real terminal with a screen, and on a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pexpect
import pyte
import pytest
from chat_helpers import interrupt_after

import fastgraph
from fastgraph.chat.conversation import Conversation
from fastgraph.errors import RequestError

ROOT = Path(__file__).resolve().parent.parent
FASTGRAPH = [sys.executable, "-m", "fastgraph.cli"]
SMALL = ["--compile", "off", "--dtype", "float32", "--max-decode-bs", "2"]
PATIENCE = 240  # seconds, for a machine that is busy with something else

# On a busy machine, threads that wait for each other take many times longer than one alone.
THREADS = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def llm() -> Iterator[fastgraph.LLM]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with fastgraph.load_model(compile="off", max_model_len=128, max_decode_bs=2, dtype="float32") as llm:
        yield llm
    torch.set_num_threads(threads)


def test_a_stopped_answer_gives_its_pages_back_and_the_next_question_is_answered(llm: fastgraph.LLM) -> None:
    conversation = Conversation(llm, {"temperature": 0.0, "max_tokens": 60})
    reply = conversation.ask("Write a long story about a dragon.", interrupt_after(3))
    assert reply.finish_reason == "abort"
    assert 3 <= reply.tokens < 60
    assert conversation.messages[1]["content"]
    assert_nobody_holds_pages(llm)
    reply = conversation.ask("What is the capital of France?", lambda piece, thought: None)
    assert reply.finish_reason == "stop"
    assert "Paris" in conversation.messages[3]["content"]
    assert_nobody_holds_pages(llm)


def test_the_context_runs_out_in_a_real_conversation_without_a_traceback(llm: fastgraph.LLM) -> None:
    conversation = Conversation(llm, {"temperature": 0.0})
    reply = conversation.ask("word " * 60 + "Write a long story about a dragon.", lambda piece, thought: None)
    assert reply.context_full
    assert reply.context == llm.limits.max_model_len
    with pytest.raises(RequestError, match="/clear begins a new conversation"):
        conversation.ask("And then?", lambda piece, thought: None)
    assert len(conversation.messages) == 2
    conversation.clear()
    assert conversation.ask("What is the capital of France?", lambda piece, thought: None).finish_reason == "stop"


def assert_nobody_holds_pages(llm: fastgraph.LLM) -> None:
    """Pages of an aborted request are free, or cached, when its last step has landed."""
    deadline = time.monotonic() + PATIENCE
    while (stats := llm.stats())["running"] and time.monotonic() < deadline:
        pass
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


# --- the real program, in a real terminal ---


class Terminal:
    """A program in a pseudo-terminal, and the screen that a person would see (tall, so that nothing scrolls away)."""

    def __init__(self, arguments: Sequence[str], columns: int = 80, **environment: str) -> None:
        env = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        env = {k: v for k, v in env.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")} | environment
        self.process = pexpect.spawn(
            FASTGRAPH[0], [*FASTGRAPH[1:], *arguments], env=env, dimensions=(100, columns), timeout=PATIENCE
        )
        self._screen = pyte.Screen(columns, 100)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def until(self, condition: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + PATIENCE
        while not condition(self.text):
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not come; the screen is\n{self.text}")
            try:
                self._feed(self.process.read_nonblocking(4096, timeout=1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert condition(self.text), f"the program ended; the screen is\n{self.text}"
        return self.text

    def ready(self) -> str:
        """Wait for the prompt."""
        return self.until(lambda text: text.endswith("\n>") or text == ">")

    def say(self, line: str) -> str:
        """Type a line, and wait for the next prompt; what came between."""
        before = self.ready()
        self.process.send(line + "\r")
        self.until(lambda text: len(text) > len(before) + len(line))
        return self.ready()[len(before) :]

    def code(self) -> int:
        """The exit code, once it has ended."""
        while True:
            try:
                self._feed(self.process.read_nonblocking(4096, timeout=PATIENCE))
            except pexpect.EOF:
                break
        self.process.close()
        assert self.process.exitstatus is not None, f"ended by signal {self.process.signalstatus}"
        return int(self.process.exitstatus)

    def _feed(self, data: bytes) -> None:
        self.raw += data
        self._stream.feed(data)


def test_a_dialogue_in_a_terminal() -> None:
    screen = Terminal(["chat", *SMALL, "--temperature", "0", "--max-tokens", "60"])
    assert "SmolLM2-135M-Instruct" in screen.ready()

    answer = screen.say("What is the capital of France?")
    assert "Paris" in answer
    assert re.search(r"TTFT \d+\.\d\d s · \d+\.\d tok/s · \d+ tokens", answer)

    assert "did you mean /clear" in screen.say("/claer")

    # Ctrl-C in mid-answer: the answer stops, the chat goes on.
    before = screen.ready()
    question = "Write a long story about a dragon."
    screen.process.send(question + "\r")
    screen.until(lambda text: len(text) > len(before) + len(question) + 10)
    screen.process.sendintr()
    stopped = screen.ready()[len(before) :]
    assert "stopped · TTFT" in stopped
    assert "^C" not in stopped
    assert "Traceback" not in stopped

    assert "new conversation" in screen.say("/clear")
    assert "Paris" in screen.say("What is the capital of France?")

    # Ctrl-C at the prompt clears what was typed, and only the second in a row leaves.
    screen.process.send("half a question")
    screen.until(lambda text: text.endswith("half a question"))
    screen.process.sendintr()
    screen.until(lambda text: "once more leaves" in text)
    screen.say("/help")
    screen.process.send("/exit\r")
    assert screen.code() == 0
    assert "Traceback" not in screen.text


def test_a_terminal_without_colour_gets_none_and_ctrl_d_leaves() -> None:
    screen = Terminal(["chat", *SMALL], columns=30, NO_COLOR="1")
    screen.ready()
    assert "there is no command" in screen.say("/nonsense")
    screen.process.sendeof()
    assert screen.code() == 0
    colours = {code for code in parameters(screen.raw) if 30 <= code <= 49 or 90 <= code <= 107}
    assert colours <= {39, 49}  # back to the terminal's own


def parameters(raw: bytes) -> list[int]:
    """The numbers of every SGR sequence (colours and styles) in a terminal's input."""
    return [int(number) for found in re.findall(rb"\x1b\[([\d;]*)m", raw) for number in found.split(b";") if number]


def test_loading_shows_its_phases_and_can_be_interrupted() -> None:
    screen = Terminal(["chat", "--compile", "regional"])
    screen.until(lambda text: "compiling" in text)
    screen.process.sendintr()
    assert screen.code() == 130
    assert "Traceback" not in screen.text


def run(*arguments: str, given: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT), **environment}
    data = given.encode() if isinstance(given, str) else given
    return subprocess.run([*FASTGRAPH, *arguments], input=data, env=env, capture_output=True, timeout=PATIENCE)


def test_a_question_by_pipe_is_answered_in_plain_text() -> None:
    done = run("chat", *SMALL, "--temperature", "0", "--max-tokens", "40", given="What is the capital of France?\n")
    assert done.returncode == 0
    assert b"Paris" in done.stdout
    assert b"\x1b" not in done.stdout + done.stderr
    assert done.stdout.endswith(b"\n")
    assert done.stderr == b""
