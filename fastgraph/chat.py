"""The chat in a terminal: a conversation, what asks it on, and the commands that steer it."""

from __future__ import annotations

import difflib
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from fastgraph.errors import EngineDied, FastgraphError, RequestError
from fastgraph.terminal import write

try:
    import termios
except ImportError:  # on Windows
    termios = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from fastgraph.control.states import FinishReason
    from fastgraph.llm import LLM, Timing

# Of a model whose generation config does not say how to sample.
DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.9}

_NEARLY_FULL = 0.8  # share of the context from which on it is mentioned
_COMMAND = re.compile(r"/[a-zA-Z?]*$")  # the first word; a path has another slash
_PROMPT = "> "


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a question."""

    finish_reason: FinishReason
    tokens: int  # of the answer
    context: int  # tokens of the whole conversation, this answer included
    context_full: bool  # the answer ended because the context did
    timing: Timing


class Conversation:
    """Messages that a model answers in turn. A question is kept only together with its answer."""

    def __init__(self, llm: LLM, sampling: Mapping[str, Any], system: str | None = None) -> None:
        self.llm = llm
        self.messages: list[dict[str, str]] = []
        self._system = [{"role": "system", "content": system}] if system else []
        defaults = {} if llm.sampling_defaults else DEFAULT_SAMPLING
        self._sampling = {"max_tokens": None, **defaults, **sampling}

    def ask(self, question: str, write: Callable[[str], None]) -> Reply:
        """Have a question answered; `write` gets the pieces of the answer. Ctrl-C ends the answer, and it is kept.

        Raises `RequestError` for a question that cannot be answered, which is then forgotten.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        ids = self.llm.render([*self._system, *asked])
        longest = self.llm.limits.max_model_len
        room = longest - len(ids)
        if room < 1:
            raise RequestError(
                f"the conversation, with this, is {len(ids)} tokens long, and the context is {longest}: "
                f"{'/clear begins a new conversation' if self.messages else 'ask something shorter'}"
            )
        limit = self._sampling["max_tokens"]
        stream = self.llm.stream(ids, **{**self._sampling, "max_tokens": min(limit or room, room)})
        with _on_interrupt(stream.abort):
            for piece in stream:
                write(piece)
        answer = stream.completion
        if answer.text or answer.finish_reason != "abort":
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        full = answer.finish_reason == "length" and len(answer.token_ids) == room
        return Reply(answer.finish_reason, len(answer.token_ids), len(ids) + len(answer.token_ids), full, answer.timing)

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = []


def answer_once(conversation: Conversation, question: str) -> int:
    """Answer one question on stdout; nothing but the answer goes there unless it is a terminal. The exit code."""
    ends = _Endings(write)
    reply = conversation.ask(question, ends.write)
    ends.line()
    if sys.stdout.isatty():
        Console(highlight=False).print(_summary(reply, conversation))
    elif reply.context_full:
        print(_cut(conversation), file=sys.stderr)
    return 130 if reply.finish_reason == "abort" else 0


