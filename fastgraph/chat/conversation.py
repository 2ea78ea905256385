"""A conversation: what was said, what fits into the context, and how the next question is answered."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from fastgraph.chat.transcript import read_messages, write_messages
from fastgraph.config import SamplingParams
from fastgraph.errors import RequestError
from fastgraph.terminal import on_interrupt
from fastgraph.thinking import ThoughtSplitter

if TYPE_CHECKING:
    from fastgraph.control.states import FinishReason
    from fastgraph.llm import LLM, Timing

Overflow = Literal["stop", "trim"]
Show = Callable[[str, bool], None]  # gets the pieces of an answer, each with whether it is a thought

# Of a model whose generation config does not say how to sample.
DEFAULT_SAMPLING = {"temperature": 0.7, "top_p": 0.9}

# Trimming leaves this share of the context for the answer. Dropping turns is rare then, and each time the rest of the
# history has to be computed again, for it no longer begins as what the prefix cache holds.
_ROOM = 0.25

NOT_IN_A_CHAT = ("n", "logprobs", "top_logprobs")  # of the sampling parameters: an answer is one text here


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a question."""

    finish_reason: FinishReason
    tokens: int  # of the answer
    prompt_tokens: int  # of the conversation with the question
    cached_tokens: int  # of those, the ones that were not computed again
    context_full: bool  # the answer ended because the context did
    dropped: int  # turns that did not fit any more, and were left out for the first time
    timing: Timing

    @property
    def context(self) -> int:
        """Tokens of the whole conversation, this answer included."""
        return self.prompt_tokens + self.tokens

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.timing.total - self.timing.ttft


