"""The ops in plain PyTorch: what runs on a CPU, and what every other implementation is tested against.

The reference of experts is in `fastgraph.kernels.experts`, that of sampling in `fastgraph.kernels.sampling`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from fastgraph.kernels.attention import Pages, Turn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 (arXiv:1910.07467). Same shape and dtype as x.

    What comes of it is rounded to the weight's dtype before it is multiplied with the weight: Llama's way where that is
    the dtype of x, Gemma's where it is float32.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight * y.to(weight.dtype)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d/2) of each head (arXiv:2104.09864, the half-split order of Hugging Face's checkpoints).

    x: [tokens, heads, head_dim]; cos, sin: [tokens, rotary_dim / 2] float32. Heads wider than the rotary keep the rest.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # [tokens, 1, half]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b, rest = wide.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def gate_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """SwiGLU's or GeGLU's activation, act(gate) * up (arXiv:2002.05202). [tokens, 2 * width] -> [tokens, width].

    activation: "silu", or "gelu" for its tanh approximation (arXiv:1606.08415).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") if activation == "gelu" else F.silu(gate)) * up


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Arguments as in `fastgraph.kernels.linear`; the residual stays what it was."""
    y = F.linear(x if norm is None else rms_norm(x, norm, eps), weight, bias)
    y = gate_mul(y, activation) if gated else y
    return y if residual is None else residual + y


def turned(q: Tensor, k: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """q and k, normed and rotated."""
    if turn.q_norm is not None and turn.k_norm is not None:
        q, k = rms_norm(q, turn.q_norm, turn.eps), rms_norm(k, turn.k_norm, turn.eps)
    if turn.cos is not None and turn.sin is not None:
        q, k = rotary(q, turn.cos, turn.sin), rotary(k, turn.cos, turn.sin)
    return q, k


def rotate_and_write_reference(q: Tensor, k: Tensor, v: Tensor, turn: Turn, pages: Pages) -> Tensor:
    """Norm and rotate q and k, write k and v into their pages, return q."""
    q, k = turned(q, k, turn)
    size = pages.k_cache.shape[1]
    page = pages.page_table[pages.token_slots, pages.positions // size]
    cell = (page.long(), (pages.positions % size).long())
    pages.k_cache[cell], pages.v_cache[cell] = k, v
    return q


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    pages: Pages,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention op, of rows of any length. Arguments as in `fastgraph.kernels.attention`.

    Reads lengths and row boundaries on the host, so it cannot be captured in a CUDA graph.
    """
    q, k = turned(q, k, turn)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    slots = pages.slots
    slot_lengths = pages.lengths.tolist()
    rows = [
        (slot, start, stop - start, slot_lengths[slot] + stop - start)  # slot, first token, tokens, length afterwards
        for slot, (start, stop) in zip(slots.tolist(), pairwise(pages.query_start.tolist()), strict=True)
    ]
    single = [row for row in rows if row[2] == 1]
    totals = [total for *_, total in single]
    # Rows in one call are padded to the longest; where that would more than double the work, each goes alone.
    if len(single) > 1 and len(single) * max(totals) <= 2 * sum(totals):
        if len(single) == len(rows):
            return _attend_single_tokens(q, k, v, pages, slots, totals, scale, window, sinks)
        at = torch.tensor([start for _, start, _, _ in single], device=q.device)
        slots = torch.tensor([slot for slot, *_ in single], device=q.device)
        out[at] = _attend_single_tokens(q[at], k[at], v[at], pages, slots, totals, scale, window, sinks)
        rows = [row for row in rows if row[2] != 1]
    for slot, start, count, total in rows:
        if count:
            mine = slice(start, start + count)
            out[mine] = _attend_one_row(q[mine], k[mine], v[mine], pages, slot, total, scale, window, sinks)
    return out


