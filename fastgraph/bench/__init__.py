"""Benches that can show us losing: every repeat counts, and every figure comes with its spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastgraph.config import EngineConfig

_SHAPES = Path(__file__).parent / "shapes"


def shapes() -> list[str]:
    """Names of the models whose shapes are shipped, to be filled with random weights."""
    return sorted(path.stem for path in _SHAPES.glob("*.json"))


def with_shape(config: EngineConfig) -> EngineConfig:
    """The config with the name of a shipped shape, if it asks for random weights, made the path of its file."""
    name = (config.model or "").lower()
    if config.load_format == "dummy" and name in shapes() and not Path(config.model or "").exists():
        return replace(config, model=str(_SHAPES / f"{name}.json"))
    return config
