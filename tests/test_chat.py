"""The chat on the real model: in this process, in a real terminal with a screen, and on a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_helpers import interrupt_after
from terminal_helpers import PATIENCE, ROOT, THREADS, Terminal

import fastgraph
from fastgraph.chat.conversation import Conversation
from fastgraph.errors import RequestError

FASTGRAPH = [sys.executable, "-m", "fastgraph.cli"]
SMALL = ["--compile", "off", "--dtype", "float32", "--max-decode-bs", "2"]


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


def test_what_was_taken_back_or_changed_leaves_nothing_behind_in_the_cache(llm: fastgraph.LLM) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 8}
    conversation = Conversation(llm, greedy)
    prompts, answers = [], []

    def ask(question: str, again: bool = False) -> None:
        conversation.ask(question, lambda piece, thought: None, again=again)
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        prompts.append(llm.render([*system, *conversation.messages[:-1]]))
        answers.append(conversation.messages[-1]["content"])

    ask("Name a colour.")
    ask("Name an animal.")
    ask("Name an animal.", again=True)  # /retry
    ask("Name a fruit, please.", again=True)  # /edit
    conversation.undo()
    ask("Name a city in Italy.")
    conversation.undo()
    ask("Name an animal.")
    conversation.system = "Answer in one word."
    ask("Name a planet.")
    assert [len(prompt) for prompt in prompts] == [reply.prompt_tokens for reply in conversation.replies]
    assert [reply.cached_tokens >= 32 for reply in conversation.replies] == [False, *[True] * 5, False]

    # An engine that never had a prefix cache computes all of each conversation anew.
    with fastgraph.load_model(
        compile="off", max_model_len=128, max_decode_bs=8, dtype="float32", prefix_cache=False
    ) as other:
        fresh = other.generate(prompts, **greedy)
    assert [completion.text for completion in fresh] == answers


def assert_nobody_holds_pages(llm: fastgraph.LLM) -> None:
    """Pages of an aborted request are free, or cached, when its last step has landed."""
    deadline = time.monotonic() + PATIENCE
    while (stats := llm.stats())["running"] and time.monotonic() < deadline:
        pass
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


# --- the real program, in a real terminal ---


def test_a_dialogue_in_a_terminal(tmp_path: Path) -> None:
    screen = Terminal([*FASTGRAPH, "chat", *SMALL, "--temperature", "0", "--max-tokens", "60"], tmp_path, EDITOR="true")
    assert "SmolLM2-135M-Instruct" in screen.ready()

    answer = screen.say("What is the capital of France?")
    assert "Paris" in answer
    assert re.search(r"TTFT \d+\.\d\d s · \d+\.\d tok/s · \d+ tokens · ▱+ \d+%", answer)

    # The first turn, and the question that is asked once more, are in the prefix cache.
    assert "Paris" in screen.say("/retry")
    hits = re.search(r"tokens in +(\d+), of which (\d+) from the prefix cache", screen.say("/stats"))
    assert hits
    assert 0 < int(hits[2]) < int(hits[1])

    # A resize and Ctrl-C in mid-answer: the answer stops, the chat goes on.
    before = screen.ready()
    question = "Write a long story about a dragon."
    screen.process.send(question + "\r")
    screen.until(lambda text: len(text) > len(before) + len(question) + 10)
    screen.resize(60, 30)
    screen.process.sendintr()
    assert "stopped" in screen.ready()[len(before) :]

    # Ctrl-C while a long question is being read: nothing of it is kept.
    before = screen.ready()
    pasted = "".join(f"line {i}, one word and another\n" for i in range(200))
    screen.process.send(f"\x1b[200~{pasted}\x1b[201~")
    screen.until(lambda text: text.endswith("line 199, one word and another"))
    screen.process.send("\r")
    screen.until(lambda text: text.endswith("…"))
    screen.process.sendintr()
    assert "stopped · 0 tokens" in screen.ready()[len(before) :]
    assert "forgotten: line 0, one word" in screen.say("/undo")
    assert "forgotten: Write a long story" in screen.say("/undo")

    _, _, answer = screen.say("Say this again: 🎉 漢字 🎉 漢字 🎉").partition("漢字 🎉\n")
    assert "🎉" in answer
    assert "forgotten: Say this again: 🎉 漢字" in screen.say("/undo")

    assert "nothing was changed" in screen.say("/edit")
    assert "on the clipboard" in screen.say("/copy")
    assert "without thoughts" in screen.say("/think")
    assert "SmolLM2-135M-Instruct, context 8192" in screen.say("/model")
    assert "temperature=0.0" in screen.say("/set")
    assert "max_tokens=20" in screen.say("/set max_tokens=20")
    assert "did you mean /help" in screen.say("/hepl")
    assert "Alt-Enter" in screen.say("/help")
    assert "1 turn in talk.json" in screen.say("/save talk.json")
    assert "new conversation" in screen.say("/clear")
    assert "1 turn from talk.json" in screen.say("/load talk.json")
    assert "Paris" in screen.say("/retry")
    (tmp_path / "notes.txt").write_text("The secret word is tangerine.")
    assert "goes with your next message" in screen.say("/read notes.txt")
    assert "the system prompt: Answer in one word." in screen.say("/system Answer in one word.")
    assert "TTFT" in screen.say("What is the secret word?")

    screen.process.sendintr()
    screen.shows("once more leaves")
    screen.process.sendintr()
    assert screen.code() == 0
    assert "Traceback" not in screen.text
    typed = (tmp_path / "fastgraph" / "history").read_text(encoding="utf-8")
    assert "+What is the capital of France?" in typed
    assert "漢字" in typed
    assert "+line 199, one word" in typed


def test_loading_shows_its_phases_and_can_be_interrupted(tmp_path: Path) -> None:
    screen = Terminal([*FASTGRAPH, "chat", "--compile", "regional"], tmp_path)
    screen.shows("compiling")
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
    assert all(line.startswith(b"fastgraph: ") for line in done.stderr.splitlines())  # of a slow start
