"""Bringing a model from the Hugging Face hub into the hub's own cache on this machine."""

from __future__ import annotations

from pathlib import Path

from fastgraph.errors import ModelError
from fastgraph.loading.weights import Progress

_TEXT_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model")


def download(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    weights: bool = True,
    progress: Progress,
) -> Path:
    raise ModelError("hub")
