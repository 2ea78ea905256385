"""The chat in a real terminal: typing, history, completion, Ctrl-C, resizing; on a model that answers from a list."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal_helpers import ROOT, Terminal

TAB, ESCAPE, UP, CTRL_L, CTRL_R = "\t", "\x1b", "\x1b[A", "\x0c", "\x12"


class FakeChat(Terminal):
    """The chat in a terminal, with a model that answers as it is told."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        command = [sys.executable, str(ROOT / "tests" / "fake_chat.py"), str(folder)]
        super().__init__(command, folder, **environment)
        self.shows("/help lists the commands")
        self.ready()

    def anew(self, columns: int = 80, rows: int = 40) -> FakeChat:
        """A new conversation on a blank screen."""
        self.resize(columns, rows)
        self.say("/clear")
        self.screen.history.top.clear()
        self.process.send(CTRL_L)
        self.until(lambda text: text == ">")
        return self

    def ask(self, question: str, answer: str, wait: float = 0.0, each: float = 0.0, until: str = "TTFT") -> str:
        """Have a question answered; the screen when it shows this. Delays are in seconds."""
        self.ready()
        (self.folder / "answer.json").write_text(json.dumps({"answer": answer, "delays": [wait, each]}))
        before = self.text.count(until)
        self.process.send(question + "\r")
        return self.until(lambda text: text.count(until) > before)

    @property
    def asked(self) -> list[str]:
        """What the messages were when the last question was asked."""
        self.ready()
        return list(json.loads((self.folder / "asked.json").read_text()))

    def leave(self) -> None:
        self.ready()
        self.process.sendeof()
        assert self.code() == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[FakeChat]]:
    """To start a program takes longer than most of these tests: one serves them all, unless it is broken."""
    running: list[FakeChat] = []
    yield running
    if running:
        running[0].leave()


