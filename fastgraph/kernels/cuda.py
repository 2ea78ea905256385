"""The ops of a step as a GPU runs them: opaque to the compiler, because each picks its kernel by the real batch.

A compiled graph serves every number of rows. What is best for one row is not best for a thousand, so the choice is
made inside the op, when it is called or captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fastgraph", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, bool gated, Tensor? residual) -> Tensor"
)
_LIBRARY.define(
    "rotate_and_attend(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, "
    "float eps, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, Tensor lengths, Tensor slots, "
    "Tensor query_start, Tensor positions, Tensor token_slots, float scale, int window) -> Tensor"
)

linear = torch.ops.fastgraph.linear.default
rotate_and_attend = torch.ops.fastgraph.rotate_and_attend.default


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    from fastgraph.kernels import linear as kernels  # triton, which a CPU may lack

    return kernels.linear(x, weight, bias, norm, eps, gated, residual)


def _rotate_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    slots: Tensor,
    query_start: Tensor,
    positions: Tensor,
    token_slots: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    from fastgraph.kernels import decode_attention, prefill_attention, rotary

    if len(q) == len(slots):  # every row has one token
        return decode_attention.decode_attention(
            q, k, v, cos, sin, k_cache, v_cache, page_table, lengths, slots, scale, window, q_norm, k_norm, eps
        )
    q = rotary.rotate_and_write(
        q, k, v, cos, sin, k_cache, v_cache, page_table, positions, token_slots, q_norm, k_norm, eps
    )
    return prefill_attention.prefill_attention(
        q, k_cache, v_cache, page_table, lengths, slots, query_start, scale, window
    )


_LIBRARY.impl("linear", _linear, "CUDA")
_LIBRARY.impl("rotate_and_attend", _rotate_and_attend, "CUDA")


@torch.library.register_fake("fastgraph::linear", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, bias: object, norm: object, eps: float, gated: bool, residual: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))


@torch.library.register_fake("fastgraph::rotate_and_attend", lib=_LIBRARY)
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