def _attend_single_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    slots: Tensor,
    totals: list[int],
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """Rows of one token each, padded to the longest. q: [rows, heads, head_dim], as the result is."""
    rows, heads, head_dim = q.shape
    page_size, kv_heads = pages.k_cache.shape[1:3]
    table = pages.page_table.index_select(0, slots)[:, : -(-max(totals) // page_size)].tolist()
    new, cells, mask = _padded_cells(tuple(map(tuple, table)), tuple(totals), page_size, window, q.dtype, q.device)
    keys, values = _by_cell(pages.k_cache), _by_cell(pages.v_cache)
    keys.index_copy_(0, new, k)
    values.index_copy_(0, new, v)
    keys, values = (x.index_select(0, cells).view(rows, -1, kv_heads, head_dim) for x in (keys, values))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [rows, kv_heads, span, head_dim]
    if sinks is not None:
        keys, values, mask = _with_sinks(keys, values, mask, sinks.view(kv_heads, -1, 1))
    # The heads that share keys become the query positions of one head, so that a key is read once.
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return y.reshape(rows, heads, head_dim).contiguous()


@lru_cache(maxsize=1)  # all layers of a step ask for the same
def _padded_cells(
    pages: tuple[tuple[int, ...], ...],
    totals: tuple[int, ...],
    page_size: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cell of each new token [rows], the cells each row sees [rows * span], a mask to add [rows, 1, 1, span]."""
    last = torch.tensor(totals, device=device)[:, None] - 1  # [rows, 1], position of the new token
    lowest = max(0, min(totals) - window) if window else 0  # no row sees what is before it
    positions = torch.arange(lowest, max(totals), device=device)  # [span]
    cells = _cells(torch.tensor(pages, device=device), page_size)  # [rows, pages * page_size]
    new = cells.gather(1, last)  # [rows, 1]
    # Past a row's end and before its window stand cells that may hold NaN, which no mask silences (NaN * 0 is NaN).
    # They are replaced by the row's new token, which is a number, and then masked.
    mask = positions <= last  # [rows, span]
    if window:
        mask &= positions > last - window
    cells = torch.where(mask, cells[:, lowest : max(totals)], new)
    unseen = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, -torch.inf)
    return new[:, 0], cells.view(-1), unseen[:, None, None]


def _attend_one_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    slot: int,
    total: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """The tokens of one row, the last of them at position total - 1. q: [tokens, heads, head_dim], as the result is."""
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = pages.k_cache.shape[1:3]
    lowest = max(0, total - tokens + 1 - window) if window else 0  # no token sees what is before it
    first_page = lowest // page_size
    mine = pages.page_table[slot, first_page : -(-total // page_size)]
    keys, values = _write_and_read(k, v, pages.k_cache, pages.v_cache, mine, total - first_page * page_size)
    skipped = lowest - first_page * page_size
    keys, values = keys[skipped:].transpose(0, 1), values[skipped:].transpose(0, 1)  # [kv_heads, span, head_dim]
    if tokens == 1:  # it sees all of them, and the heads that share keys can be its query positions
        grouped, mask = q.reshape(1, kv_heads, heads // kv_heads, head_dim), None
        if sinks is not None:
            keys, values, mask = _with_sinks(keys, values, q.new_zeros(keys.shape[1]), sinks.view(kv_heads, -1, 1))
        y = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask, scale=scale)
        return y.reshape(1, heads, head_dim)
    span = total - lowest
    mask = None
    causal = span == tokens and (window == 0 or window >= tokens) and sinks is None
    if not causal:
        query = torch.arange(span - tokens, span, device=q.device)[:, None]
        key = torch.arange(span, device=q.device)
        mask = key <= query  # [tokens, span]
        if window:
            mask &= key > query - window
    if mask is not None and sinks is not None:
        unseen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
        keys, values, mask = _with_sinks(keys, values, unseen, sinks.view(-1, 1, 1))
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return y[0].transpose(0, 1)


def _with_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [..., span, head_dim] and a mask to add [..., queries, span], with one key more: zeros that score 0.

    What the mask adds there is the sink, [heads, queries, 1] with 1 for queries that share it.
    """
    rows = torch.broadcast_shapes(mask.shape[:-1], sinks.shape[:-1])
    mask = torch.cat([mask.expand(*rows, -1), sinks.to(mask.dtype).expand(*rows, -1)], dim=-1)
    return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1)), mask


def _by_cell(cache: Tensor) -> Tensor:
    """The cache with its pages end to end. [pages * page_size, kv_heads, head_dim], always a view."""
    return cache.view(-1, cache.shape[2], cache.shape[3])


def _cells(pages: Tensor, page_size: int) -> Tensor:
    """The cells of each page in turn. [..., pages] -> [..., pages * page_size] int64"""
    return (pages.long()[..., None] * page_size + torch.arange(page_size, device=pages.device)).flatten(-2)


def _write_and_read(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, stop: int
) -> tuple[Tensor, Tensor]:
    """Store k and v in the cells that end at `stop`, counted from the first page on; return all up to there.

    Where the pages adjoin, which they do in a young pool, both are views. [stop, kv_heads, head_dim] each
    """
    page_size, new = k_cache.shape[1], slice(stop - len(k), stop)
    listed = pages.tolist()
    first, after = listed[0], listed[0] + len(listed)
    if listed == list(range(first, after)):
        keys, values = _by_cell(k_cache[first:after]), _by_cell(v_cache[first:after])
        keys[new], values[new] = k, v
    else:
        cells = _cells(pages, page_size)[new]
        _by_cell(k_cache).index_copy_(0, cells, k)
        _by_cell(v_cache).index_copy_(0, cells, v)
        keys, values = _by_cell(k_cache.index_select(0, pages)), _by_cell(v_cache.index_select(0, pages))
    return keys[:stop], values[:stop]
