"""What the commands share in talking to a terminal, or to a pipe."""

from __future__ import annotations

import os
import sys
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.text import Text

from fastgraph.config import EngineConfig
from fastgraph.errors import RequestError

if TYPE_CHECKING:
    from fastgraph.llm import LLM

_WORTH_A_LINE = 1.0  # seconds after which a phase of loading is named even when it is over

# A model may write anything; on a terminal, control characters other than these would be commands.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def load(config: EngineConfig) -> LLM:
    """Load a model and show what happens meanwhile on stderr, if that is a terminal. Ctrl-C ends the process."""
    with Loading() as loading:
        try:
            loading.tell("importing torch", None)
            from fastgraph.llm import LLM

            return LLM(config, progress=loading.tell)
        except KeyboardInterrupt:
            # The engine's thread may be deep in a compiler or a read, where nothing can interrupt it.
            loading.stop()
            sys.stderr.flush()
            os._exit(130)


class Loading:
    """Shows the phases of loading as they come. `tell` may be called from any thread, one at a time."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._phase, self._since = "", perf_counter()

    def tell(self, phase: str, fraction: float | None) -> None:
        """The phase in words, and the share of it that is done (0..1)."""
        if not self._console.is_terminal:
            return
        if phase != self._phase:
            self.stop()
            self._phase, self._since = phase, perf_counter()
        text = Text(phase if fraction is None else f"{phase} {fraction:.0%}", style="dim")
        if phase.startswith("fetching"):  # the hub shows progress bars of its own, which a spinner would break
            return
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def stop(self) -> None:
        """End the phase; if it was long, leave a line of it."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        took = perf_counter() - self._since
        if self._phase and took > _WORTH_A_LINE:
            self._console.print(Text(f"{self._phase}: {took:.1f} s", style="dim"))
        self._phase = ""

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def write(text: str) -> None:
    """Put a piece of a model's text on stdout now: as it is on a pipe, without control characters on a terminal."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def piped_text() -> str | None:
    """All of stdin, if it is not a terminal. Raises `RequestError` if it is not text."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error}") from error
