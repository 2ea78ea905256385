"""Paged attention in plain PyTorch: what runs on a CPU, and what every other implementation is tested against."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_reference(
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
    """Write k and v into their pages, then fill `out`. Arguments as in `fastgraph.kernels.attention`.

    Reads row boundaries and lengths on the host, so it cannot be captured in a CUDA graph.
    """
    starts = query_start.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    before = lengths[slots]  # [rows]
    cells = _new_cells(page_table, slots, before, query_start, counts, k_cache.shape[1])
    keys, values = _cells_of(k_cache), _cells_of(v_cache)
    keys.index_copy_(0, cells, k)
    values.index_copy_(0, cells, v)

    totals = [b + c for b, c in zip(before.tolist(), counts, strict=True)]
    single = [r for r, count in enumerate(counts) if count == 1]
    # Rows are padded to the longest; where that would more than double the work, each goes alone.
    together = len(single) > 1 and len(single) * max(totals[r] for r in single) <= 2 * sum(totals[r] for r in single)
    if together and len(single) == len(counts):
        _attend_singles(q, keys, values, page_table, slots, before, out, k_cache.shape[1], scale, window)
        return
    if together:
        rows = torch.tensor(single, device=q.device)
        tokens = query_start[rows]
        part = torch.empty_like(q[: len(single)])
        _attend_singles(
            q[tokens], keys, values, page_table, slots[rows], before[rows], part, k_cache.shape[1], scale, window
        )
        out[tokens] = part
    for r, (start, count) in enumerate(zip(starts, counts, strict=False)):
        if count > 1 or (count == 1 and not together):
            pages = page_table[slots[r]]
            _attend_row(
                q[start : start + count], k_cache, v_cache, pages, totals[r], out[start : start + count], scale, window
            )


def _cells_of(cache: Tensor) -> Tensor:
    """The cache with pages and their tokens on one axis. [pages * page_size, kv_heads, head_dim], always a view."""
    return cache.view(-1, cache.shape[2], cache.shape[3])


def _new_cells(
    page_table: Tensor, slots: Tensor, before: Tensor, query_start: Tensor, counts: list[int], page_size: int
) -> Tensor:
    """Where the step's tokens are stored. [tokens] int64"""
    if max(counts) == 1 == min(counts):
        positions = before.long()
    else:
        repeats = torch.tensor(counts, device=slots.device)
        slots = slots.repeat_interleave(repeats)
        offsets = (before - query_start[:-1]).repeat_interleave(repeats)
        positions = torch.arange(len(slots), device=slots.device) + offsets
    pages = page_table[slots, positions // page_size].long()
    return pages * page_size + positions % page_size


def _attend_singles(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    before: Tensor,
    out: Tensor,
    page_size: int,
    scale: float,
    window: int,
) -> None:
    """One token a row, all rows in one call, padded to the longest. q, out: [rows, heads, head_dim]"""
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    last = before.long()[:, None]  # [rows, 1], position of the row's token
    longest = int(last.max()) + 1
    first = 0 if window == 0 else max(0, int(last.min()) + 1 - window)
    positions = torch.arange(first, longest, device=q.device)  # [span]
    # Past a row's end stand cells that may hold NaN, which a mask does not silence (NaN * 0 is NaN). They are replaced
    # by the row's own new token, which is finite, and then masked.
    inside = torch.minimum(positions, last)  # [rows, span]
    table = page_table[slots, : (longest - 1) // page_size + 1].long()
    cells = table.gather(1, inside // page_size) * page_size + inside % page_size  # [rows, span]
    mask = positions <= last
    if window:
        mask &= positions > last - window
    gathered_k = keys.index_select(0, cells.view(-1)).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    gathered_v = values.index_select(0, cells.view(-1)).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    # The heads that share keys become query positions of one head: keys are read once.
    grouped = q.view(rows, kv_heads, heads // kv_heads, head_dim)
    y = F.scaled_dot_product_attention(grouped, gathered_k, gathered_v, attn_mask=mask[:, None, None], scale=scale)
    out.copy_(y.reshape(rows, heads, head_dim))


def _attend_row(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, total: int, out: Tensor, scale: float, window: int
) -> None:
    """The tokens of one row, the last of them at position total - 1. q, out: [tokens, heads, head_dim]"""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    lowest = 0 if window == 0 else max(0, total - tokens + 1 - window)  # nothing before it is seen
    first = lowest // page_size
    pages = pages[first : (total - 1) // page_size + 1]
    keys = _gather(k_cache, pages)[lowest - first * page_size : total - first * page_size].transpose(0, 1)
    values = _gather(v_cache, pages)[lowest - first * page_size : total - first * page_size].transpose(0, 1)
    if tokens == 1:  # everything that was gathered is seen
        grouped = q.view(1, kv_heads, heads // kv_heads, head_dim)
        y = F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
        out.copy_(y.view(1, heads, head_dim))
        return
    span = total - lowest
    plain = span == tokens and (window == 0 or window >= tokens)
    mask = None
    if not plain:
        query = torch.arange(span - tokens, span, device=q.device)[:, None]
        key = torch.arange(span, device=q.device)
        mask = key <= query
        if window:
            mask &= key > query - window
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=plain,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    out.copy_(y[0].transpose(0, 1))


def _gather(cache: Tensor, pages: Tensor) -> Tensor:
    """The cells of some pages. [len(pages) * page_size, kv_heads, head_dim], a view where the pages adjoin."""
    listed = pages.tolist()
    if listed == list(range(listed[0], listed[0] + len(listed))):
        return _cells_of(cache[listed[0] : listed[0] + len(listed)])
    return _cells_of(cache.index_select(0, pages))
