"""The linears as a GPU runs them: opaque to the compiler, because they pick their kernel by the real batch.

A compiled graph serves every number of rows. What is best for one row is not best for a thousand, so the choice is
made inside the op, when it is called or captured. The norm behind a linear and the choice of experts are here because
the compiler would make several kernels of each, which do not overlap with those around them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.kernels import serving

_LIBRARY = torch.library.Library("fastgraph", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, bool gated, str activation) -> Tensor"
)
_LIBRARY.define(
    "add_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, bool gated, str activation, "
    "Tensor(a!) residual) -> ()"
)

_LIBRARY.define("norm_add(Tensor x, Tensor weight, float eps, Tensor(a!) residual) -> ()")
_LIBRARY.define("route(Tensor logits, int top_k, bool normalised) -> (Tensor, Tensor)")

linear = torch.ops.fastgraph.linear.default
add_linear = torch.ops.fastgraph.add_linear.default
norm_add = torch.ops.fastgraph.norm_add.default
route = torch.ops.fastgraph.route.default


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, gated: bool, activation: str
) -> Tensor:
    return serving.kernels(x.device.type)["linear"](x, weight, bias, norm, eps, gated, None, activation)


def _add_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, gated: bool, activation: str,
    residual: Tensor,
) -> None:  # fmt: skip
    y = serving.kernels(x.device.type)["linear"](x, weight, bias, norm, eps, gated, residual, activation)
    if y is not residual:
        residual.copy_(y)


def _norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> None:
    from fastgraph.kernels.norm import rms_norm  # in Triton, which a CPU may lack

    rms_norm(x.contiguous(), weight, eps, residual)


def _route(logits: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    from fastgraph.kernels import routing

    return routing.route(logits, top_k, normalised)


_LIBRARY.impl("linear", _linear, "CUDA")
_LIBRARY.impl("add_linear", _add_linear, "CUDA")
_LIBRARY.impl("norm_add", _norm_add, "CUDA")
_LIBRARY.impl("route", _route, "CUDA")


@torch.library.register_fake("fastgraph::linear", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, bias: object, norm: object, eps: float, gated: bool, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))


@torch.library.register_fake("fastgraph::norm_add", lib=_LIBRARY)
@torch.library.register_fake("fastgraph::add_linear", lib=_LIBRARY)
def _(*_: object) -> None:
    return None


@torch.library.register_fake("fastgraph::route", lib=_LIBRARY)
def _(logits: Tensor, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)
