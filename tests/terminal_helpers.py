"""A program in a pseudo-terminal, and the screen that a person would see."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pyte

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120  # seconds, for a machine that is busy with something else

# On a busy machine, threads that wait for each other take many times longer than one alone.
THREADS = {"OMP_NUM_THREADS": "1"}

# Of the person who runs the tests, and not of the terminal that is tested.
_OWN = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM_PROGRAM", "VISUAL", "EDITOR")


class Terminal:
    """Rows that scroll away are kept."""

    def __init__(
        self, command: Sequence[str], state: Path, columns: int = 80, rows: int = 40, **environment: str
    ) -> None:
        """`state` is the folder for what the program remembers from run to run."""
        env = {**os.environ, **THREADS, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        env = {k: v for k, v in env.items() if k not in _OWN} | {"XDG_STATE_HOME": str(state)} | environment
        self.process = pexpect.spawn(
            command[0], [*command[1:]], env=env, cwd=str(state), dimensions=(rows, columns), timeout=PATIENCE
        )
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    @property
    def text(self) -> str:
        """What scrolled away, and what is on the screen."""
        gone = ["".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top]
        return "\n".join(line.rstrip() for line in [*gone, *self.screen.display]).rstrip()

    def until(self, condition: Callable[[str], Any]) -> str:
        deadline = time.monotonic() + PATIENCE
        while not condition(self.text):
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not come; the screen is\n{self.text}")
            try:
                self._feed(self.process.read_nonblocking(1 << 16, timeout=1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert condition(self.text), f"the program ended; the screen is\n{self.text}"
        return self.text

    def shows(self, text: str) -> str:
        return self.until(lambda screen: text in screen)

    def ready(self) -> str:
        """Wait for the prompt."""
        return self.until(lambda text: text.endswith("\n>") or text == ">")

    def say(self, line: str) -> str:
        """Type a line, and wait for the next prompt; what came between."""
        before = self.ready()
        self.process.send(line + "\r")
        self.until(lambda text: len(text) > len(before) + len(line))
        return self.ready()[len(before) :]

    def resize(self, columns: int, rows: int) -> None:
        # pyte forgets the rows at the top that a terminal would scroll away.
        for number in range(self.screen.lines - rows):
            self.screen.history.top.append(self.screen.buffer[number])
        self.screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

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
