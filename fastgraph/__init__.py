"""fastgraph: a torch.compile-centric, single-file-per-model graph engine for running language models.

import fastgraph

print(fastgraph.load_model().generate("The capital of France is"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastgraph.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from fastgraph.llm import LLM, Completion, Stream, load_model

__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams", "Stream", "load_model"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The rest of `__all__`, when it is first used: it imports torch, which takes seconds, and `--help` needs none."""
    if name in __all__:
        return getattr(importlib.import_module("fastgraph.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
