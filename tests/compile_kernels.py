"""Compiles every Triton kernel for a GPU that is not there: `python compile_kernels.py [90]`. Prints a line for each.

What the interpreter takes, the compiler may refuse. The launchers are called as ever, with tensors of a CPU and in
real sizes; instead of running a kernel, Triton compiles it, for Hopper unless another compute capability is given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent.parent))

from fastgraph.kernels import launch, problems, registry, serving
from fastgraph.kernels.registry import Signature

CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
SHARED = {90: 232_448, 120: 101_376}[CAPABILITY]  # bytes that a program may have


class Absent:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self: JITFunction[Any], grid: Any) -> Any:
    def run(*args: Any, **options: Any) -> None:
        kernel = self.warmup(*args, grid=grid, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            assert kernel.metadata.shared <= SHARED, (self.__name__, kernel.metadata.shared, args, options)
            overlaps = " overlaps" if "griddepcontrol.wait" in kernel.asm["ptx"] else ""
            print(f"{self.__name__}: {kernel.metadata.shared} bytes shared{overlaps}", flush=True)

    return run


seen: set[str] = set()
triton.runtime.driver.set_active(Absent())
JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
launch.can_overlap = lambda device: True
launch.multiprocessors = lambda device: 132
launch.shared_memory = lambda device: SHARED
FEATURES = (frozenset({"rope"}), frozenset({"rope", "norms", "window", "sinks"}))


def main() -> None:
    for features in FEATURES:
        for heads, kv_heads, head_dim in ((32, 8, 128), (9, 3, 64)):
            sizes = (heads, kv_heads, head_dim, 16, 1024, 32000, 2)
            signature = Signature("cpu", "bfloat16", *sizes, features, (9, 0))
            kernels = {
                i.op: i.load() for op in registry.OPS for i in registry.implementations(op) if i.name == "triton"
            }
            serving.serve("cpu", kernels)
            for op, kernel in kernels.items():
                for rows in (1, 7, 300):
                    problems.answer(op, kernel, problems.problem(op, signature, rows))
    # What no op calls by itself.
    from fastgraph.kernels import linear, norm, routing, slots, slots_triton

    few, recent = torch.zeros(9, dtype=torch.int32), torch.zeros(8, 20, dtype=torch.int32)
    tables = slots.Tables(recent, *(torch.zeros(20, dtype=torch.int32) for _ in range(3)))
    slots_triton.gather(few, few, few, tables)
    slots_triton.advance(few, few, few, few, tables)

    x, wide = torch.zeros(9, 1024, dtype=torch.bfloat16), torch.ones(1024)
    norm.rms_norm(x, wide, 1e-6, x.clone())
    for rows in (1, 9, 300):
        linear.linear(x[:1].expand(rows, -1).contiguous(), x.new_zeros(512, 1024), gated=True, activation="gelu")
    linear.linear(x.new_empty(9, 4096), x.new_empty(4096, 4096))  # the deepest tiles
    for count, top_k in ((128, 8), (8, 2)):
        routing.route(x[:, :count].contiguous(), top_k, True)


if __name__ == "__main__":
    main()