class Conversation:
    """Messages that a model answers in turn. A question stands among them only together with its answer."""

    def __init__(
        self,
        llm: LLM,
        sampling: Mapping[str, Any],
        system: str | None = None,
        overflow: Overflow = "stop",
        think: bool | None = None,
    ) -> None:
        """`think` tells a model that can do both whether to think; None leaves it to its chat template.

        Raises `RequestError` if the model has no such choice.
        """
        self.llm = llm
        self.messages: list[dict[str, str]] = []  # of the user and of the assistant, in turn
        self.question: str | None = None  # the last one asked, if it has no answer
        self.system = system
        self.overflow: Overflow = overflow
        self.left_out = 0  # messages at the beginning that do not fit any more, and are not sent
        self.replies: list[Reply] = []
        self._sampling = dict(sampling)
        self._think: bool | None = None
        if think is not None:
            self.think = think

    # --- how the model answers ---

    def use(self, llm: LLM) -> None:
        """Go on with another model, whose context may hold more."""
        self.llm, self.left_out = llm, 0

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options of the next answer, beside the model's own defaults."""
        return {"max_tokens": None, **({} if self.llm.sampling_defaults else DEFAULT_SAMPLING), **self._sampling}

    def set(self, options: Mapping[str, Any]) -> None:
        """Change sampling options; None is the default again. Raises `RequestError`, and changes nothing, if wrong."""
        useless = [name for name in options if name in NOT_IN_A_CHAT]
        if useless:
            raise RequestError(f"{', '.join(useless)} cannot be set in a chat: an answer is one text")
        known = {field.name for field in fields(SamplingParams)}
        # An unknown name stays, to be refused.
        changed = {name: v for name, v in {**self._sampling, **options}.items() if v is not None or name not in known}
        SamplingParams.of(self.llm.sampling_defaults, changed)
        self._sampling = changed

    @property
    def think(self) -> bool | None:
        return self._think

    @think.setter
    def think(self, think: bool) -> None:
        thinking = self.llm.thinking
        if thinking is None or thinking.switch is None:
            raise RequestError(
                f"{self.llm.checkpoint.name} cannot be told whether to think: its chat template "
                f"{'has no switch for it' if thinking else 'knows of no thoughts'}"
            )
        self._think = think

    # --- what was said ---

    @property
    def last_question(self) -> str | None:
        if self.question is not None or not self.messages:
            return self.question
        return self.messages[-2]["content"]

    @property
    def last_answer(self) -> tuple[str, str]:
        """Thoughts and answer of the last turn."""
        text = self.messages[-1]["content"] if self.messages else ""
        return self.llm.thinking.split(text) if self.llm.thinking else ("", text)

    @property
    def context(self) -> int:
        """Tokens of what would be sent again with the next question."""
        return len(self._render(self.messages[self.left_out :])) if self.messages else 0

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages, self.question, self.left_out = [], None, 0

    def undo(self) -> None:
        """Forget the last question, and its answer if it has one."""
        if self.question is None:
            del self.messages[-2:]
        self.question, self.left_out = None, 0

    def ask(self, question: str, show: Show, *, again: bool = False) -> Reply:
        """Have a question answered. Ctrl-C ends the answer, and what came of it is kept.

        With `again` the question and its answer take the place of the last ones. Raises `RequestError` for a question
        that cannot be answered; the conversation is then as before.
        """
        history = self.messages[:-2] if again and self.question is None else self.messages
        with on_interrupt() as interrupt:
            left_out, ids = self._fit(history, question)
            room = self.llm.limits.max_model_len - len(ids)
            sampling = self.sampling
            sampling["max_tokens"] = min(sampling["max_tokens"] or room, room)
            thinking = self.llm.thinking
            begun = thinking is not None and self._prompt_ends_with(ids, thinking.opens)
            splitter = ThoughtSplitter(thinking, begun)
            stream = self.llm.stream(ids, **sampling)
            interrupt.calls(stream.abort)
            for piece in stream:
                for text, thought in splitter.push(piece):
                    show(text, thought)
            unfinished = splitter.in_thoughts
            for text, thought in splitter.finish():
                show(text, thought)
            answer = stream.completion
        if answer.text or answer.finish_reason != "abort":
            content = answer.text
            if thinking is not None:
                # Closed and opened, so that the template finds the thoughts and treats them as it wants.
                content = f"{thinking.opens}\n" * begun + content + f"\n{thinking.closes}\n\n" * bool(unfinished)
            asked = {"role": "user", "content": question}
            self.messages = [*history, asked, {"role": "assistant", "content": content}]
            self.question = None
        elif not again:
            self.question = question
        reply = Reply(
            finish_reason=answer.finish_reason,
            tokens=len(answer.token_ids),
            prompt_tokens=len(ids),
            cached_tokens=answer.cached_tokens,
            context_full=answer.finish_reason == "length" and len(answer.token_ids) == room,
            dropped=(left_out - self.left_out) // 2,
            timing=answer.timing,
        )
        self.left_out = left_out
        self.replies.append(reply)
        return reply

    def _fit(self, history: Sequence[dict[str, str]], question: str) -> tuple[int, list[int]]:
        """How many messages must be left out, and the token ids of the others with the question."""
        longest = self.llm.limits.max_model_len
        asked = [*history, {"role": "user", "content": question}]
        left_out = min(self.left_out, len(history))
        ids = self._render(asked[left_out:])
        wanted = max(min(self.sampling["max_tokens"] or longest, int(longest * _ROOM)), 1)
        while self.overflow == "trim" and longest - len(ids) < wanted and left_out < len(history):
            left_out += 2
            ids = self._render(asked[left_out:])
        if len(ids) < longest:
            return left_out, ids
        advice = "ask something shorter"
        if len(self._render([{"role": "user", "content": "?"}])) >= longest:
            advice = "no question fits: take a shorter system prompt, or more of --max-model-len or --kv-pages"
        elif left_out < len(history):
            advice = "/clear begins a new conversation, /undo takes back the last turn; --overflow trim would go on"
        raise RequestError(
            f"the conversation, with this, is {len(ids)} tokens long, and the context is {longest}: {advice}"
        )

    def _render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        thinking = self.llm.thinking
        if thinking and not thinking.sent_back:
            messages = [
                {**m, "content": thinking.split(m["content"])[1]} if m["role"] == "assistant" else m for m in messages
            ]
        variables = {thinking.switch: self._think} if self._think is not None and thinking and thinking.switch else None
        return self.llm.render([*system, *messages], template_variables=variables)

    def _prompt_ends_with(self, ids: Sequence[int], tag: str) -> bool:
        tokenizer = self.llm.tokenizer
        return tokenizer is not None and tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip().endswith(tag)

    # --- files ---

    def save(self, path: Path) -> None:
        """Write the conversation to a file that `load` and OpenAI's clients understand. Raises `RequestError`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        unanswered = [{"role": "user", "content": self.question}] if self.question is not None else []
        write_messages(path, self.llm.checkpoint.name, [*system, *self.messages, *unanswered])

    def load(self, path: Path) -> None:
        """Take up a conversation from a file: what `save` writes, or a list of OpenAI's messages.

        Raises `RequestError`, and changes nothing, if it is not understood.
        """
        messages = read_messages(path)
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        question = messages.pop()["content"] if len(messages) % 2 else None
        self.clear()
        self.system, self.messages, self.question = system, messages, question


def parse_options(text: str) -> dict[str, Any]:
    """Options as typed: `temperature=0.5 stop=END`. A value is JSON or Python if it can be, else text.

    An empty one is None. Raises `RequestError` for what is not KEY=VALUE.
    """
    options = {}
    for part in re.split(r"\s+(?=[\w-]+=)", text.strip()):
        name, equals, value = part.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+", name):
            raise RequestError(f"an option is set by KEY=VALUE, like temperature=0.5, not {part!r}")
        name = name.replace("-", "_")  # as the command line has it
        options[name] = _value(name, value)
    return options


def _value(name: str, text: str) -> Any:
    value = _read(text)
    if name == "stop" and not isinstance(value, (str, list, tuple, NoneType)):
        return text  # a number, or a word like true, is text to stop at
    if name == "stop_token_ids" and isinstance(value, int):
        return [value]
    if name == "logit_bias" and isinstance(value, dict):  # JSON's keys are always text
        return {int(key) if isinstance(key, str) and key.isdecimal() else key: bias for key, bias in value.items()}
    return value


def _read(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return read(text)
    return text or None


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
