"""The one attention op. A compiled graph sees it as a black box; what runs inside is chosen by the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgraph.kernels.reference import attend_reference

# A plain library op rather than `torch.library.custom_op`, whose wrapper costs 45 µs a call on a CPU, in every layer.
_LIBRARY = torch.library.Library("fastgraph", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, "
    "Tensor lengths, Tensor slots, Tensor query_start, Tensor(c!) out, float scale, int window) -> ()"
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    slots: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
    window: int,
) -> None:
    """Write the step's keys and values into the pages, then attend causally over all that each row has there.

    q, out: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], heads a multiple of kv_heads.
    k_cache, v_cache: [pages, page_size, kv_heads, head_dim]; cells that were never written may hold NaN.
    page_table: [slots, pages_per_slot] int32; lengths: [slots] int32, tokens whose KV was there before this step.
    slots: [rows] int32; query_start: [rows + 1] int32: row r owns tokens [query_start[r], query_start[r + 1]), which
    stand at positions lengths[slots[r]] and on. Slot 0 and page 0 belong to padding rows: any number of rows may name
    slot 0, whose length stays 0, and nobody reads what they write.
    `window` > 0 lets a token see only itself and the `window - 1` before it.
    """
    torch.ops.fastgraph.paged_attention.default(
        q, k, v, k_cache, v_cache, page_table, lengths, slots, query_start, out, scale, window
    )


_LIBRARY.impl("paged_attention", attend_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("fastgraph::paged_attention", lib=_LIBRARY)
def _fake(*_: object) -> None:
    """Everything it makes, it writes into its arguments."""
