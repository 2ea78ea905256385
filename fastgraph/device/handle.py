"""The door between the planes: all that the control plane can ask of the device."""

from __future__ import annotations

import gc
from contextlib import suppress

import torch

from fastgraph.control.plan import Limits, PendingStep, StepPlan
from fastgraph.device.compiler import CompiledStep
from fastgraph.device.executor import Executor
from fastgraph.kernels import serving


class DeviceHandle:
    """What `build_device` returns. The names here are the whole interface, and a test pins them."""

    def __init__(self, limits: Limits, executor: Executor, step: CompiledStep) -> None:
        self._limits, self._executor, self._step = limits, executor, step
        self._built = _kernel_builds()

    @property
    def limits(self) -> Limits:
        return self._limits

    def execute(self, plan: StepPlan) -> PendingStep:
        """Submit a step. Steps run in the order they are submitted; reading a result waits for its step alone."""
        return self._executor.execute(plan)

    def counters(self) -> dict[str, int]:
        """What should be zero, or small, while serving."""
        return {
            "recompiles": self._step.recompiles,
            "eager_steps": self._step.eager_steps + self._executor.above_ladder,
            "kernel_builds": _kernel_builds() - self._built,  # of every engine in this process
            "padding_tokens": self._executor.padding_tokens,
        }

    def shutdown(self) -> None:
        """Let go of the device's memory. No step may be submitted afterwards."""
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # of a device that has failed
                torch.cuda.synchronize()  # what is in flight writes to memory that others may get
        del self._executor, self._step
        serving.begin_step()  # kernels let go of what they laid out for the last one
        gc.unfreeze()  # the caller may have frozen what is to be collected now
        gc.collect()  # torch has made cycles of what built the model
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # of a device that has failed
                torch.cuda.empty_cache()


def _kernel_builds() -> int:
    if not torch.cuda.is_available():
        return 0
    from fastgraph.kernels import launch  # triton, which a CPU may lack

    return launch.builds()
