"""Chat templates: the jinja text by which a model wants a conversation written down."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastgraph.errors import ModelError, RequestError
from fastgraph.loading.files import read_json, typed_path


class ChatTemplate:
    """A compiled chat template. It comes from strangers, so it runs in jinja's sandbox.

    What it may use is what transformers gives it: loop controls, `{% generation %}`, `raise_exception`,
    `strftime_now` and a `tojson` that does not escape HTML. Raises `ModelError` for a template with a syntax error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= special_tokens
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        self._source = source

    def reads(self, name: str) -> bool:
        """Whether a variable of that name can make any difference."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as one text, special tokens in it; encode it without adding any.

        `variables` go to the template as they are. Raises `RequestError` for messages without role or content, and
        for what the template itself refuses.
        """
        try:
            return self._template.render(
                messages=_plain("messages", _checked(messages)),
                tools=_plain("tools", tools),
                add_generation_prompt=add_generation_prompt,
                **{"documents": None, **variables},
            )
        except RequestError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(f"the chat template fails on these messages: {error}") from error


def find_chat_template(folder: Path, override: str | None) -> str | None:
    """The text of a model's chat template, or None if it has none.

    `override` is a file or the template itself; without it, `chat_template.jinja`, then `tokenizer_config.json`.
    """
    if override is not None:
        return _override(override)
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # named templates
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _override(override: str) -> str:
    if "{" in override or "\n" in override:
        return override
    path = typed_path(override)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {override!r} is neither a file that can be read nor jinja text") from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("a chat needs a list of messages, one at least: [{'role': 'user', 'content': 'Hello'}]")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {number} has no role: a message is {{'role': 'user', 'content': 'Hello'}}")
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            raise RequestError(f"message {number} ({message['role']}) has no content; it must be text")
        # Templates test for keys, and would print an empty one as "None".
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _plain(name: str, value: Any) -> Any:
    """The value rebuilt from what JSON knows, so that no object with methods reaches a template."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{name} must be made of text, numbers, lists and dicts ({error})") from error


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the chat template refuses these messages: {message}")


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the assistant says. Here the block is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
