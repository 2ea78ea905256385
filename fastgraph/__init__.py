"""fastgraph: a torch.compile-centric, single-file-per-model graph engine for running language models.

    import fastgraph

    print(fastgraph.load_model().generate("The capital of France is"))
"""

from __future__ import annotations

from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.llm import LLM, Completion, Stream, load_model

__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams", "Stream", "load_model"]

__version__ = "0.1.0"
