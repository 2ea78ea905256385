"""Where compiled code is kept, so that the next process need not compile it again.

Inductor and Triton keep caches of their own, keyed by what they compile. They put them under the system's temporary
folder, where a reboot takes them. Here they get a folder of the user's that is named by what the code depends on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

import torch

from fastgraph.loading.gguf import cache_folder

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
    folder = cache_folder() / "compiled" / key()
    for variable, name in VARIABLES.items():
        os.environ.setdefault(variable, str(folder / name))
    return folder
