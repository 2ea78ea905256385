"""What a person can ask of the chat itself: one function for each command, and the table of them."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from fastgraph.chat.conversation import NOT_IN_A_CHAT, parse_options
from fastgraph.chat.transcript import read_text
from fastgraph.chat.view import gauge, last_code
from fastgraph.config import SamplingParams
from fastgraph.errors import RequestError
from fastgraph.loading.files import typed_path
from fastgraph.terminal import on_interrupt

if TYPE_CHECKING:
    from fastgraph.chat.session import Chat

_OPTIONS = [field.name for field in fields(SamplingParams) if field.name not in NOT_IN_A_CHAT]


@dataclass(frozen=True, slots=True)
class Command:
    argument: str  # as shown: "" takes none, [BRACKETS] may be left out
    help: str
    run: Callable[[Chat, str], None] | None  # gets the argument; None leaves the chat
    words: Iterable[str] | None = ()  # that complete the argument; None: the names of files

    def check(self, name: str, argument: str) -> None:
        """Raises `RequestError` for an argument too many or too few."""
        if argument and not self.argument:
            raise RequestError(f"{name} takes nothing after it")
        if not argument and self.argument and not self.argument.startswith("["):
            raise RequestError(f"{name} needs more: {name} {self.argument}")


def _help(chat: Chat, _: str) -> None:
    table = _table()
    for name, command in COMMANDS.items():
        table.add_row(Text(f"{name} {command.argument}", style="bold"), command.help)
    chat.show(table)
    chat.note(
        "Alt-Enter, or a backslash at the end, begins another line; Ctrl-R searches what was typed before. "
        "Ctrl-C stops an answer, and what came of it is kept."
    )


def _clear(chat: Chat, _: str) -> None:
    chat.conversation.clear()
    chat.attached = []
    chat.note("a new conversation")


def _retry(chat: Chat, _: str) -> None:
    chat.answer(_last_question(chat), again=True)


def _undo(chat: Chat, _: str) -> None:
    question = _last_question(chat)
    chat.conversation.undo()
    chat.note(f"forgotten: {_short(question)}")


def _edit(chat: Chat, _: str) -> None:
    before = _last_question(chat)
    after = edited(before)
    if after.strip() and after != before:
        chat.answer(after, again=True)
    else:
        chat.note("nothing was changed")


def _system(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if argument:
        conversation.system = None if argument == "-" else argument
    chat.note(f"the system prompt: {conversation.system}" if conversation.system else "there is no system prompt")


def _set(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.set(parse_options(argument))
    sampling = {**chat.conversation.llm.sampling_defaults, **chat.conversation.sampling}
    chat.note(" ".join(f"{name}={value}" for name, value in sampling.items()))


def _save(chat: Chat, argument: str) -> None:
    path = typed_path(argument)
    chat.conversation.save(path)
    chat.note(f"{_turns(chat)} in {path}")


def _load(chat: Chat, argument: str) -> None:
    path = typed_path(argument)
    chat.conversation.load(path)
    chat.note(f"{_turns(chat)} from {path}")
    if chat.conversation.question is not None:
        chat.note(f"the last question has no answer: {_short(chat.conversation.question)} /retry asks it")


def _read(chat: Chat, argument: str) -> None:
    path = typed_path(argument)
    text = read_text(path)
    if not text.strip():
        raise RequestError(f"{path} is empty")
    tokenizer = chat.conversation.llm.tokenizer
    assert tokenizer is not None
    chat.attached.append(f"{path.name}:\n\n{text.strip()}")
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    chat.note(f"{path.name}, {tokens} tokens, goes with your next message")


def _copy(chat: Chat, _: str) -> None:
    _, answer = chat.conversation.last_answer
    if not answer:
        raise RequestError("there is no answer to copy from")
    code = last_code(answer)
    text = answer if code is None else code
    if not sys.stdout.isatty():
        raise RequestError("/copy works through the terminal, and stdout is none")
    # OSC 52: the terminal puts it on the clipboard, on this side of an ssh connection too.
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
    sys.stdout.flush()
    what = "the last answer" if code is None else "the last code block"
    chat.note(f"{what}, {len(text)} characters, is on the clipboard if your terminal allows it (OSC 52)")


def _think(chat: Chat, argument: str) -> None:
    if argument in ("on", "off"):
        chat.conversation.think = argument == "on"
        chat.note(f"the model is told {'to think' if argument == 'on' else 'not to think'}")
    elif argument in ("show", "fold"):
        chat.unfold = argument == "show"
        chat.note(f"thoughts {'stay' if chat.unfold else 'are folded when the answer begins'}")
    elif argument:
        raise RequestError(f"/think takes on, off, show or fold, not {argument!r}")
    else:
        thoughts, _ = chat.conversation.last_answer
        chat.show(Text(thoughts.strip() or "the last answer came without thoughts", style="dim italic"))


def _stats(chat: Chat, _: str) -> None:
    conversation, replies = chat.conversation, chat.conversation.replies
    llm = conversation.llm
    longest, used = llm.limits.max_model_len, conversation.context
    stats = llm.stats()
    table = _table()
    table.add_row("context", gauge(used, longest).append(f" {used} of {longest} tokens"))
    if conversation.left_out:
        table.add_row("left out", f"{conversation.left_out // 2} of {len(conversation.messages) // 2} turns")
    if replies:
        prompt, cached = (sum(getattr(r, name) for r in replies) for name in ("prompt_tokens", "cached_tokens"))
        answered, seconds = sum(r.tokens for r in replies), sum(r.decode_seconds for r in replies)
        decoded = sum(max(r.tokens - 1, 0) for r in replies)
        table.add_row("questions", str(len(replies)))
        table.add_row("tokens in", f"{prompt}, of which {cached} from the prefix cache ({cached / prompt:.0%})")
        table.add_row("tokens out", f"{answered}, at {decoded / seconds if seconds > 0 else 0:.1f} tok/s")
        table.add_row(
            "TTFT",
            f"{replies[-1].timing.ttft:.2f} s; {sum(r.timing.ttft for r in replies) / len(replies):.2f} s on average",
        )
    table.add_row("pages", f"{stats['pages_free']} free, {stats['pages_cached']} cached, of {stats['pages_total']}")
    chat.show(table)


def _model(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if argument:
        try:
            chat.models.switch(argument)
        finally:
            conversation.use(chat.models.llm)
    llm = conversation.llm
    chat.note(f"{llm.checkpoint.name}, context {llm.limits.max_model_len} tokens")


COMMANDS = {
    "/help": Command("", "list the commands", _help),
    "/clear": Command("", "begin a new conversation", _clear),
    "/retry": Command("", "have the last question answered again", _retry),
    "/undo": Command("", "forget the last question and its answer", _undo),
    "/edit": Command("", "change the last question in $EDITOR, and ask it again", _edit),
    "/system": Command("[TEXT]", "show or set the system prompt; - removes it", _system),
    "/set": Command(
        "[KEY=VALUE …]", "show or set sampling; KEY= is the default again", _set, [f"{o}=" for o in _OPTIONS]
    ),
    "/save": Command("FILE", "write the conversation as JSON (OpenAI's messages)", _save, None),
    "/load": Command("FILE", "go on with a conversation that was saved", _load, None),
    "/read": Command("FILE", "put a file's text before your next message", _read, None),
    "/copy": Command("", "the last code block, or answer, to the clipboard", _copy),
    "/think": Command(
        "[on|off|show|fold]",
        "show the last thoughts; switch thinking, or its folding",
        _think,
        ("on", "off", "show", "fold"),
    ),
    "/stats": Command("", "tokens, context, prefix cache, speed", _stats),
    "/model": Command("[NAME]", "show the model, or load another", _model, None),
    "/exit": Command("", "leave; so do /quit, Ctrl-D, and Ctrl-C twice", None),
}
ALIASES = {"/quit": "/exit"}


def edited(text: str) -> str:
    """The text as it comes back from the person's editor. Raises `RequestError`."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ("notepad" if os.name == "nt" else "vi")
    try:
        command = shlex.split(editor)
    except ValueError as error:
        raise RequestError(f"{editor!r} is no command: set EDITOR to an editor ({error})") from error
    handle, name = tempfile.mkstemp(suffix=".md", prefix="fastgraph-")
    file = Path(name)
    try:
        with open(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
        with on_interrupt():  # Ctrl-C is the editor's
            code = subprocess.run([*command, name]).returncode
        after = read_text(file).rstrip("\n")
    except OSError as error:
        raise RequestError(f"{editor!r} cannot be run: set EDITOR to an editor ({error.strerror})") from error
    finally:
        file.unlink(missing_ok=True)
    if code:
        raise RequestError(f"{editor} ended with code {code}: the question is as it was")
    return after


def _table() -> Table:
    """Of two columns, in which nothing is cut where it is narrow."""
    return Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))


def _last_question(chat: Chat) -> str:
    question = chat.conversation.last_question
    if question is None:
        raise RequestError("nothing was asked yet")
    return question


def _turns(chat: Chat) -> str:
    turns = len(chat.conversation.messages) // 2
    return f"{turns} turn{'' if turns == 1 else 's'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
