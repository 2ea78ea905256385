"""What launching a Triton kernel needs to know, and the few device functions that the kernels share.

Kernels of a decode step overlap by programmatic dependent launch (Hopper and later): each lets the next one start as
soon as all its own programs have, and waits for the one before it where it first reads what that one wrote. Read before
the wait is what no kernel of the step writes (weights, page tables, older keys and values) or only its last one does
(lengths), and what was written before a kernel of the step that was launched plainly. Every program that writes must
have waited, and at least one program of each kernel; then whatever came earlier has ended too. The first kernel of a
step is launched plainly, so no step reaches into the one before it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait as gdc_wait

from fastgraph.kernels import serving

COUNTERS = 65536


def cdiv(n: int, parts: int) -> int:
    """n / parts, rounded up. Triton's own, which serves kernels as well, takes 2 to 4 µs a call."""
    return -(-n // parts)


def power_of_two(n: int) -> int:
    """The smallest power of two that is no less than n >= 1. As for Triton's own: see `cdiv`."""
    return 1 << (n - 1).bit_length()


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch. Nor has Triton's interpreter, which runs on the CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; one for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have at most; a Hopper's for Triton's interpreter."""
    if device.type != "cuda":
        return 232_448
    most: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return most


def counters(device: torch.device) -> Tensor:
    """[COUNTERS] int32 zeros, in which programs of one kernel count which of them is the last. It sets them back.

    Kept for good, because a captured graph goes on using them. Each thread, and so each engine, has its own, for its
    kernels run one after the other, and those of two engines may not.
    """
    return serving.keep(("counters", device), lambda: torch.zeros(COUNTERS, dtype=torch.int32, device=device))


_built = 0


def builds() -> int:
    """How often this process has built a kernel, or read one from Triton's cache, for arguments of a new kind."""
    return _built


def _count(before: Any = triton.knobs.runtime.jit_post_compile_hook, **compiled: Any) -> Any:
    global _built
    _built += 1
    return before(**compiled) if before else None


triton.knobs.runtime.jit_post_compile_hook = _count


@triton.jit
def prefetch(pointers):
    """Have the lines at `pointers` read into the L2 cache; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