class Chat:
    """The dialogue with a person at a terminal. `run` returns when they leave."""

    def __init__(self, conversation: Conversation, read: Callable[[], str], console: Console) -> None:
        self._conversation = conversation
        self._read = read  # raises EOFError at the end of input, KeyboardInterrupt on Ctrl-C
        self._console = console
        self._commands: dict[str, tuple[str, Callable[[], bool]]] = {
            "/help": ("list the commands", self._help),
            "/clear": ("begin a new conversation", self._clear),
            "/exit": ("leave; so do /quit, Ctrl-D, and Ctrl-C twice", lambda: False),
        }
        self._aliases = {"/quit": "/exit", "/?": "/help"}

    def run(self) -> None:
        llm = self._conversation.llm
        self._note(f"{llm.checkpoint.name}, context {llm.limits.max_model_len} tokens. /help lists the commands.")
        leaving = False
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                return
            except KeyboardInterrupt as interrupt:
                # The second in a row leaves, unless it was there to clear what had been typed.
                if leaving and not _typed(interrupt):
                    return
                leaving = True
                self._note("Ctrl-C once more leaves.")
                continue
            leaving = False
            if line and not self._obey(line):
                return

    def _obey(self, line: str) -> bool:
        """Do what a line says; False to leave."""
        word = line.split(maxsplit=1)[0]
        if not _COMMAND.match(word):
            self._answer(line)
            return True
        name = self._aliases.get(word.lower(), word.lower())
        if name not in self._commands:
            near = difflib.get_close_matches(word.lower(), [*self._commands, *self._aliases], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            self._note(f"there is no command {word}: {hint}/help lists the commands.")
            return True
        return self._commands[name][1]()

    def _answer(self, question: str) -> None:
        ends = _Endings(write)
        try:
            with _silent_keyboard():
                reply = self._conversation.ask(question, ends.write)
        except EngineDied:
            raise
        except FastgraphError as error:
            ends.line()
            self._console.print(Text(f"error: {error}", style="red"))
            return
        except KeyboardInterrupt:  # before the first step of the answer
            self._conversation.llm.abort()
            self._note("stopped")
            return
        ends.line()
        self._console.print(_summary(reply, self._conversation))

    def _help(self) -> bool:
        for name, (help, _) in self._commands.items():
            self._console.print(Text.assemble((f"{name:8}", "bold"), help))
        self._note("Ctrl-C stops an answer, and what came of it is kept.")
        return True

    def _clear(self) -> bool:
        self._conversation.clear()
        self._note("a new conversation")
        return True

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


def reader() -> Callable[[], str]:
    """What reads a line from the person: prompt-toolkit if it is installed and both ends are a terminal."""
    if not sys.stdout.isatty():
        return _read_plainly
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import ColorDepth
    except ImportError:
        return lambda: input(_PROMPT)
    session: PromptSession[str] = PromptSession()
    depth = ColorDepth.DEPTH_1_BIT if Console().no_color else None

    def read() -> str:
        try:
            return session.prompt(_PROMPT, color_depth=depth)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(session.default_buffer.text) from None

    return read


def _typed(interrupt: KeyboardInterrupt) -> bool:
    """Whether there was text at the prompt, as far as is known."""
    return bool(interrupt.args and interrupt.args[0])


def _read_plainly() -> str:
    """A line from a terminal while stdout, which is not one, is kept for answers."""
    print(_PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


class _Endings:
    """Remembers whether a text has ended its line."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._open = write, False

    def write(self, piece: str) -> None:
        self._open = not piece.endswith("\n")
        self._write(piece)

    def line(self) -> None:
        if self._open:
            self.write("\n")


def _summary(reply: Reply, conversation: Conversation) -> Text:
    """The dim line under an answer."""
    timing, tokens = reply.timing, reply.tokens
    decoding = timing.total - timing.ttft
    parts = ["stopped"] if reply.finish_reason == "abort" else []
    if tokens:
        parts.append(f"TTFT {timing.ttft:.2f} s")
    if tokens > 1 and decoding > 0:
        parts.append(f"{(tokens - 1) / decoding:.1f} tok/s")
    parts.append(f"{tokens} token{'' if tokens == 1 else 's'}")
    longest = conversation.llm.limits.max_model_len
    if reply.context_full:
        parts.append(_cut(conversation))
    elif reply.finish_reason == "length":
        parts.append("cut at max-tokens")
    if not reply.context_full and reply.context >= _NEARLY_FULL * longest:
        parts.append(f"{reply.context} of {longest} tokens of context used: /clear begins anew")
    return Text(" · ".join(parts), style="dim")


def _cut(conversation: Conversation) -> str:
    longest = conversation.llm.limits.max_model_len
    return f"the answer was cut: the context of {longest} tokens is full; /clear begins a new conversation"


@contextmanager
def _on_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Have Ctrl-C do this instead of raising `KeyboardInterrupt` in the middle of something."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _silent_keyboard() -> Iterator[None]:
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


def join_question(question: str | None, piped: str | None) -> str | None:
    """One message of an argument and of what was piped in. None if neither is there.

    Raises `RequestError` when something was piped in, or given, but there is no text in it.
    """
    if question is None and piped is None:
        return None
    parts: Sequence[str] = [part.strip("\n") for part in (question, piped) if part and part.strip()]
    if not parts:
        raise RequestError("there is nothing to answer: the question is empty")
    return "\n\n".join(parts)
