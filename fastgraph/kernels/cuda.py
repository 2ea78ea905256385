"""The linear as a GPU runs it: opaque to the compiler, because it picks its kernel by the real batch.

A compiled graph serves every number of rows. What is best for one row is not best for a thousand, so the choice is
made inside the op, when it is called or captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.kernels import serving

_LIBRARY = torch.library.Library("fastgraph", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, bool gated, Tensor? residual, "
    "str activation) -> Tensor"
)

linear = torch.ops.fastgraph.linear.default


def _linear(x: Tensor, *rest: object) -> Tensor:
    return serving.kernels(x.device.type)["linear"](x, *rest)


_LIBRARY.impl("linear", _linear, "CUDA")


@torch.library.register_fake("fastgraph::linear", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, bias: object, norm: object, eps: float, gated: bool, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
