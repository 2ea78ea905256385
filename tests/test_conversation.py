"""A conversation: what is kept of it, how it is steered and stopped, and what is said of the context."""

from __future__ import annotations

import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from chat_helpers import FakeLLM, FakeStream, converse, interrupt_after

from fastgraph import terminal
from fastgraph.chat import view
from fastgraph.chat.conversation import DEFAULT_SAMPLING, Conversation, join_question
from fastgraph.chat.prompt import reader
from fastgraph.chat.session import answer_once
from fastgraph.errors import EngineDied, RequestError


def test_the_second_question_is_asked_together_with_the_first_and_its_answer() -> None:
    llm = FakeLLM(["It is Paris.", "Two million."])
    converse(llm, "What is the capital?", "How many live there?", system="Be brief.")
    assert llm.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital?"},
        {"role": "assistant", "content": "It is Paris."},
        {"role": "user", "content": "How many live there?"},
    ]


def test_clear_forgets_the_conversation_but_not_the_system_prompt() -> None:
    llm = FakeLLM(["One.", "Two."])
    converse(llm, "first", "/clear", "second", system="Be brief.")
    assert [message["content"] for message in llm.asked[1]] == ["Be brief.", "second"]


@pytest.mark.parametrize("leave", ["/exit", "/quit", " /EXIT ", EOFError])
def test_what_leaves(leave: str | type[BaseException]) -> None:
    llm = FakeLLM([])
    converse(llm, leave, "never asked")
    assert llm.asked == []


def test_an_unknown_command_is_not_sent_to_the_model_and_the_nearest_is_named() -> None:
    llm = FakeLLM([])
    shown = converse(llm, "/claer", "/xyzzy now")
    assert "no command /claer: did you mean /clear?" in shown
    assert "no command /xyzzy: /help" in shown
    assert llm.asked == []


def test_a_path_is_a_question_and_not_a_command() -> None:
    llm = FakeLLM(["A file."])
    converse(llm, "/etc/hosts is what?")
    assert len(llm.asked) == 1


def test_empty_lines_are_no_questions() -> None:
    llm = FakeLLM([])
    converse(llm, "", "   ")
    assert llm.asked == []


def test_one_interrupt_at_the_prompt_stays_and_two_in_a_row_leave() -> None:
    llm = FakeLLM(["Here.", "Still here."])
    shown = converse(llm, KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt, "two")
    assert [messages[-1]["content"] for messages in llm.asked] == ["one"]
    assert "once more leaves" in shown


def test_an_interrupt_that_clears_typed_text_does_not_leave() -> None:
    lines: list[Any] = [KeyboardInterrupt(), KeyboardInterrupt("half a question"), "asked"]
    llm = FakeLLM(["Yes."])
    converse(llm, *lines)
    assert len(llm.asked) == 1


def test_the_answer_is_followed_by_its_speed_and_length() -> None:
    shown = converse(FakeLLM(["one two three"]), "count")
    assert "TTFT 0.50 s · 2.0 tok/s · 3 tokens" in shown


def test_a_narrow_terminal_shows_everything() -> None:
    shown = converse(FakeLLM(["one two three"]), "count", "/help", "/stats", width=20)
    assert all(len(line) <= 20 for line in shown.splitlines())
    assert shown.count("…") == 1  # of KEY=VALUE …: no word was cut
    assert "3 tokens" in " ".join(shown.split())


def test_sampling_is_the_flags_then_the_models_then_our_default() -> None:
    for defaults, flags, expected in (
        ({}, {}, DEFAULT_SAMPLING),
        ({}, {"temperature": 0.0}, {**DEFAULT_SAMPLING, "temperature": 0.0}),
        ({"temperature": 0.3}, {"seed": 7}, {"seed": 7}),  # the model's are filled in by the engine
    ):
        llm = FakeLLM(["Yes."], sampling_defaults=defaults)
        converse(llm, "so?", sampling=flags)
        assert {k: v for k, v in llm.sampled[0].items() if k != "max_tokens"} == expected


def test_an_answer_may_take_all_that_the_context_leaves_and_no_more_than_was_asked_for() -> None:
    llm = FakeLLM(["Yes.", "No."], context=50)
    converse(llm, "a b c")
    converse(llm, "a b c", sampling={"max_tokens": 10})
    assert [sampling["max_tokens"] for sampling in llm.sampled] == [47, 10]


def test_an_answer_that_the_context_cuts_is_said_to_be_cut_and_how_to_go_on() -> None:
    shown = converse(FakeLLM(["one two three four"], context=5), "a b", width=200)
    assert "the answer was cut: the context of 5 tokens is full" in shown
    assert "5 of 5 tokens of context used: /clear begins anew" in shown


def test_an_answer_that_max_tokens_cuts_is_said_to_be_cut() -> None:
    shown = converse(FakeLLM(["one two three four"]), "a b", sampling={"max_tokens": 2}, width=200)
    assert "2 tokens · cut at max-tokens" in shown
    assert "context" not in shown.splitlines()[-1]


def test_a_context_that_is_nearly_full_is_mentioned_beforehand() -> None:
    shown = converse(FakeLLM(["one two three four"], context=7), "a b", width=200)
    assert "6 of 7 tokens of context used: /clear" in shown


