"""How an answer is shown while it comes: plainly, or as markdown on a terminal's screen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import ClassVar, Protocol

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from fastgraph.terminal import harmless, write

_FRAME = 1 / 25  # seconds between two paints
_SHARE = 0.1  # of the time that painting may take: the engine's thread needs the interpreter too
NEARLY_FULL = 0.8  # share of the context from which on it is warned of
_GAUGE = 8  # letters of the gauge
_FOLDED_ROWS = 5  # of thoughts while they come

# HTML, images and addresses for footnotes are text like any other here; the parser would leave them out.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["reference", "image"])
# The beginning of a line that may yet turn out to be text or to change what stands above it.
_UNDECIDED = re.compile(r"[\s>#*+\-=_`~|:\d.)]*")
_OPENING = re.compile(r"(?<!\S)[*`]+$")
_THEME = Theme({"markdown.code": "bold cyan"})  # rich's is on black, which many terminals are not
_STYLES = re.compile(r"\x1b\[[\d;]*m")


class View(Protocol):
    """Shows one answer."""

    def show(self, text: str, thought: bool) -> None:
        """Add a piece."""

    def close(self) -> None:
        """The answer has ended; what comes next begins on a line of its own. Calling it twice is no error."""


def view_for(console: Console, unfold: bool) -> View:
    """Markdown where stdout is a screen that can be drawn on; otherwise the text as it is."""
    if sys.stdout.isatty() and not console.is_dumb_terminal and not console.legacy_windows:
        return ScreenView(console, unfold)
    return PlainView(write)


class PlainView:
    """The answer's text and nothing else: thoughts are no part of it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._open = write, False

    def show(self, text: str, thought: bool) -> None:
        if not thought:
            self._open = not text.endswith("\n")
            self._write(text)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._write("\n")


