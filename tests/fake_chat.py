"""`fastgraph chat`, but with a model that answers as it is told: a program for the tests to run in a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chat_helpers import FakeLLM, FakeStream
from rich.console import Console

from fastgraph.chat.conversation import Conversation
from fastgraph.chat.prompt import reader
from fastgraph.chat.session import Chat
from fastgraph.thinking import find_thinking

FOLDER = Path(sys.argv[1])


class ToldLLM(FakeLLM):
    """The next answer, and how fast it comes, is in answer.json; asked.json is what the model was asked last."""

    def render(self, messages: list[dict[str, str]], template_variables: Any = None) -> list[int]:
        (FOLDER / "asked.json").write_text(json.dumps([message["content"] for message in messages]))
        return super().render(messages, template_variables)

    def stream(self, ids: list[int], **sampling: Any) -> FakeStream:
        told = json.loads((FOLDER / "answer.json").read_text())
        self.answers, self.delays = [told["answer"]], told["delays"]
        return super().stream(ids, **sampling)


llm = ToldLLM([], context=10_000, thinking=find_thinking("</think>"))
Chat(Conversation(llm, {}), reader(), Console(highlight=False), SimpleNamespace(llm=llm)).run()  # type: ignore[arg-type]
