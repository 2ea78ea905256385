"""What a model file makes of a Hugging Face config.json: that all it needs is there, and nothing it cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgraph.errors import ModelError


def require(raw: Mapping[str, Any], *names: str) -> None:
    """Raises `ModelError` if the config lacks one of them."""
    if missing := [name for name in names if raw.get(name) is None]:
        raise ModelError(f"the model's config.json lacks {', '.join(missing)}")


def refuse(file: str, reasons: Mapping[str, bool]) -> None:
    """Raises `ModelError` if one of the reasons holds for which the model file cannot run what the config describes."""
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ModelError(f"{file} cannot run {', '.join(found)}; docs/add-a-model.md shows how to add a model file")
