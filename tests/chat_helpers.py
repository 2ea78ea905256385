"""What the tests of the chat share: a model that answers from a list, and a person who interrupts it."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from fastgraph.chat.conversation import Conversation
from fastgraph.chat.session import Chat
from fastgraph.engine import Timing
from fastgraph.thinking import Thinking


class FakeStream:
    def __init__(self, pieces: Sequence[str], limit: int, prompt_tokens: int, delays: tuple[float, float]) -> None:
        self._pieces, self._prompt_tokens, self._delays = pieces, prompt_tokens, delays
        self._given: list[str] = []
        self._reason = "stop" if len(pieces) <= limit else "length"
        self._left = limit

    def abort(self) -> None:
        self._reason, self._left = "abort", 0

    def __iter__(self) -> Iterator[str]:
        time.sleep(self._delays[0])
        for piece in self._pieces:
            if not self._left:
                break
            self._left -= 1
            self._given.append(piece)
            yield piece
            time.sleep(self._delays[1])

    @property
    def completion(self) -> Any:
        return SimpleNamespace(
            text="".join(self._given),
            token_ids=list(range(len(self._given))),
            finish_reason=self._reason,
            cached_tokens=self._prompt_tokens // 2,
            timing=Timing(queued=0.0, ttft=0.5, total=1.5),
        )


@dataclass
class FakeLLM:
    """Answers from a list, a token a word; a conversation is as long as it has words. Delays are in seconds."""

    answers: list[str | Exception]
    context: int = 1000
    delays: tuple[float, float] = (0.0, 0.0)  # before the first word, and after each
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    asked: list[list[dict[str, str]]] = field(default_factory=list)
    sampled: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Any = field(default_factory=lambda: SimpleNamespace(name="Fake-1B"))
    thinking: Thinking | None = None
    closed: int = 0  # times
    prompt_end: str = "assistant:"
    told: list[Any] = field(default_factory=list)  # template variables

    @property
    def limits(self) -> Any:
        return SimpleNamespace(max_model_len=self.context)

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(
            decode=lambda ids, skip_special_tokens: self.prompt_end,
            encode=lambda text, add_special_tokens: text.split(),
        )

    def render(self, messages: list[dict[str, str]], template_variables: Any = None) -> list[int]:
        self.asked.append(messages)
        self.told.append(template_variables)
        return list(range(sum(len(message["content"].split()) for message in messages)))

    def close(self) -> None:
        self.closed += 1

    def stats(self) -> dict[str, int]:
        return {"pages_free": 5, "pages_cached": 2, "pages_total": 9}

    def stream(self, ids: list[int], **sampling: Any) -> FakeStream:
        self.sampled.append(sampling)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return FakeStream(re.findall(r"\s*\S+\s*", answer), sampling["max_tokens"], len(ids), self.delays)


def contents(messages: Sequence[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def converse(llm: FakeLLM, *lines: str | type[BaseException], width: int = 80, **options: Any) -> str:
    """What a person who types these lines is shown, beside the answers' text."""
    script = iter(lines)

    def read() -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    shown = io.StringIO()
    conversation = Conversation(llm, **{"sampling": {}, **options})  # type: ignore[arg-type]
    Chat(conversation, read, Console(file=shown, width=width), SimpleNamespace(llm=llm)).run()  # type: ignore[arg-type]
    return shown.getvalue()


def interrupt_after(pieces: int) -> Callable[[str, bool], None]:
    seen: list[str] = []

    def show(piece: str, thought: bool = False) -> None:
        seen.append(piece)
        if len(seen) == pieces:
            os.kill(os.getpid(), signal.SIGINT)

    return show
