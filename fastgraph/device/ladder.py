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
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        # The collector must not free tensors of an earlier capture in the midst of a later one.
        gc.collect()
        gc.freeze()
        try:
            for done, size in enumerate(reversed(self.sizes), start=1):
                inputs = prepare(size)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step(inputs)  # what allocates or compiles lazily does so now, not under capture
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    outputs = step(inputs)
                self._rungs[size] = Rung(graph, outputs)
                progress(done / len(self.sizes))
        finally:
            gc.unfreeze()

    def replay(self, size: int) -> SamplerOutput:
        """Run a captured step on what its static inputs hold now. Copy the outputs out before the next replay."""
        rung = self._rungs[size]
        rung.graph.replay()
        return rung.outputs