def test_a_question_past_the_context_is_refused_and_forgotten_and_clear_helps() -> None:
    llm = FakeLLM(["one two", "ok"], context=6)
    shown = converse(llm, "a b", "c d e f g", "/clear", "a", width=400)
    assert "error: the conversation, with this, is 9 tokens long, and the context is 6: /clear" in shown
    assert [message["content"] for message in llm.asked[-1]] == ["a"]


def test_a_first_question_past_the_context_does_not_advise_to_clear() -> None:
    shown = converse(FakeLLM([], context=3), "a b c d", width=200)
    assert "ask something shorter" in shown
    assert "/clear" not in shown.splitlines()[-1]


def test_a_refused_request_is_shown_and_the_conversation_goes_on_without_it() -> None:
    llm = FakeLLM([RequestError("no such thing"), "Fine."])
    shown = converse(llm, "first", "second")
    assert "error: no such thing" in shown
    assert [message["content"] for message in llm.asked[1]] == ["second"]


def test_a_dead_engine_ends_the_chat() -> None:
    with pytest.raises(EngineDied):
        converse(FakeLLM([EngineDied("gone")]), "first", "second")


def test_an_interrupt_stops_the_answer_and_what_came_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(["one two three four", "more"])
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGINT)
    reply = conversation.ask("count", interrupt_after(2))
    assert signal.getsignal(signal.SIGINT) is before
    assert (reply.finish_reason, reply.tokens) == ("abort", 2)
    assert conversation.messages[1] == {"role": "assistant", "content": "one two "}
    conversation.ask("go on", lambda piece, thought: None)
    assert [message["content"] for message in llm.asked[1]] == ["count", "one two ", "go on"]


def test_an_interrupt_that_does_not_wake_the_main_thread_is_heard() -> None:
    pieces: queue.SimpleQueue[str] = queue.SimpleQueue()

    def interrupted() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # this thread's, so that the other sleeps on

    thread = threading.Thread(target=interrupted)
    with terminal.on_interrupt() as interrupt:
        interrupt.calls(lambda: pieces.put("stopped"))
        thread.start()
        assert pieces.get(timeout=60) == "stopped"
        thread.join()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_question_stopped_before_its_answer_began_is_not_kept() -> None:
    class Stopped(FakeStream):
        def __iter__(self) -> Iterator[str]:
            os.kill(os.getpid(), signal.SIGINT)
            yield from super().__iter__()

    llm = FakeLLM([])
    llm.stream = lambda ids, **sampling: Stopped(["one"], 9, len(ids), (0, 0))  # type: ignore[method-assign]
    conversation = Conversation(llm, {})  # type: ignore[arg-type]
    assert conversation.ask("count", lambda piece, thought: None).finish_reason == "abort"
    assert conversation.messages == []


def test_one_question_gives_the_answer_alone_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(FakeLLM(["Paris."]), {})  # type: ignore[arg-type]
    assert answer_once(conversation, "What?") == 0
    assert capsys.readouterr() == ("Paris.\n", "")


def test_one_question_that_is_interrupted_keeps_what_came_and_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put, interrupt = view.write, interrupt_after(2)

    def write(piece: str) -> None:
        put(piece)
        interrupt(piece)

    monkeypatch.setattr(view, "write", write)
    assert answer_once(Conversation(FakeLLM(["one two three"]), {}), "count") == 130  # type: ignore[arg-type]
    assert capsys.readouterr() == ("one two \n", "")


def test_control_characters_of_an_answer_reach_a_pipe_but_not_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\tb\nc\x1b[31m\x07\r\x9bé漢"
    terminal.write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.write(text)
    assert capsys.readouterr().out == "a\tb\nc\ufffd[31m\ufffd\ufffd\ufffdé漢"


def test_without_prompt_toolkit_lines_are_read_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: f"{prompt}typed")
    assert reader()() == "> typed"


def test_with_stdout_on_a_pipe_the_prompt_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed\n"))
    read = reader()
    assert read() == "typed\n"
    with pytest.raises(EOFError):
        read()
    assert capsys.readouterr() == ("", "> > ")


def test_one_answer_that_the_context_cuts_says_so_beside_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer_once(Conversation(FakeLLM(["one two three"], context=3), {}), "What?") == 0  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == "one two \n"
    assert err == "the answer was cut: the context of 3 tokens is full\n"


def test_one_answer_on_a_terminal_is_followed_by_its_speed_and_by_no_advice_on_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert answer_once(Conversation(FakeLLM(["one two three"], context=3), {}), "What?") == 0  # type: ignore[arg-type]
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("one two TTFT 0.50 s · 1.0 tok/s · 2 tokens · the answer was cut")
    assert "/clear" not in shown


@pytest.mark.parametrize(
    ("question", "piped", "message"),
    [
        ("ask", None, "ask"),
        (None, "from a pipe\nof two lines\n", "from a pipe\nof two lines"),
        ("Summarise:", "a text\n", "Summarise:\n\na text"),
        ("ask", "", "ask"),
        (None, None, None),
    ],
)
def test_argument_and_pipe_make_one_message(question: str | None, piped: str | None, message: str | None) -> None:
    assert join_question(question, piped) == message


@pytest.mark.parametrize("piped", ["", " \n"])
def test_an_empty_pipe_is_an_error(piped: str) -> None:
    with pytest.raises(RequestError, match="nothing to answer"):
        join_question(None, piped)