class ScreenView:
    """Markdown. Finished blocks are printed once and scroll away as any text; the one that is under way is repainted.

    What is repainted is never taller than the screen: rows that leave it at the top are printed for good, too. (Not
    those of a table, whose columns may still change.) Thoughts are shown dim; `unfold` keeps them.
    """

    def __init__(self, console: Console, unfold: bool) -> None:
        self._console, self._unfold = console, unfold
        self._thoughts, self._thinking_since = "", 0.0
        self._source = ""  # markdown whose blocks are not all finished
        self._printed = 0  # rows of it that are printed for good
        self._any = False  # something was printed, and the next block needs a blank row before it
        self._live = 0  # rows that are repainted
        self._width = self._columns
        self._due = 0.0
        self._paint([], self._rows(Text("…", style="dim")))

    def show(self, text: str, thought: bool) -> None:
        if thought:
            self._thinking_since = self._thinking_since or perf_counter()
            self._thoughts += harmless(text)
        else:
            self._source += harmless(text)
        start = perf_counter()
        if start >= self._due:
            self._refresh()
            now = perf_counter()
            self._due = now + max(_FRAME, (now - start) / _SHARE)

    def close(self) -> None:
        self._refresh(final=True)
        self._thoughts = self._source = ""

    def _refresh(self, final: bool = False) -> None:
        if self._columns != self._width:
            # Rows have broken elsewhere, and cannot be told from those that were printed: better twice than never.
            self._width, self._printed = self._columns, 0
        limit = max(self._console.height - 1, 1)
        done: list[str] = []
        if self._thoughts.strip():
            over = final or bool(self._source.strip())
            rows = self._thought_rows(over, limit)
            if not over:
                self._overflow(rows, done, limit)
                self._paint(done, rows)
                return
            done += self._finish(rows)
            self._thoughts = ""
        finished = _blocks(_PARSER.parse(self._source if final else self._source[: self._source.rfind("\n") + 1]))
        unfinished = [] if final else finished[-1:]
        for block in finished[: len(finished) - len(unfinished)]:
            done += self._finish(self._block_rows(block))
        if unfinished and len(finished) > 1:
            begins = unfinished[0][0].map
            assert begins is not None
            self._source = "".join(self._source.splitlines(keepends=True)[begins[0] :])
        tail = [] if final else self._tail()
        rows = [row for i, block in enumerate(tail) for row in self._block_rows(block, later=i > 0)][self._printed :]
        if any(block[0].type == "table_open" for block in tail):
            rows = rows[-limit:]
        self._overflow(rows, done, limit)
        self._paint(done, rows)

    def _tail(self) -> list[list[Token]]:
        """The blocks under way, as far as it is decided what they are."""
        head, newline, line = self._source.rpartition("\n")
        if _UNDECIDED.fullmatch(line):
            return _blocks(_PARSER.parse(head + newline))
        blocks = _blocks(_PARSER.parse(self._source))
        if not blocks or blocks[-1][0].type in ("fence", "code_block"):
            return blocks
        # Bold and code that have begun look so from their first letter on.
        line = _OPENING.sub("", line)
        if line.count("`") % 2:
            line += "`"
        if line.count("**") % 2:
            line = line.rstrip(" *") + "**"
        return _blocks(_PARSER.parse(head + newline + line))

    def _finish(self, rows: list[str]) -> list[str]:
        """Of a block's rows, those that were not printed before."""
        fresh = rows[self._printed :]
        self._printed = max(self._printed - len(rows), 0)
        self._any = True
        return fresh

    def _overflow(self, rows: list[str], done: list[str], limit: int) -> None:
        """Move the rows that do not fit on the screen from those that are repainted to those that are printed."""
        excess = max(len(rows) - limit, 0)
        done += rows[:excess]
        del rows[:excess]
        self._printed += excess

    def _thought_rows(self, over: bool, limit: int) -> list[str]:
        thoughts = self._thoughts.strip()
        if over and not self._unfold:
            seconds = perf_counter() - self._thinking_since
            return self._rows(Text(f"thought for {seconds:.1f} s", style="dim"))
        if self._unfold:
            return self._rows(Text(thoughts, style="dim italic"))[0 if over else self._printed :]
        # No more than can be seen: thoughts may be long.
        end = thoughts[-_FOLDED_ROWS * self._width :]
        return self._rows(Text(end, style="dim italic"))[-min(_FOLDED_ROWS, limit) :]

    def _block_rows(self, block: list[Token], later: bool = False) -> list[str]:
        rows = self._rows(_Markdown(block))
        return ["", *rows] if self._any or later else rows

    @property
    def _columns(self) -> int:
        # The last one stays free: where a row that fills it ends, terminals differ.
        return max(self._console.width - 1, 1)

    def _rows(self, renderable: RenderableType) -> list[str]:
        """As text with styles, without blank rows around it and without the spaces that rows are filled up with."""
        with self._console.use_theme(_THEME), self._console.capture() as capture:
            self._console.print(renderable, width=self._columns)
        rows = [row.rstrip(" ") for row in capture.get().split("\n")]
        seen = [number for number, row in enumerate(rows) if _STYLES.sub("", row).strip()]
        return rows[seen[0] : seen[-1] + 1] if seen else []

    def _paint(self, done: Sequence[str], live: Sequence[str]) -> None:
        """Put rows in the place of those that were live: some to stay, and the new live ones."""
        up = f"\x1b[{self._live - 1}A" if self._live > 1 else ""
        # A row is erased before it is written, so that no terminal erases the end of one that fills it. Live rows must
        # not wrap, or the next paint would begin in the wrong place.
        out = [f"\r{up}", *(f"\x1b[K{row}\n" for row in done), "\x1b[?7l"]
        out += ["\n".join(f"\x1b[K{row}" for row in live), "\x1b[J\x1b[?7h"]
        self._live = len(live)
        # In one piece, which terminals show at once.
        self._console.file.write("\x1b[?2026h" + "".join(out) + "\x1b[?2026l")
        self._console.file.flush()


def gauge(used: int, limit: int) -> Text:
    """How full the context is, as a bar and in percent."""
    share = min(used / limit, 1.0)
    full = round(share * _GAUGE)
    style = "red" if share == 1 else "yellow" if share >= NEARLY_FULL else "dim"
    return Text(f"{'▰' * full}{'▱' * (_GAUGE - full)} {share:.0%}", style=style)


def last_code(markdown: str) -> str | None:
    """The last code block of a text."""
    blocks = [token.content for token in _PARSER.parse(markdown) if token.type in ("fence", "code_block")]
    return blocks[-1] if blocks else None


def _blocks(tokens: Sequence[Token]) -> list[list[Token]]:
    """The outermost blocks, each with all that is in it."""
    blocks: list[list[Token]] = [[]]
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":  # models write verses, and code without fences: their lines stay lines
                child.type = "hardbreak"
        blocks[-1].append(token)
        if token.level == 0 and token.nesting <= 0:
            blocks.append([])
    return blocks[:-1]


class _Heading(Heading):
    """On the left, as the text below it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Code(CodeBlock):
    """Between its fences, which tell it from text where there are no colours, and not indented, to be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        language = "" if self.lexer_name == "text" else self.lexer_name
        yield Text(f"```{language}", style="dim")
        yield Syntax(str(self.text).rstrip("\n"), self.lexer_name, theme=self.theme, word_wrap=True)
        yield Text("```", style="dim")


class _Markdown(Markdown):
    """Blocks that are parsed already, in the terminal's own colours and with the addresses of links to be read."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = tokens
