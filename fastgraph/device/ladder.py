"""The capture ladders: CUDA graphs of the step, for each of a few batch sizes, and for a few numbers of tokens."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastgraph.device.metadata import StepInputs, rows_of
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


def token_rungs(top: int, slots: int) -> list[int]:
    """Tokens of steps with prompts to capture, ascending: two to every doubling, up to `top`.

    Padded, none may look like a decode step, which has a row for every token.
    """
    sizes = [size for power in range(4, top.bit_length()) for size in (1 << power, 3 << (power - 1))]
    return [size for size in sizes if size <= top and size != rows_of(size, slots)]


@dataclass(frozen=True, slots=True)
class Rung:
    graph: torch.cuda.CUDAGraph
    outputs: SamplerOutput  # where each replay writes; the next one, of any size, may write there again


class Recorder:
    """Records steps on a stream of its own, into one memory pool. Graphs that share it must not run side by side."""

    def __init__(self, step: Callable[[StepInputs], SamplerOutput]) -> None:
        self._step = step
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, inputs: StepInputs) -> Rung:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(inputs)  # what allocates or compiles lazily does so now, not under capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, of another engine perhaps, may go on with what a capture does not allow.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = self._step(inputs)
        return Rung(graph, outputs)


class CaptureLadder:
    """Graphs of one kind of step. Replaying one is all that the host does to run it.

    `prepare` gives the inputs of a step of padding. It is not recorded: a replay must find them refreshed for it.
    """

    def __init__(self, sizes: list[int], prepare: Callable[[int], StepInputs]) -> None:
        self.sizes, self._prepare = sizes, prepare
        self._rungs: dict[int, Rung] = {}

    def fit(self, size: int) -> int | None:
        """The smallest captured size that holds `size`, or None above the ladder."""
        place = bisect_left(self.sizes, size)
        return self.sizes[place] if place < len(self.sizes) else None

    def capture(self, recorder: Recorder, progress: Callable[[float], None]) -> None:
        """Record a step of every size. The largest comes first, so that the smaller ones reuse its memory.

        progress: is told the share that is done, before each.
        """
        # The collector must not free tensors of an earlier capture in the midst of a later one.
        gc.collect()
        gc.freeze()
        try:
            for done, size in enumerate(reversed(self.sizes)):
                progress(done / len(self.sizes))
                self._rungs[size] = recorder.record(self._prepare(size))
        finally:
            gc.unfreeze()

    def memory(self, recorder: Recorder) -> int:
        """Bytes of device memory that `capture` will take, beside what the recorder has: two sizes are recorded for it.

        The largest brings the memory that all share; a further one shows what a graph takes for itself.
        """
        free = [_free_memory()]
        for size in self.sizes[:-3:-1]:
            self._rungs[size] = recorder.record(self._prepare(size))
            free.append(_free_memory())
        return free[0] - free[1] + (free[-2] - free[-1]) * (len(self.sizes) - 1)

    def clear(self) -> None:
        self._rungs.clear()

    def replay(self, size: int) -> SamplerOutput:
        """Run a captured step on what its static inputs hold now. Copy the outputs out before the next replay."""
        rung = self._rungs[size]
        rung.graph.replay()
        return rung.outputs


def _free_memory() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
