"""What the parts of loading share: paths and JSON, the folder of what can be made again, and how progress is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastgraph.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Progress = Callable[[str, "float | None"], None]  # the phase in words, and the share of it that is done (0..1)


def typed_path(text: str) -> Path:
    """A path as people type it. With the ~ of an unknown user it stays as it is, and nothing is found there."""
    return Path(os.path.expanduser(text))


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; {} if there is no such file. Raises `ModelError` for a file with anything else in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file, by a folder's index of safetensors files; {} if it has none."""
    path = folder / INDEX
    names = read_json(path).get("weight_map")
    if path.is_file() and not isinstance(names, dict):
        raise ModelError(f"{path} is not an index of safetensors files; download it again")
    return names or {}


def cache_folder() -> Path:
    """Where fastgraph keeps what it can make again: FASTGRAPH_CACHE, XDG_CACHE_HOME/fastgraph or ~/.cache/fastgraph."""
    if own := os.environ.get("FASTGRAPH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "fastgraph"
