"""How a step is compiled, and the guard that nothing compiles while serving."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastgraph.device import step
from fastgraph.device.metadata import StepInputs
from fastgraph.device.slots import SlotState
from fastgraph.errors import FastgraphWarning
from fastgraph.kernels import serving
from fastgraph.kernels.sampling import SamplerOutput
from fastgraph.ops import Batch, LayerCache

Mode = Literal["full", "regional", "off"]


class CompiledStep:
    """A step of one model over its caches and slots. Call `warm_up` before the first real step.

    "full" compiles all between gathering and moving on as one graph. "regional" compiles three: the embedding, one
    block that all layers share, and the head with sampling; it compiles many times faster. Both are `fullgraph`, and
    one graph serves every number of tokens and rows. "off" runs the same functions eagerly.
    """

    def __init__(
        self, model: step.Model, caches: Sequence[LayerCache], state: SlotState, vocab: int, mode: Mode
    ) -> None:
        self.caches = caches  # others may take their place, of the same shapes but for the number of pages
        self._model, self._state, self._vocab = model, state, vocab
        self._mode = mode
        self._guarded = False
        self._whole, self._begin, self._block, self._end = step.run, step.begin, _block, step.end
        if mode != "off":
            self._whole = torch.compile(step.run, fullgraph=True)
            self._begin = torch.compile(step.begin, fullgraph=True)
            self._block = torch.compile(_block, fullgraph=True)
            self._end = torch.compile(step.end, fullgraph=True)
        self.recompiles = 0  # times a step would have compiled while serving
        self.eager_steps = 0  # steps that ran eagerly although they were to be compiled

    def __call__(self, inputs: StepInputs) -> SamplerOutput:
        if not self._guarded:
            return self._run(inputs)
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._run(inputs)
        except RuntimeError as error:
            if "recompile" not in str(error):
                raise
            # The pieces before the one that failed only wrote what running again writes again.
            self.recompiles += 1
            self.eager_steps += 1
            if self.recompiles == 1:
                message = f"a step would have compiled while serving; it runs eagerly: {error}"
                warnings.warn(message, FastgraphWarning, stacklevel=2)
            with torch.compiler.set_stance("force_eager"):
                return self._run(inputs)

    def warm_up(self, inputs: StepInputs) -> None:
        """Compile, with inputs whose sizes stand for all sizes, and forbid compiling from then on."""
        if self._mode == "off":
            return
        # One process may hold several engines, and all share the functions' code objects.
        with torch._dynamo.config.patch(recompile_limit=64):
            self._run(inputs, mark=_mark)
        self._guarded = True

    def _run(self, inputs: StepInputs, mark: Callable[[str, Any], None] = lambda name, tensors: None) -> SamplerOutput:
        serving.begin_step()
        batch = step.gather(inputs, self._state)
        mark("tokens", (batch.ids, batch.positions, batch.sequence_lengths, batch.token_slots))
        mark("rows", (batch.slots, inputs.sampling_slots, inputs.last))
        mark("starts", batch.query_start)
        mark("pages", self.caches)
        if self._mode == "full":
            rows = (inputs.last, inputs.sampling_slots)
            out = self._whole(self._model, self.caches, batch, *rows, self._state.sampler, self._vocab)
        else:
            out = self._parts(batch, inputs, mark)
        step.advance(out, inputs, self._state)
        return out

    def _parts(self, batch: Batch, inputs: StepInputs, mark: Callable[[str, Any], None]) -> SamplerOutput:
        """`step.run`, but for a copy of x where each row has a single token."""
        x, shared = self._begin(self._model, batch)
        mark("tokens", shared)
        for block, cache in zip(self._model.layers, self.caches, strict=True):
            mark("tokens", x)
            x = self._block(block, x, shared, cache, batch)
        if len(inputs.last) != len(x):
            x = x[inputs.last]
        mark("rows", x)
        return self._end(self._model, x, inputs.sampling_slots, self._state.sampler, self._vocab)


def _block(block: nn.Module, x: Tensor, shared: Any, cache: LayerCache, batch: Batch) -> Tensor:
    y: Tensor = block(x, shared, cache, batch)
    return y


def _mark(name: str, tensors: Any) -> None:
    """Have the compiler know nothing of the tensors' first size, except that it is the same for one `name`."""
    for tensor in tree_leaves(tensors):
        torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id=name)
