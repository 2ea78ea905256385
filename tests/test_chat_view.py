"""An answer on the screen while it comes: nothing is lost, nothing stays twice, however the pieces fall."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fastgraph.chat import view
from fastgraph.chat.view import PlainView, ScreenView, gauge, last_code, view_for


class Screen:
    """A terminal with its scrollback, and a view that draws on it."""

    def __init__(self, columns: int = 40, rows: int = 12, unfold: bool = False, **console: Any) -> None:
        self.raw = ""
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._screen.set_mode(pyte.modes.LNM)  # as a terminal's line discipline has it
        self._stream = pyte.Stream(self._screen)
        options = {"color_system": "256", **console}
        self.console = Console(file=_Feed(self), force_terminal=True, width=columns, height=rows, **options)  # type: ignore[arg-type]
        self.view = ScreenView(self.console, unfold)

    def feed(self, text: str) -> None:
        self.raw += text
        self._stream.feed(text)

    def resize(self, columns: int, rows: int) -> None:
        # pyte forgets the rows at the top that a terminal would scroll away.
        for number in range(self._screen.lines - rows):
            self._screen.history.top.append(self._screen.buffer[number])
        self._screen.resize(rows, columns)
        self.console.size = (columns, rows)  # type: ignore[assignment]

    def show(self, text: str, step: int = 3, thought: bool = False) -> None:
        for start in range(0, len(text), step):
            self.view.show(text[start : start + step], thought)

    @property
    def visible(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """What scrolled away, and what is on the screen."""
        gone = ["".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*gone, *self._screen.display]).rstrip()


class _Feed(io.StringIO):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def write(self, text: str) -> int:
        self._screen.feed(text)
        return len(text)


@pytest.fixture(autouse=True)
def paints_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "_FRAME", 0.0)
    monkeypatch.setattr(view, "_SHARE", 1e9)


def shown(text: str, step: int = 3, **options: Any) -> str:
    screen = Screen(**options)
    screen.show(text, step)
    screen.view.close()
    screen.view.close()
    return screen.text


ANSWER = """# A title

Some **bold** text with `code`, and enough of it to be wrapped over two or three rows.

- one
- two
  - nested

> a quotation

1. first
2. second

```python
def f(x):
    return x + 1  # a comment
```

| name | number |
|------|--------|
| one  | 1      |

