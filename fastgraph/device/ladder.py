"""The capture ladder: CUDA graphs of the decode step, one for each of a few batch sizes."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastgraph.device.metadata import StepInputs
from fastgraph.kernels.sampling import SamplerOutput


def rungs(top: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, then steps that grow with the size, and always `top` itself.

    A step grows to about an eighth of the size, so that padding never costs much.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < top:
        step = max(8, 1 << max(sizes[-1].bit_length() - 4, 0))
        sizes.append(sizes[-1] + step)
    return sorted({size for size in sizes if size < top} | {top})


@dataclass(frozen=True, slots=True)
class Rung:
    graph: torch.cuda.CUDAGraph
    outputs: SamplerOutput  # where each replay writes; the next one writes there again


class _Recorder:
    """Records graphs on a stream of its own, into one memory pool."""

    def __init__(self, prepare: Callable[[int], StepInputs], step: Callable[[StepInputs], SamplerOutput]) -> None:
        self._prepare, self._step = prepare, step
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, size: int) -> Rung:
        inputs = self._prepare(size)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(inputs)  # what allocates or compiles lazily does so now, not under capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = self._step(inputs)
        return Rung(graph, outputs)


def _free_memory() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


class CaptureLadder:
    """Graphs that share one memory pool. Replaying them is all the host does for a decode step."""

    def __init__(self, top: int) -> None:
        self.sizes = rungs(top)
        self._rungs: dict[int, Rung] = {}

    def fit(self, rows: int) -> int | None:
        """The smallest captured size that holds `rows`, or None above the ladder."""
        place = bisect_left(self.sizes, rows)
        return self.sizes[place] if place < len(self.sizes) else None

    def capture(
        self,
        prepare: Callable[[int], StepInputs],
        step: Callable[[StepInputs], SamplerOutput],
        progress: Callable[[float], None],
    ) -> None:
        """Record `step` for every size. The largest comes first, so that the smaller ones reuse its memory.

        `prepare` is not recorded: a replay must find the inputs as they were refreshed for it.
        """
        recorder = _Recorder(prepare, step)
        # The collector must not free tensors of an earlier capture in the midst of a later one.
        gc.collect()
        gc.freeze()
        try:
            for done, size in enumerate(reversed(self.sizes), start=1):
                self._rungs[size] = recorder.record(size)
                progress(done / len(self.sizes))
        finally:
            gc.unfreeze()

    def memory(self, prepare: Callable[[int], StepInputs], step: Callable[[StepInputs], SamplerOutput]) -> int:
        """Bytes of device memory that `capture` will take, from recording the two largest sizes and dropping them.

        The largest brings the pool that all share; a further one shows what a graph takes for itself.
        """
        recorder = _Recorder(prepare, step)
        free = [_free_memory()]
        rungs = []
        for size in self.sizes[:-3:-1]:
            rungs.append(recorder.record(size))
            free.append(_free_memory())
        return free[0] - free[1] + (free[-2] - free[-1]) * (len(self.sizes) - 1)

    def replay(self, size: int) -> SamplerOutput:
        """Run a captured step on what its static inputs hold now. Copy the outputs out before the next replay."""
        rung = self._rungs[size]
        rung.graph.replay()
        return rung.outputs
