"""Where the person types: a line or several, with history and completion where the terminal can."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fastgraph.chat.commands import COMMANDS

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = "> "


def reader() -> Callable[[], str]:
    """What reads a message from the person: prompt-toolkit if it is installed and the terminal can move its cursor.

    Raises EOFError at the end of input, and KeyboardInterrupt, with the text that was typed so far, on Ctrl-C.
    """
    if not sys.stdout.isatty():
        return _read_plainly
    try:
        session = None if os.environ.get("TERM") in ("dumb", "unknown") else _session()
    except ImportError:
        session = None
    if session is None:
        return lambda: input(PROMPT)

    def read() -> str:
        try:
            return session.prompt(PROMPT, prompt_continuation=" " * len(PROMPT))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(session.default_buffer.text) from None

    return read


def history_file() -> Path:
    """What was typed before: in XDG_STATE_HOME/fastgraph, or in ~/.local/state/fastgraph."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "state") / "fastgraph" / "history"


def _read_plainly() -> str:
    """A line from a terminal while stdout, which is not one, is kept for answers."""
    print(PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.output import ColorDepth

    session: PromptSession[str] = PromptSession(
        history=_history(),
        completer=_completer(),
        # While a command is typed. Otherwise on Tab, so that no room for a menu is kept free under every question.
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        multiline=True,  # a paste of many lines is one message
        key_bindings=_keys(),
        color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
    )
    return session


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))  # for nobody else's eyes
    except OSError:
        return InMemoryHistory()
    return FileHistory(file)


def _keys() -> KeyBindings:
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # and not searching the history

    @keys.add("enter", filter=typing)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer() -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class CommandCompleter(Completer):
        def __init__(self) -> None:
            self._files = PathCompleter(expanduser=True)

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            name, space, argument = text.partition(" ")
            if not text.startswith("/") or "\n" in text:
                return
            if not space:
                for command_name, command in COMMANDS.items():
                    if command_name.startswith(name.lower()):
                        yield Completion(command_name, -len(text), display_meta=command.help)
                return
            words = COMMANDS[name.lower()].words if name.lower() in COMMANDS else ()
            if words is None:
                argument = argument.lstrip()
                yield from self._files.get_completions(Document(argument, len(argument)), complete_event)
            else:
                last = argument.rpartition(" ")[2]
                yield from (Completion(word, -len(last)) for word in words if word.startswith(last))

    return CommandCompleter()
