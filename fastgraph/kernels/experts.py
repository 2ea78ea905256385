"""Routed experts (arXiv:1701.06538) as the compiler sees them, and in plain PyTorch.

They are opaque to the compiler: how many tokens an expert has depends on the routing, and what runs on their number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph.kernels import serving

STEEPNESS = 1.702  # of the sigmoid in gpt-oss's SwiGLU

_LIBRARY = torch.library.Library("fastgraph", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, Tensor? residual, "
    "Tensor? gate_up_bias, Tensor? down_bias, float limit) -> Tensor"
)

experts = torch.ops.fastgraph.experts.default


def experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Arguments as in `fastgraph.ops.experts`. Reads on the host how many tokens each expert has."""
    tokens, top_k = ids.shape
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    y = x.new_empty(tokens * top_k, x.shape[1])
    for rows in order.split(chosen.bincount(minlength=len(gate_up)).tolist()):
        if len(rows):
            expert = chosen[rows[0]]
            biases = (None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias))
            gate, up = F.linear(x[rows // top_k], gate_up[expert], next(biases)).chunk(2, dim=-1)
            h = swiglu_reference(gate, up, limit)
            y[rows] = F.linear(h, down[expert], next(biases))
    out = (y.view(tokens, top_k, -1) * weights[..., None]).sum(1).to(x.dtype)
    return out if residual is None else residual + out


def route_reference(logits: Tensor, top_k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Arguments and results as of `fastgraph.ops.route`."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, sorted=False)
    return weights / weights.sum(-1, keepdim=True) if normalised else weights, ids


def swiglu_reference(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202); where `limit` > 0, as in transformers' models/gpt_oss/modeling_gpt_oss.py."""
    if not limit:
        return F.silu(gate) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(STEEPNESS * gate) * (up.clamp(-limit, limit) + 1)


def _experts(x: Tensor, *rest: Tensor) -> Tensor:
    return serving.kernels(x.device.type)["experts"](x, *rest)


_LIBRARY.impl("experts", _experts, "CompositeExplicitAutograd")


@torch.library.register_fake("fastgraph::experts", lib=_LIBRARY)
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
