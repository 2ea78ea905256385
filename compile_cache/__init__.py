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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from fastgraph.errors import ModelError
from fastgraph.loading.files import cache_folder, read_json

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

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
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # The user has not set what torch puts there itself, as soon as something imports its compiler.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == os.path.abspath(default_cache_dir()):
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    for variable, name in VARIABLES.items():
        os.environ.setdefault(variable, str(folder() / name))
    return folder()


def folder() -> Path:
    """Where things are kept that depend on what `key` names."""
    return cache_folder() / "compiled" / key()


def read(name: str) -> dict[str, Any]:
    """A record that `add` has kept; {} if there is none, or none that can be read."""
    try:
        return read_json(folder() / name)
    except ModelError:
        return {}


def add(name: str, found: dict[str, Any]) -> None:
    """Keep more in a record, beside what processes have put there meanwhile. It changes as a whole or not at all."""
    folder().mkdir(parents=True, exist_ok=True)
    with _alone(name):
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder(), delete=False) as file:
            json.dump(read(name) | found, file, indent=1)
        os.replace(file.name, folder() / name)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """No other process is in here meanwhile, where system and folder have locks; elsewhere the last of two wins."""
    with open(folder() / f"{name}.lock", "w") as lock:
        if fcntl is not None:
            with suppress(OSError):  # a folder in the network may have none
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
