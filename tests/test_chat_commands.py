"""What each command of the chat does to the conversation, and what it says; on a model that answers from a list."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_helpers import FakeLLM, contents, converse
from rich.console import Console

from fastgraph.chat import session
from fastgraph.chat.commands import COMMANDS
from fastgraph.chat.conversation import Conversation, parse_options
from fastgraph.chat.session import Chat, Models
from fastgraph.config import EngineConfig
from fastgraph.errors import ModelError, RequestError
from fastgraph.thinking import Thinking

ROOT = Path(__file__).resolve().parent.parent


def test_help_lists_every_command_and_what_it_takes() -> None:
    shown = converse(FakeLLM([]), "/help", width=100)
    for name, command in COMMANDS.items():
        assert f"{name} {command.argument}".strip() in shown
        assert command.help in shown


def test_every_command_is_in_the_documentation_as_it_is() -> None:
    page = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(/\w+)(?: ([^`]+))?` \|", page, re.MULTILINE)
    assert {name: argument.replace("\\|", "|") for name, argument in listed} == {
        name: command.argument for name, command in COMMANDS.items()
    }


@pytest.mark.parametrize("line", ["/clear all", "/retry please", "/undo 3", "/help me", "/copy x", "/stats x"])
def test_an_argument_that_a_command_does_not_take_is_an_error(line: str) -> None:
    llm = FakeLLM(["one", "two"])
    shown = converse(llm, "first", line, "second")
    assert f"error: {line.split()[0]} takes nothing after it" in shown
    assert contents(llm.asked[1]) == ["first", "one", "second"]


@pytest.mark.parametrize("name", ["/save", "/load", "/read"])
def test_an_argument_that_is_missing_is_an_error(name: str) -> None:
    assert f"error: {name} needs more: {name} FILE" in converse(FakeLLM([]), name)


# --- asking again ---


def test_retry_asks_the_last_question_again_in_place_of_its_answer() -> None:
    llm = FakeLLM(["one", "two", "better", "three"])
    converse(llm, "first", "second", "/retry", "third")
    assert contents(llm.asked[2]) == ["first", "one", "second"]
    assert contents(llm.asked[3]) == ["first", "one", "second", "better", "third"]


def test_a_retry_that_is_refused_leaves_the_old_answer() -> None:
    llm = FakeLLM(["one", RequestError("no"), "two"])
    converse(llm, "first", "/retry", "second")
    assert contents(llm.asked[2]) == ["first", "one", "second"]


def test_undo_takes_back_question_and_answer() -> None:
    llm = FakeLLM(["one", "two", "three"])
    shown = converse(llm, "first", "second", "/undo", "third")
    assert "forgotten: second" in shown
    assert contents(llm.asked[2]) == ["first", "one", "third"]


@pytest.mark.parametrize("name", ["/retry", "/undo", "/edit"])
def test_before_anything_was_asked_there_is_nothing_to_do_again(name: str) -> None:
    assert "error: nothing was asked yet" in converse(FakeLLM([]), name)


def editor(tmp_path: Path, body: str) -> str:
    """An editor that does this to the file, of which `text` is the content."""
    program = tmp_path / "my editor.py"
    program.write_text(f"import sys, pathlib\nfile = pathlib.Path(sys.argv[1])\ntext = file.read_text()\n{body}\n")
    return f"{sys.executable} '{program}'"


def test_edit_asks_what_came_back_from_the_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", editor(tmp_path, "file.write_text(text.replace('cond', 'ond\\nline\\n'))"))
    llm = FakeLLM(["one", "two", "new", "three"])
    converse(llm, "first", "second", "/edit", "third")
    assert contents(llm.asked[2]) == ["first", "one", "seond\nline"]
    assert contents(llm.asked[3]) == ["first", "one", "seond\nline", "new", "third"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "nothing was changed"),
        ("file.write_text('  ')", "nothing was changed"),
        ("sys.exit(3)", "ended with code 3: the question is as it was"),
        ("file.write_bytes(b'\\xff')", "is not UTF-8 text"),
    ],
)
def test_an_edit_that_came_to_nothing_asks_nothing(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", editor(tmp_path, body))
    llm = FakeLLM(["one"])
    assert message in converse(llm, "first", "/edit", width=400)
    assert len(llm.asked) == 1


def test_an_editor_that_is_not_there_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "no-such-editor")
    shown = converse(FakeLLM(["one"]), "first", "/edit", width=200)
    assert "error: 'no-such-editor' cannot be run: set EDITOR" in shown
    monkeypatch.setenv("VISUAL", "vi 'x")
    shown = converse(FakeLLM(["one"]), "first", "/edit", width=200)
    assert 'error: "vi \'x" is no command: set EDITOR to an editor (No closing quotation)' in shown


# --- how the model answers ---


def test_the_system_prompt_is_shown_set_and_removed() -> None:
    llm = FakeLLM(["one", "two"])
    shown = converse(llm, "/system", "/system Be brief.\nBe kind.", "first", "/system -", "second")
    assert "there is no system prompt" in shown
    assert "the system prompt: Be brief." in shown
    assert contents(llm.asked[0]) == ["Be brief.\nBe kind.", "first"]
    assert contents(llm.asked[1]) == ["first", "one", "second"]


def test_set_changes_sampling_and_shows_it() -> None:
    llm = FakeLLM(["one", "two"])
    shown = converse(
        llm, "/set temperature=0 stop=END max_tokens=7", "first", "/set temperature= stop=", "second", width=200
    )
    assert "max_tokens=7 temperature=0 top_p=0.9 stop=END" in shown
    assert llm.sampled[0] == {"max_tokens": 7, "temperature": 0, "top_p": 0.9, "stop": "END"}
    assert llm.sampled[1] == {"max_tokens": 7, "temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("temperature=hot", "temperature must be a number from 0, not 'hot'"),
        ("temperature=-1", "temperature must be a number from 0, not -1"),
        ("temprature=1", "unknown sampling parameter temprature; known are"),
        ("temprature=", "unknown sampling parameter temprature; known are"),
        ("n=2", "n cannot be set in a chat"),
        ("logprobs=true top_logprobs=2", "logprobs, top_logprobs cannot be set in a chat"),
        ("temperature 1", "an option is set by KEY=VALUE, like temperature=0.5, not 'temperature 1'"),
        ("temperature=0.5 min_tokens=-1", "min_tokens must be a whole number"),
    ],
)
def test_what_cannot_be_set_is_refused_and_changes_nothing(line: str, message: str) -> None:
    llm = FakeLLM(["one"])
    assert f"error: {message}" in converse(llm, f"/set {line}", "first", width=600)
    assert llm.sampled[0] == {"max_tokens": 999, "temperature": 0.7, "top_p": 0.9}


def test_options_are_read_as_they_are_typed() -> None:
    assert parse_options('temperature=0.5 stop=["a b", "c"]  seed=7 logit_bias={"5": 1}') == {
        "temperature": 0.5,
        "stop": ["a b", "c"],
        "seed": 7,
        "logit_bias": {5: 1},
    }
    assert parse_options("stop=the end  top_p=") == {"stop": "the end", "top_p": None}
    assert parse_options("max-tokens=7 stop-token-ids=[1]") == {"max_tokens": 7, "stop_token_ids": [1]}
    # As Python writes it, too; and what can only be meant in one way.
    assert parse_options("logit_bias={5: -1} ignore_eos=True max_tokens=None top_p=.5") == {
        "logit_bias": {5: -1}, "ignore_eos": True, "max_tokens": None, "top_p": 0.5,
    }  # fmt: skip
    assert parse_options("stop=1 stop_token_ids=5 ignore_eos=true") == {
        "stop": "1", "stop_token_ids": [5], "ignore_eos": True,
    }  # fmt: skip


def test_think_shows_the_last_thoughts_and_switches_thinking() -> None:
    llm = FakeLLM(["<think>hm hm</think>Yes.", "No."], thinking=Thinking("<think>", "</think>", "enable_thinking"))
    shown = converse(llm, "first", "/think", "/think off", "second", "/think", "/think maybe")
    assert "hm hm" in shown
    assert "the model is told not to think" in shown
    assert llm.told[-1] == {"enable_thinking": False}
    assert "came without thoughts" in shown
    assert "error: /think takes on, off, show or fold, not 'maybe'" in shown


def test_a_model_that_cannot_be_switched_says_so() -> None:
    assert "cannot be told whether to think" in " ".join(converse(FakeLLM([]), "/think off").split())


# --- files ---


def test_a_saved_conversation_is_an_openai_request_and_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    shown = converse(FakeLLM(["one 漢", "two"]), "first", "second", f"/save {file}", system="Be brief.", width=300)
    assert f"2 turns in {file}" in shown
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved["model"] == "Fake-1B"
    assert [(m["role"], m["content"]) for m in saved["messages"]] == [
        ("system", "Be brief."),
        ("user", "first"),
        ("assistant", "one 漢"),
        ("user", "second"),
        ("assistant", "two"),
    ]
    llm = FakeLLM(["three"])
    shown = converse(llm, f"/load {file}", "third", width=300)
    assert f"2 turns from {file}" in shown
    assert contents(llm.asked[0]) == ["Be brief.", "first", "one 漢", "second", "two", "third"]


def test_a_list_of_openais_messages_can_be_loaded_and_its_last_question_asked(tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]
    file.write_text(json.dumps([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]))
    llm = FakeLLM(["one"])
    shown = converse(llm, f"/load {file}", "/retry", f"/save {file}", width=300)
    assert "the last question has no answer: What is it? /retry asks it" in shown
    assert contents(llm.asked[0]) == ["Be brief.", "What is it?"]
    assert len(json.loads(file.read_text())["messages"]) == 3


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no messages"),
        ('{"model": "x"}', "has no messages"),
        ('"text"', "has no messages"),
        ([ASSISTANT], "message 0 of .* is of role 'assistant', and 'user' is expected there"),
        ([USER, USER], "message 1 of .* is of role 'user', and 'assistant' is expected there"),
        ([USER, ASSISTANT, {"role": "system", "content": "x"}], "message 2 of .* is of role 'system'"),
        ([USER, {"role": "tool", "content": "x"}], "message 1 of .* is of role 'tool'"),
        ([USER, {"role": "assistant", "tool_calls": []}], "message 1 of .* is not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 of .* is not text"),
        (["text"], "message 0 of .* is of role None"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_and_the_conversation_stays(
    data: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    llm = FakeLLM(["one", "two"])
    shown = converse(llm, "first", f"/load {file}", "second", width=600)
    assert re.search(f"error: .*{message}", shown)
    assert contents(llm.asked[1]) == ["first", "one", "second"]


def test_a_file_that_is_no_conversation_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "thesis.txt"
    file.write_text("years of work")
    assert "is there, and is no conversation" in converse(FakeLLM(["one"]), "first", f"/save {file}", width=300)
    assert file.read_text() == "years of work"


def test_files_that_cannot_be_read_or_written_are_errors(tmp_path: Path) -> None:
    shown = converse(
        FakeLLM([]), f"/load {tmp_path}/no", f"/read {tmp_path}", f"/save {tmp_path}/no/where.json", width=400
    )
    assert len(re.findall(r"error: .* cannot be (?:read|written): \w+", shown)) == 3
    lines = [f"/{command} {name}" for command in ("load", "read", "save") for name in ("~nobody-here/x", "x" * 300)]
    shown = converse(FakeLLM([]), *lines, width=800)
    assert len(re.findall(r"error: .* cannot be (?:read|written): \w+", shown)) == 6


def test_half_a_character_is_not_saved_and_the_file_stays_as_it_was(tmp_path: Path) -> None:
    file, broken = tmp_path / "talk.json", tmp_path / "broken.json"
    broken.write_text(json.dumps([USER, {"role": "assistant", "content": "\ud800"}]))
    file.write_text(json.dumps([USER, ASSISTANT]))
    shown = converse(FakeLLM([]), f"/load {broken}", f"/save {file}", width=400)
    assert "cannot be written: there is half a character in what was said" in shown
    assert json.loads(file.read_text()) == [USER, ASSISTANT]


def test_a_file_that_is_read_goes_once_with_the_next_message(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("alpha beta\ngamma\n")
    llm = FakeLLM(["one", "two"])
    shown = converse(llm, f"/read {file}", "Summarise.", "And now?")
    assert "notes.txt, 3 tokens, goes with your next message" in shown
    assert contents(llm.asked[0]) == ["notes.txt:\n\nalpha beta\ngamma\n\nSummarise."]
    assert contents(llm.asked[1])[-1] == "And now?"


def test_a_question_that_was_refused_leaves_the_file_for_the_next(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("alpha")
    llm = FakeLLM([RequestError("no"), "one"])
    converse(llm, f"/read {file}", "first", "second")
    assert contents(llm.asked[1]) == ["notes.txt:\n\nalpha\n\nsecond"]


def test_clear_drops_a_file_that_was_to_go_with_the_next_message(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("alpha")
    llm = FakeLLM(["one"])
    converse(llm, f"/read {file}", "/clear", "first")
    assert contents(llm.asked[0]) == ["first"]


# --- the rest ---


@pytest.mark.parametrize(
    ("answer", "copied", "what"),
    [
        ("So:\n\n```py\na = 'é'\n```\n\nand\n\n```\nb\n```\ndone", "b\n", "the last code block, 2 characters"),
        ("<think>```\nno\n```</think>just text", "just text", "the last answer, 9 characters"),
    ],
)
def test_copy_hands_the_last_code_block_or_the_answer_to_the_terminals_clipboard(
    answer: str, copied: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    llm = FakeLLM([answer], thinking=Thinking("<think>", "</think>", None))
    shown = converse(llm, "first", "/copy", width=200)
    found = re.search(r"\x1b\]52;c;(.*)\x07", capsys.readouterr().out)
    assert found
    assert base64.b64decode(found[1]).decode() == copied
    assert what in shown


def test_copy_says_when_there_is_nothing_to_copy_or_no_terminal_to_copy_by() -> None:
    shown = converse(FakeLLM(["one"]), "/copy", "first", "/copy")
    assert "error: there is no answer to copy from" in shown
    assert "error: /copy works through the terminal" in shown


def test_stats_count_tokens_context_hits_and_speed() -> None:
    shown = converse(FakeLLM(["one two three", "four"], context=100), "a b c d", "e f g", "/stats", width=100)
    rows = dict(re.findall(r"^(\w+(?: \w+)?)  +(.*?) *$", shown, re.MULTILINE))
    assert rows["context"] == "▰▱▱▱▱▱▱▱ 11% 11 of 100 tokens"
    assert rows["questions"] == "2"
    assert rows["tokens in"] == "14, of which 7 from the prefix cache (50%)"
    assert rows["tokens out"] == "4, at 1.0 tok/s"
    assert rows["TTFT"] == "0.50 s; 0.50 s on average"
    assert rows["pages"] == "5 free, 2 cached, of 9"


def test_stats_before_anything_was_asked() -> None:
    assert "0% 0 of 1000 tokens" in converse(FakeLLM([]), "/stats")


def test_another_model_goes_on_with_the_conversation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = FakeLLM(["one"]), FakeLLM(["two"], context=500)
    second.checkpoint = SimpleNamespace(name="Other-2B")
    other, broken = tmp_path / "other", tmp_path / "broken"
    for folder in (other, broken):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text("{}")
    loaded = {None: first, str(other): second}

    def load(config: EngineConfig) -> Any:
        if config.model not in loaded:
            raise ModelError("it is broken")
        return loaded[config.model]

    monkeypatch.setattr(session, "load", load)
    models = Models(EngineConfig(revision="v1"))
    closed: list[int] = []  # times that the first model was, by then
    lines = iter(["hello", "/model", f"/model {tmp_path}/nowhere", f"/model {broken}", f"/model {other}", "again"])

    def read() -> str:
        closed.append(first.closed)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    console = Console(width=200, record=True)
    Chat(Conversation(models.llm, {}), read, console, models).run()
    shown = console.export_text()
    assert "error: there is no folder or file" in shown
    assert "error: it is broken" in shown
    assert "Other-2B, context 500 tokens" in shown
    assert closed == [0, 0, 0, 0, 1, 2, 2]  # a model that is not there costs nothing
    assert contents(second.asked[0]) == ["hello", "one", "again"]
