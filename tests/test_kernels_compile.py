"""Every Triton kernel is compiled for a GPU that is not there: what the interpreter takes, the compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_helpers import HAS_GPU

KERNELS = {
    *("_decode", "_lay_out", "_prefill", "_rotate_and_write"),
    *("_vector_kernel", "_tiled_kernel", "_rms_norm", "_gate_mul"),
    *("_route", "_vector_up", "_vector_down", "_order", "_tiled", "_add_up"),
    *("_choose", "_gather", "_advance"),
}


@pytest.mark.skipif(HAS_GPU, reason="where there is a GPU they are run")
@pytest.mark.parametrize("capability", [90, 120])
def test_every_kernel_compiles_and_fits(tmp_path: Path, capability: int) -> None:
    """For a Hopper, and for a GPU with less than half its shared memory. In a process of its own, as Triton interprets
    or compiles for good."""
    pytest.importorskip("triton")
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), str(capability)],
        env=settings | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = dict(line.split(": ") for line in done.stdout.splitlines())
    assert compiled.keys() >= KERNELS
    assert "overlaps" in compiled["_decode"]