@pytest.fixture
def chat(shared: list[FakeChat], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeChat]:
    if not shared:
        shared.append(FakeChat(tmp_path_factory.mktemp("chat")))
    chat = shared.pop()
    yield chat.anew()
    chat.ready()
    assert "Traceback" not in chat.text
    shared.append(chat)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a program for one test alone."""
    return tmp_path


# --- typing ---


def test_a_paste_of_200_lines_is_one_message(chat: FakeChat) -> None:
    pasted = "".join(f"    line {i}\n" for i in range(200))
    chat.process.send(f"\x1b[200~{pasted}\x1b[201~")
    chat.until(lambda text: text.endswith("line 199"))
    (chat.folder / "answer.json").write_text('{"answer": "Long.", "delays": [0, 0]}')
    chat.process.send("\r")
    chat.shows("Long.")
    assert chat.asked == [pasted.rstrip()]


def test_a_backslash_or_alt_enter_begins_another_line(chat: FakeChat) -> None:
    chat.process.send("one\\\r")
    chat.until(lambda text: text.endswith("> one"))
    chat.process.send(f"two{ESCAPE}\rthree")
    chat.until(lambda text: text.endswith("> one\n  two\n  three"))
    (chat.folder / "answer.json").write_text('{"answer": "Yes.", "delays": [0, 0]}')
    chat.process.send("\r")
    chat.shows("Yes.")
    assert chat.asked == ["one\ntwo\nthree"]


def test_history_is_kept_from_run_to_run_and_can_be_searched(folder: Path) -> None:
    chat = FakeChat(folder)
    chat.ask("a question of yesterday", "a")
    chat.ask("漢字 and 🎉", "b")
    chat.leave()
    file = folder / "fastgraph" / "history"
    assert "a question of yesterday" in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o077 == 0

    chat = FakeChat(folder)
    chat.process.send(UP)
    chat.until(lambda text: text.endswith("> 漢字 and 🎉"))
    chat.process.send("\r")
    chat.shows("TTFT")
    assert chat.asked == ["漢字 and 🎉"]
    chat.process.send(f"{CTRL_R}yesterday")
    chat.shows("a question of yesterday")
    chat.process.send("\r")
    chat.shows("> a question of yesterday")
    chat.process.send("\r")
    chat.until(lambda text: text.count("TTFT") == 2)
    assert chat.asked[-1] == "a question of yesterday"
    chat.leave()


def test_without_a_place_for_the_history_and_without_colour_the_chat_works(folder: Path) -> None:
    (folder / "fastgraph").write_text("a file in the way")
    chat = FakeChat(folder, NO_COLOR="1")
    chat.ask("write", "# Title\n\n```python\ndef f(): return 'x'\n```")
    chat.say("/nonsense")
    chat.say("/set x=1")
    chat.leave()
    codes = {int(n) for found in re.findall(rb"\x1b\[([\d;]*)m", chat.raw) for n in found.split(b";") if n}
    assert {code for code in codes if 30 <= code <= 49 or 90 <= code <= 107} <= {39, 49}  # the terminal's own


def test_a_dumb_terminal_gets_plain_text(folder: Path) -> None:
    chat = FakeChat(folder, TERM="dumb")
    assert "**Yes.**" in chat.ask("Works?", "**Yes.**")
    chat.ready()
    chat.process.send("/exit\r")
    assert chat.code() == 0
    assert b"\x1b[" not in chat.raw


def test_commands_files_and_options_are_completed(chat: FakeChat) -> None:
    (chat.folder / "notes of mine.txt").write_text("alpha beta")
    chat.process.send("/re")
    chat.until(lambda text: "/retry" in text and "/read" in text)
    chat.process.send("ad no")
    chat.shows("notes of mine.txt")
    chat.process.send(TAB)
    chat.shows("> /read notes of mine.txt")
    chat.process.send("\r")
    chat.shows("notes of mine.txt, 2 tokens, goes with your next message")
    chat.ready()
    chat.process.send("/set temper")
    chat.shows("temperature=")
    chat.process.send(TAB)
    chat.shows("> /set temperature=")
    chat.process.send("0\r")
    chat.shows("temperature=0 ")


def test_an_unknown_command_is_answered_with_the_nearest(chat: FakeChat) -> None:
    assert "did you mean /retry?" in chat.say("/retyr")


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(chat: FakeChat) -> None:
    chat.ask("count", "one two three four five six", each=0.2, until="two")
    chat.process.send("next question\r")
    chat.until(lambda text: text.count("TTFT") == 2)
    assert "one two three four five six\n" in chat.text
    assert chat.asked[-1] == "next question"


# --- what is shown ---


@pytest.mark.parametrize("columns", [20, 80])
def test_wide_characters_and_narrow_terminals(chat: FakeChat, columns: int) -> None:
    chat.anew(columns)
    answer = "你好世界 " * 8 + "\n\n- 👍🏽 family 👨‍👩‍👧 🎉\n- 한국어\n\n" + "word " * 12 + "\n\nEND"
    chat.ask("漢字?", answer)
    text = chat.ready()
    assert text.count("你好世界") == 8
    assert text.count("한국어") == 1
    assert text.count("word") == 12
    assert "\nEND\n" in text
    assert chat.asked == ["漢字?"]
    assert "list the" in chat.say("/help")
    assert "context" in chat.say("/stats")


def test_a_long_answer_is_wholly_in_the_scrollback_and_once(chat: FakeChat) -> None:
    chat.anew(rows=12)
    code = "".join(f"line_{i} = {i}\n" for i in range(100))
    chat.ask("write", f"Look:\n\n```python\n{code}```\n\nDone.")
    assert re.findall(r"^line_(\d+)", chat.ready(), re.MULTILINE) == [str(i) for i in range(100)]


@pytest.mark.parametrize(("columns", "rows"), [(30, 40), (120, 10)])
def test_a_resize_in_mid_answer_loses_nothing(chat: FakeChat, columns: int, rows: int) -> None:
    words = [f"word{i}" for i in range(60)]
    chat.ask("tell", " ".join(words), each=0.01, until="word20")
    chat.resize(columns, rows)
    chat.shows("TTFT")
    assert list(dict.fromkeys(re.findall(r"word\d+", chat.ready()))) == words
    assert "Yes." in chat.ask("And now?", "Yes.")


def test_thoughts_are_folded_and_can_be_seen_again(chat: FakeChat) -> None:
    chat.ask("think", "<think>\nwell well\n</think>\n\nYes.", each=0.2, until="well well")
    chat.shows("TTFT")
    answered = chat.ready()
    assert "well" not in answered
    assert re.search(r"thought for \d\.\d s\n\nYes\.", answered)
    assert "well well" in chat.say("/think")


# --- Ctrl-C ---


@pytest.mark.parametrize("moment", ["before the first token", "in mid-answer", "in its thoughts"])
def test_ctrl_c_stops_the_answer_only_and_keeps_what_came(chat: FakeChat, moment: str) -> None:
    answer = "<think>hm hm hm hm hm hm</think> no" if "thoughts" in moment else "one two three four five six seven"
    shown = {"before the first token": "…", "in mid-answer": "two", "in its thoughts": "hm hm"}[moment]
    chat.ask("count", answer, wait=1.0 if "before" in moment else 0.0, each=0.3, until=shown)
    chat.process.sendintr()
    stopped = chat.ready()
    assert "stopped" in stopped
    assert "^C" not in stopped
    assert "seven" not in stopped
    assert "Again." in chat.ask("go on", "Again.")
    first, *others = chat.asked
    assert first == ("go on" if "before" in moment else "count")
    if "mid" in moment:
        assert others[0].startswith("one two")
    elif "thoughts" in moment:
        assert others[0].strip().endswith("</think>")


def test_ctrl_c_at_the_prompt_clears_what_was_typed_and_twice_leaves(folder: Path) -> None:
    chat = FakeChat(folder)
    chat.process.send("half a question")
    chat.until(lambda text: text.endswith("half a question"))
    chat.process.sendintr()
    chat.shows("once more leaves")
    chat.say("/help")
    chat.process.sendintr()
    chat.until(lambda text: text.count("once more leaves") == 2 and text.endswith("\n>"))
    chat.process.sendintr()
    assert chat.code() == 0


def test_ctrl_c_in_the_editor_is_the_editors(folder: Path) -> None:
    script = folder / "editor.py"
    script.write_text(
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n"
        "pathlib.Path(sys.argv[1]).write_text('edited')\n"
        "print('editing', flush=True)\n"
        "time.sleep(60)\n"
    )
    chat = FakeChat(folder, EDITOR=f"{sys.executable} {script}")
    chat.ask("first", "one")
    start = time.monotonic()
    chat.ready()
    chat.process.send("/edit\r")
    chat.shows("editing")
    chat.process.sendintr()
    chat.until(lambda text: text.count("TTFT") == 2)
    assert time.monotonic() - start < 50
    assert chat.asked == ["edited"]
    chat.leave()


def test_copy_reaches_the_terminal(chat: FakeChat) -> None:
    chat.ask("write", "```\nhello\n```")
    assert "on the clipboard" in chat.say("/copy")
    assert b"\x1b]52;c;aGVsbG8K\x07" in chat.raw
