"""What the commands share in talking to a terminal, or to a pipe."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.text import Text

from fastgraph.config import EngineConfig
from fastgraph.errors import RequestError

try:
    import termios
except ImportError:  # on Windows
    termios = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from fastgraph.llm import LLM

_WORTH_A_LINE = 1.0  # seconds after which a phase of loading is named even when it is over
_WORTH_A_LINE_IN_A_LOG = 2.0  # so that a script whose model is there at once says nothing

# A model may write anything; on a terminal, control characters other than these would be commands.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def load(config: EngineConfig) -> LLM:
    """Load a model and show what happens meanwhile on stderr. Ctrl-C ends the process."""
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


def fetch(config: EngineConfig) -> None:
    """Bring a model to the disk while another may still answer. Raises `ModelError` if there is no such model."""
    from fastgraph.device.builder import dtype_name, settle_device, settle_dtype
    from fastgraph.loading.checkpoint import open_checkpoint

    with Loading() as loading:
        open_checkpoint(config, dtype_name(settle_dtype(config, settle_device(config))), loading.tell)


class Loading:
    """Shows the phases of loading on stderr as they come. `tell` may be called from any thread, one at a time.

    A terminal shows the phase of the moment. In a log, which must not fill up, a phase that is not over soon has a line
    when it begins to last and another at its end.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._waiting: threading.Timer | None = None  # to tell a log of the phase
        self._phase, self._since = "", perf_counter()

    def tell(self, phase: str, fraction: float | None) -> None:
        """The phase in words, and the share of it that is done (0..1)."""
        if phase != self._phase:
            self.stop()
            self._phase, self._since = phase, perf_counter()
            if not self._console.is_terminal:
                self._waiting = threading.Timer(_WORTH_A_LINE_IN_A_LOG, self._log, [f"{phase} ..."])
                self._waiting.daemon = True
                self._waiting.start()
        # The hub shows progress bars of its own, which a spinner would break.
        if not self._console.is_terminal or phase.startswith("fetching"):
            return
        text = Text(phase if fraction is None else f"{phase} {fraction:.0%}", style="dim")
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
        done = f"{self._phase}: {took:.1f} s"
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
            waiting.join()  # it may be writing
            if took > _WORTH_A_LINE_IN_A_LOG:
                self._log(done)
        elif self._phase and took > _WORTH_A_LINE:
            self._console.print(Text(done, style="dim"))
        self._phase = ""

    def _log(self, line: str) -> None:
        print(f"fastgraph: {harmless(line)}", file=self._console.file, flush=True)

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def harmless(text: str) -> str:
    """A model's text, with no commands to a terminal in it."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Put a piece of a model's text on stdout now: as it is on a pipe, without control characters on a terminal."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def piped_text() -> str | None:
    """All of stdin, if it is not a terminal. Raises `RequestError` if it is not text."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text: {error}") from error


class Interrupt:
    """Remembers a Ctrl-C, and calls what there is to call."""

    def __init__(self) -> None:
        self._came = False
        self._action: Callable[[], None] | None = None

    def calls(self, action: Callable[[], None]) -> None:
        """From now on; at once if Ctrl-C came before."""
        self._action = action
        if self._came:
            action()

    def come(self, *_: object) -> None:
        self._came = True
        if self._action is not None:
            self._action()

    def listen(self, signals: socket.socket) -> None:
        with signals:
            while numbers := signals.recv(64):
                if signal.SIGINT in numbers:
                    self.come()


@contextmanager
def on_interrupt() -> Iterator[Interrupt]:
    """Meanwhile Ctrl-C does not raise `KeyboardInterrupt` in the middle of something."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.come)
    # The main thread runs this when it wakes, and a signal that comes just before it falls asleep does not wake it: it
    # could sleep through the whole reading of a long prompt. So another thread hears of signals, too.
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    fd = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=interrupt.listen, args=(ours,), daemon=True).start()
    try:
        yield interrupt
    finally:
        signal.set_wakeup_fd(fd)
        pythons.close()
        signal.signal(signal.SIGINT, before)


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keep what is typed meanwhile out of an answer: it waits for the next prompt. Ctrl-C works as ever."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
