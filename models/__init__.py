"""One file per architecture. A config's `architectures` names the file; paths and model names never do."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fastgraph.errors import ModelError


def supported() -> dict[str, str]:
    """Every architecture that a model file here declares in its `ARCHITECTURES`, and that file's module name."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {architecture: module.__name__ for module in modules for architecture in module.ARCHITECTURES}


def described(module: str) -> dict[str, str]:
    """A model file by its module's name: the "file", and what it "runs" as its docstring begins, up to a colon."""
    begins = (importlib.import_module(module).__doc__ or "").partition("\n")[0]
    return {"file": file_of(module), "runs": begins.partition(":")[0].rstrip(".")}


def file_of(module: str) -> str:
    """Where the module stands in the repository."""
    return f"models/{module.rpartition('.')[2]}.py"


def find(config: Mapping[str, Any]) -> ModuleType:
    """The model file for a Hugging Face config. Raises `ModelError` when no file declares its architecture."""
    known = supported()
    wanted = config.get("architectures") or []
    for architecture in wanted:
        if architecture in known:
            return importlib.import_module(known[architecture])
    if not wanted:
        raise ModelError("the model's config.json names no `architectures`, so there is no telling how to run it")
    close = difflib.get_close_matches(wanted[0], known, n=1, cutoff=0.0)
    raise ModelError(
        f"no model file runs {', '.join(wanted)}; the closest is {close[0]} ({file_of(known[close[0]])}). "
        f"Supported: {', '.join(sorted(known))}. docs/add-a-model.md shows how to add one"
    )
