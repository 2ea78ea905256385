"""FlashInfer's prefill attention over pages (arXiv:2501.01005), where it is installed and its kernels are built.

FlashInfer lays a step out on the host, which needs the lengths of the rows there. Reading them waits for the steps
before, so that a step is laid out once for all layers; what that costs is part of what is measured at start. Its decode
attention would have to be laid out for every token (0.1 to 0.25 ms), while a captured step needs nothing of the host:
so it is not offered.

It compiles a kernel for each head size and dtype with nvcc, which takes minutes. That happens in a process of its own
and never while an engine waits: another implementation serves until the next start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgraph.kernels import serving
from fastgraph.kernels.attention import Pages
from fastgraph.kernels.registry import Kernel, Signature

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE = 128 << 20  # bytes
_FAILED = "fastgraph-could-not-build"


def load() -> Kernel:
    """An attention op of FlashInfer's, with plans of its own."""
    from fastgraph.kernels.builtin import after_writing

    return after_writing(_Prefill())


class _Prefill:
    """Attends over pages that hold the step's own keys and values already."""

    def __init__(self) -> None:
        self._wrappers: dict[tuple[float, int], Any] = {}  # by scale and window

    def __call__(self, q: Tensor, pages: Pages, scale: float, window: int) -> Tensor:
        if (scale, window) not in self._wrappers:
            self._wrappers[scale, window] = _wrapper(q.device)
        wrapper = self._wrappers[scale, window]
        serving.once((self, scale, window), lambda: self._plan(wrapper, q, pages, scale, window))
        # Kernels that overlap by programmatic dependent launch keep a convention among themselves.
        out: Tensor = wrapper.run(q, (pages.k_cache, pages.v_cache), enable_pdl=False)
        return out

    def _plan(self, wrapper: Any, q: Tensor, pages: Pages, scale: float, window: int) -> None:
        # This waits for all that was submitted, so the staging buffers of the last plan are free as well.
        slots = pages.slots.long()
        past, start = torch.cat([pages.lengths[slots], pages.query_start]).cpu().split([len(slots), len(slots) + 1])
        size = pages.k_cache.shape[1]
        lengths = past.numpy() + np.diff(start.numpy())  # [rows], this step's tokens included
        counts = -(-lengths // size)  # pages
        first = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(counts)), counts)
        where = torch.from_numpy(np.stack([row, np.arange(first[-1]) - first[row]])).to(q.device)
        wrapper.plan(
            start,
            torch.from_numpy(first.astype(np.int32)),
            pages.page_table[slots[where[0]], where[1]],
            torch.from_numpy((lengths - (counts - 1) * size).astype(np.int32)),
            q.shape[1],
            pages.k_cache.shape[2],
            q.shape[2],
            size,
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window else -1,
            q_data_type=q.dtype,
            kv_data_type=pages.k_cache.dtype,
        )


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _wrapper(device: torch.device) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    backend = _backend(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "fa2"
    return BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD", backend=backend)


def _backend(capability: tuple[int, int]) -> str:
    return "fa3" if capability[0] == 9 else "fa2"


# --- what must have been built ---


def refuses(signature: Signature) -> str:
    """Why it cannot take a signature; "" if it can, and all its kernels are there."""
    if signature.head_dim not in _HEAD_DIMS:
        return f"has no kernel for head_dim {signature.head_dim}"
    try:
        specs = _specs(signature)
        missing = [spec for spec in specs if not spec.is_compiled]
    except Exception as error:  # whatever another package's installation lacks
        return f"cannot be used: {type(error).__name__}: {error}"
    failed = [spec.build_dir / _FAILED for spec in missing if (spec.build_dir / _FAILED).exists()]
    if failed:
        return f"its kernels could not be built: {failed[0]} says why; without that file it is tried again"
    if not shutil.which("ninja") and not all(spec.is_aot for spec in specs):
        return "needs ninja on the path, also for kernels that are built"
    if missing and not nvcc():
        return "its kernels are not built, and there is no nvcc to build them with"
    return "its kernels are not built yet" if missing else ""


def build(signature: Signature) -> str:
    """Have kernels that are missing built in the background, and say so. "" if there is nothing to build."""
    if refuses(signature) != "its kernels are not built yet":
        return ""
    from flashinfer.compilation_context import CompilationContext

    # The same architectures as here, so that the result is found here; and without a GPU's memory.
    architectures = " ".join(f"{major}.{minor}" for major, minor in sorted(CompilationContext().TARGET_CUDA_ARCHS))
    settings = {"FLASHINFER_CUDA_ARCH_LIST": architectures, "PYTHONPATH": os.pathsep.join(sys.path)}
    jobs = str(max((os.cpu_count() or 2) // 2, 1))
    subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, _wanted(signature))],
        env={"MAX_JOBS": jobs, **os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not meant for it
    )
    return "FlashInfer's prefill attention is being built in the background, for the next start; Triton serves now"


def nvcc() -> str | None:
    """CUDA's compiler, where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return shutil.which("nvcc", path=str(Path(home, "bin")))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _wanted(signature: Signature) -> tuple[str, str, int, int]:
    """Backend, dtype, head_dim, and whether some layers have a window."""
    window = "window" in signature.features
    return _backend(signature.capability), signature.dtype, signature.head_dim, int(window)


def _specs(signature: Signature) -> list[Any]:
    return _specs_of(*_wanted(signature))


def _specs_of(backend: str, dtype: str, head_dim: int, window: int) -> list[Any]:
    """FlashInfer's descriptions of the kernels: one for layers with a window, one for those without."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    kind, plain = getattr(torch, dtype), 0  # no positions: queries and keys come rotated
    sizes = (kind, kind, kind, torch.int32, head_dim, head_dim, plain)
    windows, no_cap, exact = (False, True) if window else (False,), False, False
    return [gen_batch_prefill_module(backend, *sizes, windowed, no_cap, exact) for windowed in windows]


def main(arguments: list[str]) -> None:
    """Build what the arguments, those of `_specs_of`, describe."""
    os.nice(19)
    backend, dtype, head_dim, window = arguments
    for spec in _specs_of(backend, dtype, int(head_dim), int(window)):
        try:
            spec.build(verbose=False)
        except Exception as error:
            spec.build_dir.mkdir(parents=True, exist_ok=True)
            (spec.build_dir / _FAILED).write_text(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
