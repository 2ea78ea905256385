"""Where compiled code is kept, so that the next process need not compile it again.

Inductor and Triton keep caches of their own, keyed by what they compile. They put them under the system's temporary
folder, where a reboot takes them. Here they get a folder of the user's that is named by what the code depends on. What
was measured at start is kept there too.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fastgraph.errors import ModelError
from fastgraph.loading.files import cache_folder, read_json

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def key() -> str:
    """What compiled code depends on beside its source: the interpreter, torch and its build, and the machine."""
    parts = [f"{sys.version_info.major}.{sys.version_info.minor}", torch.__version__, str(torch.version.cuda)]
    parts += [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def activate() -> Path:
    """Have the compilers use our folder from now on, unless the user has set another. Returns the folder.

    Both write each entry under a temporary name and rename it, so processes may share the folder.
    """
    for variable, name in VARIABLES.items():
        os.environ.setdefault(variable, str(folder() / name))
    return folder()


def folder() -> Path:
    """Where things are kept that depend on what `key` names."""
    return cache_folder() / "compiled" / key()


def read(name: str) -> dict[str, Any]:
    """A record that `write` has kept; {} if there is none, or none that can be read."""
    try:
        return read_json(folder() / name)
    except ModelError:
        return {}


def write(name: str, record: dict[str, Any]) -> None:
    """Keep a record. It appears whole or not at all; of two processes that write at once, one wins."""
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder(), delete=False) as file:
        json.dump(record, file, indent=1)
    os.replace(file.name, folder() / name)