The end: 你好，世界 🎉 done.
"""


def test_markdown_is_rendered() -> None:
    text = shown(ANSWER, columns=60, rows=50)
    assert text.startswith("A title\n\nSome bold text with code, and enough")
    assert " • two\n    • nested\n" in text
    assert " 1 first\n 2 second\n" in text
    assert "```python\ndef f(x):\n    return x + 1  # a comment\n```\n" in text  # as it is copied from the screen
    assert re.search(r"name +number *\n[ ─━]+\n one +1", text)
    assert text.endswith("The end: 你好，世界 🎉 done.")


@pytest.mark.parametrize("step", [1, 2, 7, 50])
@pytest.mark.parametrize(("columns", "rows"), [(20, 5), (40, 12), (80, 60)])
def test_how_the_pieces_fall_and_how_small_the_screen_is_changes_nothing(step: int, columns: int, rows: int) -> None:
    assert shown(ANSWER, step, columns=columns, rows=rows) == shown(ANSWER, 10**6, columns=columns, rows=500)


@pytest.mark.parametrize(
    "block",
    [
        "```\n" + "".join(f"line {i}\n" for i in range(100)) + "```\n",
        "```\n" + "".join(f"line {i}\n" for i in range(100)),  # and the answer ends in the middle of it
        "".join(f"- line {i}\n" for i in range(100)),
        "".join(f"line {i} " for i in range(100)),
        "| a |\n|---|\n" + "".join(f"| line {i} |\n" for i in range(100)),
        "".join(f"line {i}\n\n" for i in range(100)),
    ],
    ids=["code", "open code", "list", "paragraph", "table", "paragraphs"],
)
def test_a_block_longer_than_the_screen_is_wholly_in_the_scrollback_and_once(block: str) -> None:
    found = re.findall(r"line\s+(\d+)", shown(block, step=15, columns=30, rows=10))
    assert found == [str(i) for i in range(100)]


def test_code_can_be_read_from_the_scrollback_before_its_end() -> None:
    screen = Screen(rows=10)
    screen.show("```\n" + "".join(f"line {i}\n" for i in range(50)))
    assert re.findall(r"line (\d+)", screen.text) == [str(i) for i in range(50)]


def test_the_cursor_never_goes_above_the_screen() -> None:
    screen = Screen(rows=8)
    screen.show(ANSWER + ANSWER, step=1)
    assert max(int(up) for up in re.findall(r"\x1b\[(\d+)A", screen.raw)) < 8


def test_each_paint_is_one_write_between_marks_that_make_it_appear_at_once() -> None:
    screen = Screen()
    screen.show("some text that comes in pieces")
    paints = screen.raw.split("\x1b[?2026h")[1:]
    assert len(paints) >= 10
    assert all(paint.endswith("\x1b[?2026l") for paint in paints)


def test_html_is_text() -> None:
    text = shown("Use <b>this</b> tag.\n\n<div class='x'>\nhello\n</div>\n", columns=60)
    assert text == "Use <b>this</b> tag.\n\n<div class='x'>\nhello\n</div>"


def test_the_lines_of_a_verse_stay_lines() -> None:
    assert (
        shown("Roses are red\nViolets are blue\n\n- one\n  two\n")
        == "Roses are red\nViolets are blue\n\n • one\n   two"
    )


def test_the_address_of_a_link_can_be_read() -> None:
    assert shown("See [1].\n\n[1]: https://pytorch.org\n", columns=60) == "See [1].\n\n[1]: https://pytorch.org"
    assert "https://pytorch.org" in shown("See [PyTorch](https://pytorch.org).", columns=60)


def test_a_models_control_characters_do_not_reach_the_terminal() -> None:
    screen = Screen()
    screen.show("a\x1b[2Jb\x07c\x9b31md\r", step=100)
    screen.show("thought\x1b[2J", step=100, thought=True)
    screen.view.close()
    assert "\x1b[2J" not in screen.raw
    assert not {"\x07", "\x9b"} & set(screen.raw)


def test_a_line_that_is_not_decided_does_not_change_what_stands_above_it() -> None:
    screen = Screen()
    screen.show("a paragraph\n")
    before = screen.text
    screen.show("-")  # a heading, if the line ended here
    assert screen.text == before
    screen.show(" one\n")
    assert screen.text == "a paragraph\n\n • one"


@pytest.mark.parametrize(("mark", "code"), [("**", "1"), ("`", "1;36")])
def test_bold_and_code_look_so_before_they_end(mark: str, code: str) -> None:
    screen = Screen()
    for letter in f"some {mark}words here{mark} and more":
        screen.view.show(letter, False)
        assert mark not in screen.text
    assert f"\x1b[{code}mwo\x1b" in screen.raw
    assert screen.text == "some words here and more"


@pytest.mark.parametrize(("columns", "rows"), [(20, 12), (60, 12), (40, 5), (40, 30)])
def test_nothing_is_lost_when_the_terminal_is_resized_in_mid_answer(columns: int, rows: int) -> None:
    words = [f"word{i}" for i in range(160)]
    screen = Screen()
    text = "```\n" + "\n".join(words[:80]) + "\n```\n\n" + " ".join(words[80:])
    screen.show(text[: len(text) // 3], step=7)
    screen.resize(columns, rows)
    screen.show(text[len(text) // 3 :], step=7)
    screen.view.close()
    found = re.findall(r"word\d+", screen.text)
    assert list(dict.fromkeys(found)) == words
    assert len(found) < 1.5 * len(words)


def test_a_screen_of_one_row_works() -> None:
    assert shown("one\n\ntwo\n\nthree", columns=20, rows=1).split() == ["one", "two", "three"]


def test_no_background_is_painted_whatever_the_terminals_is() -> None:
    screen = Screen()
    screen.show(ANSWER, step=10**6)
    screen.view.close()
    codes = {int(n) for found in re.findall(r"\x1b\[([\d;]*)m", screen.raw) for n in found.split(";") if n}
    assert not codes & {*range(40, 49), *range(100, 108)}


def test_without_colour_there_is_none() -> None:
    screen = Screen(no_color=True)
    screen.show(ANSWER)
    screen.view.close()
    assert not re.search(r"\x1b\[[\d;]*\b(3\d|9\d)m", screen.raw)


WORDS = st.sampled_from(
    ["word", "**bold**", "*", "`code`", "漢字", "🎉", "<b>", "1.", "#", "-", "|", "a_b_c", "[x](y)", "---", "===", ">"]
)
LINES = st.lists(
    st.one_of(
        st.lists(WORDS, min_size=1, max_size=12).map(" ".join),
        st.sampled_from(
            ["", "", "```", "```py", "| a | b |", "|---|---|", "- item", "  - nested", "3. three", "[x]: y", "    x"]
        ),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(LINES, st.integers(1, 9), st.integers(12, 40))
def test_any_markdown_looks_in_the_end_as_if_it_had_come_at_once(lines: list[str], step: int, columns: int) -> None:
    text = "\n".join(lines)
    assert shown(text, step, columns=columns, rows=200) == shown(text, 10**6, columns=columns, rows=200)


# --- thoughts ---


def test_thoughts_are_seen_while_they_come_and_folded_when_the_answer_begins() -> None:
    screen = Screen(rows=20)
    screen.show("".join(f"idea {i}\n" for i in range(30)), thought=True)
    assert screen.visible[:5] == [f"idea {i}" for i in range(25, 30)]
    assert "\x1b[2;3m" in screen.raw  # dim
    screen.show("The answer.", step=20)
    screen.view.close()
    assert re.fullmatch(r"thought for \d+\.\d s\n\nThe answer\.", screen.text)


def test_unfolded_thoughts_stay_whole() -> None:
    screen = Screen(rows=8, unfold=True)
    screen.show("".join(f"idea {i}\n" for i in range(30)), thought=True)
    screen.show("The answer.")
    screen.view.close()
    assert screen.text == "\n".join(f"idea {i}" for i in range(30)) + "\n\nThe answer."


def test_empty_thoughts_are_not_mentioned() -> None:
    screen = Screen()
    screen.show("\n\n", thought=True)
    screen.show("The answer.")
    screen.view.close()
    assert screen.text == "The answer."


def test_an_answer_that_never_came_leaves_no_trace() -> None:
    screen = Screen()
    assert screen.text == "…"
    screen.view.close()
    assert screen.text == ""


# --- elsewhere ---


def test_a_pipe_gets_the_text_as_it_is_and_no_thoughts() -> None:
    written: list[str] = []
    plain = PlainView(written.append)
    pieces: Iterable[tuple[str, bool]] = [("hm", True), ("**a** ", False), ("b", False)]
    for text, thought in pieces:
        plain.show(text, thought)
    plain.close()
    plain.close()
    assert "".join(written) == "**a** b\n"


def test_only_a_screen_that_can_be_drawn_on_is_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert isinstance(view_for(Console(file=io.StringIO(), force_terminal=True), False), ScreenView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(view_for(Console(file=io.StringIO(), force_terminal=True), False), PlainView)
    monkeypatch.undo()
    assert isinstance(view_for(Console(file=io.StringIO()), False), PlainView)


def test_the_last_code_block_is_found() -> None:
    assert last_code("```py\na = 1\n```\n\ntext\n\n~~~\nb\n\nc\n~~~\nend") == "b\n\nc\n"
    assert last_code("no `code` block") is None


def test_the_gauge_shows_how_full_the_context_is() -> None:
    assert [gauge(used, 100).plain for used in (0, 50, 100, 120)] == [
        "▱▱▱▱▱▱▱▱ 0%",
        "▰▰▰▰▱▱▱▱ 50%",
        "▰▰▰▰▰▰▰▰ 100%",
        "▰▰▰▰▰▰▰▰ 100%",
    ]
    assert [str(gauge(used, 100).style) for used in (50, 85, 100)] == ["dim", "yellow", "red"]
