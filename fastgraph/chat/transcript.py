"""Conversations in files: JSON, in the form of an OpenAI request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fastgraph.errors import RequestError


def write_messages(path: Path, model: str, messages: Sequence[dict[str, str]]) -> None:
    """Write {"model": …, "messages": […]}.

    Raises `RequestError` if the file cannot be written, or is there and is no conversation.
    """
    text = json.dumps({"model": model, "messages": messages}, indent=2, ensure_ascii=False)
    try:
        if path.exists():
            _check_conversation(path)
        path.write_bytes(f"{text}\n".encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{path} cannot be written: there is half a character in what was said ({error})") from error
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}") from error


def _check_conversation(path: Path) -> None:
    """Raises `RequestError` if something else is in the file: it is not to be lost."""
    try:
        read_messages(path)
    except RequestError as error:
        raise RequestError(f"{path} is there, and is no conversation: choose another name") from error


def read_messages(path: Path) -> list[dict[str, str]]:
    """A conversation in a file: perhaps a system message, then user and assistant in turn.

    Raises `RequestError` that names the message which is not understood.
    """
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    found = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(found, list) or not found:
        raise RequestError(f'{path} has no messages: a list of them is wanted, or an object with "messages"')
    messages: list[dict[str, str]] = []
    for number, message in enumerate(found):
        role = message.get("role") if isinstance(message, dict) else None
        role = "system" if role == "developer" else role
        spoken = len(messages) - (bool(messages) and messages[0]["role"] == "system")
        expected = "assistant" if spoken % 2 else "user"
        if role != expected and not (role == "system" and number == 0):
            raise RequestError(f"message {number} of {path} is of role {role!r}, and {expected!r} is expected there")
        content = message.get("content")
        if isinstance(content, list):  # OpenAI's parts
            texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            content = "".join(texts) if len(texts) == len(content) else None
        if not isinstance(content, str):
            raise RequestError(f"message {number} of {path} is not text, and nothing else is understood here")
        messages.append({"role": role, "content": content})
    return messages


def read_text(path: Path) -> str:
    """A file's text. Raises `RequestError`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text") from error
