"""The one attention op. A compiled graph sees it as a black box; what runs inside was chosen when the engine started.

It is opaque because the kernel depends on the real batch: decode steps have one of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgraph.kernels import serving

# A plain library op rather than `torch.library.custom_op`, whose wrapper costs 45 µs a call on a CPU, in every layer.
_LIBRARY = torch.library.Library("fastgraph", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, Tensor lengths, Tensor slots, Tensor query_start, "
    "Tensor positions, Tensor token_slots, float scale, int window, Tensor? sinks) -> Tensor"
)

attention = torch.ops.fastgraph.attention.default


class Turn(NamedTuple):
    """What is done to q and k before anything else: RMSNorm of each head (Qwen3), rotation (arXiv:2104.09864)."""

    cos: Tensor | None  # [tokens, rotary_dim / 2] float32; None where q and k come rotated
    sin: Tensor | None
    q_norm: Tensor | None  # [head_dim], or None
    k_norm: Tensor | None
    eps: float


NO_TURN = Turn(None, None, None, None, 0.0)


class Pages(NamedTuple):
    """Where a step's keys and values go, and those before them are.

    Row r owns tokens [query_start[r], query_start[r + 1]), which stand at positions lengths[slots[r]] and on. Slot 0
    and page 0 belong to padding rows: any number of rows may name slot 0, whose length stays 0, and nobody reads what
    they write.
    """

    k_cache: Tensor  # [pages, page_size, kv_heads, head_dim]; cells that were never written may hold NaN
    v_cache: Tensor
    page_table: Tensor  # [slots, pages_per_slot] int32
    lengths: Tensor  # [slots] int32, tokens whose KV was there before this step
    slots: Tensor  # [rows] int32
    query_start: Tensor  # [rows + 1] int32
    positions: Tensor  # [tokens] int32, of each token in its sequence
    token_slots: Tensor  # [tokens] int32


def _grouped(rest: Sequence[Any]) -> tuple[Turn, Pages, Sequence[Any]]:
    """The op's arguments after q, k and v, as the schema has them; the last are scale, window and sinks."""
    begin, end = len(Turn._fields), len(Turn._fields) + len(Pages._fields)
    return Turn(*rest[:begin]), Pages(*rest[begin:end]), rest[end:]


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Norm and rotate q and k, write k and v into the pages, attend causally over all that each row has there.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], heads a multiple of kv_heads. rest: the
    parts of a `Turn` and of `Pages`, then scale, window and sinks. `window` > 0 lets a token see only itself and the
    `window - 1` before it. sinks: [heads] or None, a logit that takes part in each softmax and whose share is lost
    (arXiv:2309.17453). Returns [tokens, heads, head_dim].
    """
    turn, pages, (scale, window, sinks) = _grouped(rest)
    op = "decode_attention" if len(q) == len(pages.slots) else "prefill_attention"  # one token a row, or chunks too
    kernel = serving.kernels(q.device.type)[op]
    return kernel(q, k, v, turn, pages, scale, window, *(() if sinks is None else (sinks,)))


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")


@torch.library.register_fake("fastgraph::attention", lib=_LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    turn, _, (_, window, sinks) = _grouped(rest)
    serving.ask(rope=turn.cos is not None, norms=turn.q_norm is not None, window=window > 0, sinks=sinks is not None)
    return torch.empty_like(q, memory_format=torch.contiguous_format)
