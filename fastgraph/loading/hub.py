"""Bringing a model from the Hugging Face hub into the hub's own cache on this machine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import tqdm

from fastgraph.config import EngineConfig
from fastgraph.errors import ModelError
from fastgraph.loading.files import SINGLE, Progress, read_index

_TEXT_FILES = ["*.json", "*.jinja"]
_SUBFOLDERS = ["*/*"]  # other formats of the same weights live there


def download(model: str, config: EngineConfig, progress: Progress) -> Path:
    """Fetch what is not here yet of a model's text files and safetensors; return the folder of that revision.

    Weights in other formats are left where they are; a dummy wants none. `config.offline` (or HF_HUB_OFFLINE) makes do
    with what was fetched before. Raises `ModelError` that says what to do: no such model, no access, no network, no
    safetensors.
    """
    revision, token, offline = config.revision, config.token, config.offline or huggingface_hub.is_offline_mode()
    fetch = partial(
        huggingface_hub.snapshot_download,
        model,
        revision=revision,
        token=token,
        local_files_only=offline,
        ignore_patterns=_SUBFOLDERS,
        tqdm_class=_Bar,
    )
    progress(f"fetching {model}", None)
    try:
        folder = Path(fetch(allow_patterns=_TEXT_FILES))
        if config.load_format != "dummy":
            files = sorted(set(read_index(folder).values())) or [SINGLE]
            fetch(allow_patterns=_TEXT_FILES + files)
            if not any((folder / file).is_file() for file in files):
                others = "" if offline else _others(model, revision, token)
                raise ModelError(f"{model} holds no safetensors weights{others}")
    except errors.HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder nor a file here, nor a model's name on the hub") from error
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{model} wants its terms accepted: do so at {_page(model)}, then pass a token or log in (`hf auth login`)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no {model} on the hub, or it is private: check the spelling, or log in with `hf auth login` or "
            f"pass a token. (There is no folder {model} here either.)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision!r}: see {_page(model)}/commits/main") from error
    except errors.LocalEntryNotFoundError as error:  # offline, or the hub cannot be reached
        if offline:
            raise ModelError(f"{model} is not, or not wholly, in this machine's cache: fetch it once online") from error
        raise ModelError(
            f"{model} is not in this machine's cache and the hub cannot be reached: check the network. {_first(error)}"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelError(f"fetching {model} failed: {_first(error)}. What has arrived is kept; try again") from error
    return folder


class _Bar(tqdm):
    """The hub's progress bar, on a terminal only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["disable"] = options.get("disable") or not sys.stderr.isatty()
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]


def _others(model: str, revision: str | None, token: str | None) -> str:
    """What a model has in place of safetensors, for a message."""
    listed = huggingface_hub.HfApi(token=token).list_repo_files(model, revision=revision)
    files = [file for file in listed if "/" not in file]
    kinds = {suffix for suffix in (".gguf", ".bin", ".pth", ".safetensors") if any(f.endswith(suffix) for f in files)}
    if ".gguf" in kinds:
        return "; it has .gguf files: download the one you want and name its path"
    return f"; it has {', '.join(sorted(kinds))} files, which would have to be converted" if kinds else ""


def _page(model: str) -> str:
    return f"{constants.ENDPOINT}/{model}"


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
