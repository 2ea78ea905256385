"""The dialogue with a person at a terminal, or the answer to a single question."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.text import Text

from fastgraph.chat.commands import ALIASES, COMMANDS
from fastgraph.chat.conversation import Conversation, Reply
from fastgraph.chat.view import NEARLY_FULL, gauge, view_for
from fastgraph.config import EngineConfig
from fastgraph.errors import EngineDied, FastgraphError
from fastgraph.terminal import fetch, load, silent_keyboard

_COMMAND = re.compile(r"/[a-zA-Z]*$")  # the first word; a path has another slash


class Models:
    """The model that answers: one at a time, for two may not fit."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.llm = load(config)

    def switch(self, name: str) -> None:
        """Load another model in place of this one, which is taken up again should that fail."""
        # These belong to a model.
        config = replace(self._config, model=name, revision=None, chat_template=None)
        fetch(config)
        self.llm.close()
        try:
            self.llm = load(config)
        except FastgraphError:
            self.llm = load(self._config)
            raise
        self._config = config

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()


def answer_once(conversation: Conversation, question: str) -> int:
    """Answer one question on stdout; nothing but the answer goes there unless it is a terminal. The exit code."""
    console = Console(highlight=False)
    view = view_for(console, unfold=False)
    longest = conversation.llm.limits.max_model_len
    try:
        with silent_keyboard():
            reply = conversation.ask(question, view.show)
    finally:
        view.close()
    if sys.stdout.isatty():
        console.print(summary(reply, longest))
    elif reply.context_full:
        print(_cut(longest), file=sys.stderr)
    return 130 if reply.finish_reason == "abort" else 0


class Chat:
    """The dialogue. `run` returns when the person leaves.

    `read` gives what they type; it raises EOFError at the end of input and KeyboardInterrupt on Ctrl-C, with what had
    been typed if that is known.
    """

    def __init__(
        self,
        conversation: Conversation,
        read: Callable[[], str],
        console: Console,
        models: Models,
    ) -> None:
        self.conversation = conversation
        self.console = console
        self.models = models
        self.attached: list[str] = []  # texts that go with the next question
        self.unfold = False  # thoughts stay when the answer begins
        self._read = read

    def run(self) -> None:
        llm = self.conversation.llm
        self.note(f"{llm.checkpoint.name}, context {llm.limits.max_model_len} tokens. /help lists the commands.")
        leaving = False
        while True:
            try:
                text = self._read().rstrip()
                leaving = False
                if text.strip() and not self._obey(text):
                    return
            except EOFError:
                return
            except KeyboardInterrupt as interrupt:
                # The second in a row leaves, unless it was there to clear what had been typed.
                if leaving and not any(interrupt.args):
                    return
                leaving = True
                self.note("Ctrl-C once more leaves.")

    def answer(self, question: str, *, again: bool = False) -> None:
        """Have a question answered, with what is attached; or `again`, in place of the last one."""
        if not again:
            question = "\n\n".join([*self.attached, question])
        view = view_for(self.console, self.unfold)
        try:
            with silent_keyboard():
                reply = self.conversation.ask(question, view.show, again=again)
        finally:
            view.close()
        if not again:
            self.attached = []  # a question that was refused did not take them along
        if reply.dropped:
            turns, them = ("turn does", "it") if reply.dropped == 1 else (f"{reply.dropped} turns do", "them")
            self.note(f"the oldest {turns} not fit into the context any more, and the model does not see {them}")
        line = summary(reply, self.conversation.llm.limits.max_model_len)
        self.console.print(line.append(_advice(reply, self.conversation)))

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="dim"))

    def show(self, renderable: RenderableType) -> None:
        self.console.print(renderable)

    def _obey(self, text: str) -> bool:
        """Do what a message says; False to leave."""
        try:
            word, _, argument = text.strip().partition(" ")
            if "\n" in word:
                word, _, argument = text.strip().partition("\n")
            if not _COMMAND.match(word):
                self.answer(text.strip("\n"))
                return True
            name = ALIASES.get(word.lower(), word.lower())
            if name not in COMMANDS:
                near = difflib.get_close_matches(word.lower(), [*COMMANDS, *ALIASES], n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                self.note(f"there is no command {word}: {hint}/help lists the commands.")
                return True
            command = COMMANDS[name]
            if command.run is None:
                return False
            command.check(name, argument.strip())
            command.run(self, argument.strip())
        except EngineDied:
            raise
        except FastgraphError as error:
            self.console.print(Text(f"error: {error}", style="red"))
        return True


def summary(reply: Reply, longest: int) -> Text:
    """The dim line under an answer of a model whose context holds `longest` tokens."""
    tokens, seconds = reply.tokens, reply.decode_seconds
    parts = ["stopped"] if reply.finish_reason == "abort" else []
    if tokens:
        parts.append(f"TTFT {reply.timing.ttft:.2f} s")
    if tokens > 1 and seconds > 0:
        parts.append(f"{(tokens - 1) / seconds:.1f} tok/s")
    parts.append(f"{tokens} token{'' if tokens == 1 else 's'}")
    if reply.context_full:
        parts.append(_cut(longest))
    elif reply.finish_reason == "length":
        parts.append("cut at max-tokens")
    return Text(" · ".join([*parts, ""]), style="dim").append_text(gauge(reply.context, longest))


def _cut(longest: int) -> str:
    return f"the answer was cut: the context of {longest} tokens is full"


def _advice(reply: Reply, conversation: Conversation) -> str:
    """What a person can do about a context that is full, or nearly; "" if it is not."""
    longest = conversation.llm.limits.max_model_len
    if reply.context_full and conversation.overflow == "trim":
        return " the next question drops the oldest turns"
    if reply.context < NEARLY_FULL * longest or conversation.overflow == "trim":
        return ""
    return f" {reply.context} of {longest} tokens of context used: /clear begins anew"
