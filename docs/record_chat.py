"""Makes docs/chat.svg: a session of `fastgraph chat` with the default model, as a terminal showed it.

PYTHONPATH=tests python docs/record_chat.py
"""

from __future__ import annotations

import io
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text
from terminal_helpers import Terminal

COLUMNS, ROWS = 76, 60
LINES = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "/retyr",
    "/stats",
)


class Screen(pyte.HistoryScreen):
    """pyte has no dim letters: they become grey."""

    def select_graphic_rendition(self, *codes: int, **options: Any) -> None:
        dim = 2 in codes and not {38, 48} & set(codes)
        super().select_graphic_rendition(*(90 if dim and code == 2 else code for code in codes), **options)


def style(letter: Any) -> Style:
    name = letter.fg.replace("brown", "yellow").replace("bright", "bright_")
    color = (
        None if name == "default" else f"#{name}" if len(name) == 6 and name.isalnum() and name != "yellow" else name
    )
    return Style(color=color, bold=letter.bold, italic=letter.italics)


def line_of(letters: list[Any]) -> Text:
    runs = groupby(letters, style)
    return Text.assemble(*(("".join(letter.data for letter in run), look) for look, run in runs))


def main() -> None:
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "fastgraph.cli", "chat", "--temperature", "0"]
        terminal = Terminal(command, Path(state), COLUMNS, ROWS)
        terminal.screen.__class__ = Screen
        terminal.ready()
        for line in LINES:
            terminal.say(line)
        rows = [terminal.screen.buffer[y] for y in range(ROWS)]
        shown = [line_of([row[x] for x in range(COLUMNS)]) for row in rows]
        terminal.process.sendeof()
        terminal.code()
    while not shown[-1].plain.strip(" >"):
        shown.pop()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for text in shown:
        text.rstrip()
        console.print(text, no_wrap=True, crop=False)
    console.save_svg(str(Path(__file__).with_name("chat.svg")), title="fastgraph chat", unique_id="chat")


main()
