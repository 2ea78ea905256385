"""How the contexts of a decode step are cut into splits, on the device and once for all layers.

Long rows are cut so that none keeps the others waiting, and few rows so that they fill the machine. Of many splits the
long ones come first.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.attention import Pages
from fastgraph.kernels.launch import COUNTERS, power_of_two

# Of a split: the counter of its row, slot, begin, end; and of the row: length, first split, number of splits, token.
FIELDS = tl.constexpr(8)
_BUSY = 6  # programs for each multiprocessor keep it busy
_LEAST = 64  # programs, below which even short splits are cut
_MOST = tl.constexpr(8)  # times `least`: the splits of a row


class SplitPlan(NamedTuple):
    """What the cutting depends on beside the lengths. As measured on an H200, for head dimensions of 64 and 128."""

    busy: int  # rows from which on most are left whole
    fill: int  # splits that keep the machine busy where the rows are fewer
    least: int  # splits, below which even short ones are cut
    block: int  # tokens that a program reads at a time
    cut: int  # rows that may be cut at most: each counts its splits, in a place of its own for each kv head


@cache
def split_plan(kv_heads: int, head_dim: int, multiprocessors: int) -> SplitPlan:
    busy = max(_BUSY * multiprocessors // kv_heads, 1)
    fill = busy * max(128 // head_dim, 1)  # of narrow heads a program has less to read
    block = 32 if head_dim <= 128 else 16  # what registers hold
    return SplitPlan(busy, fill, max(_LEAST // kv_heads, 1), block, COUNTERS // kv_heads)


def lay_out(pages: Pages, plan: SplitPlan, window: int) -> Tensor:
    """Cut the contexts of all rows of one token: [most, 8] int32 of the splits; an unused one has counter -1.

    Fewer than `busy` rows are cut into about `fill` splits, or twice as many if these have 256 tokens still; but one of
    less than 128 tokens is only worth it where there would not even be `least` of them. Of more rows only those are cut
    that are longer than the mean by some, so that there are `spare_splits` more splits than rows at most. A row has
    `_MOST` * `least` splits at most: they are added up one after the other.
    """
    rows = len(pages.slots)
    # Programs that find no split cost little, but not nothing.
    most = min(rows + spare_splits(rows, plan.fill, plan.cut), rows * _MOST.value * plan.least)
    splits = torch.empty(most, FIELDS.value, dtype=torch.int32, device=pages.slots.device)
    # A kernel for few rows, and one for all others: an engine's page table has more than it can have rows.
    width = 64 if rows <= 64 else power_of_two(max(rows, len(pages.page_table)))
    counts = (rows, most, plan.busy, plan.fill, plan.least, plan.cut)
    sizes = (window, pages.k_cache.shape[1], plan.block, width)
    _lay_out[(1,)](pages.slots, pages.lengths, pages.query_start, splits, *counts, *sizes)
    return splits


def spare_splits(rows: int, fill: int, cut: int) -> int:
    """How many more splits than rows of one token there may be."""
    return max(2 * fill, min(rows * 5 // 8, cut))


@triton.jit(do_not_specialize=["rows", "most", "busy", "fill", "least", "cut"])  # they differ from step to step
def _lay_out(
    slots,
    lengths,
    query_start,
    splits,
    rows,
    most,
    busy,
    fill,
    least,
    cut,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    token = tl.load(query_start + row, mask=row < rows, other=0)
    mine = tl.load(query_start + row + 1, mask=row < rows, other=0) - token == 1
    slot = tl.load(slots + row, mask=mine, other=0)
    n = tl.load(lengths + slot, mask=mine, other=0)
    begin = tl.zeros_like(n)
    if WINDOW:
        begin = tl.maximum(n + 1 - WINDOW, 0) // PAGE * PAGE
    # Of the rows of one token, and not of those that are padding or prompts: there may be many of these.
    live = tl.sum(mine.to(tl.int32))
    total = tl.sum(n - begin)
    longest = tl.cdiv(total, tl.maximum(2 * fill, tl.minimum(live * 5 // 8, cut)))  # as in `spare_splits`
    if live >= busy:
        longest = tl.maximum(longest, total // tl.maximum(live, 1) * 5 // 4)
    else:
        longest = tl.maximum(longest, tl.minimum(tl.cdiv(total, fill), 256))
        longest = tl.maximum(longest, tl.minimum(total // least, 128))
    bound = tl.maximum(tl.cdiv(n - begin, _MOST * least), tl.maximum(longest, BLOCK))  # [rows], of a split's length
    even = tl.cdiv(n - begin, tl.maximum(tl.cdiv(n - begin, bound), 1))
    per = tl.maximum(tl.cdiv(even, BLOCK) * BLOCK, BLOCK)
    count = tl.where(mine, tl.maximum(tl.cdiv(n - begin, per), 1), 0)
    first = tl.cumsum(count) - count
    if ROWS > 64:
        # The long ones come first, by quarters of the longest, so that what runs last is short.
        longest = tl.maximum(tl.max(tl.where(mine, per, 0)), 1)
        quarter = tl.minimum(4 * per // longest, 3)
        earlier = 0
        for i in tl.static_range(4):
            here = tl.where(quarter == 3 - i, count, 0)
            first = tl.where(quarter == 3 - i, earlier + tl.cumsum(here) - here, first)
            earlier += tl.sum(here)
    counts = (count > 1).to(tl.int32)
    counter = tl.cumsum(counts) - counts
    for i in range(tl.max(count)):
        at = splits + (first + i) * FIELDS
        lo = begin + i * per
        tl.store(at, counter, mask=i < count)
        tl.store(at + 1, slot, mask=i < count)
        tl.store(at + 2, lo, mask=i < count)
        tl.store(at + 3, tl.minimum(lo + per, n), mask=i < count)
        tl.store(at + 4, n, mask=i < count)
        tl.store(at + 5, first, mask=i < count)
        tl.store(at + 6, count, mask=i < count)
        tl.store(at + 7, token, mask=i < count)
    for start in range(tl.sum(count), most, ROWS):
        tl.store(splits + (start + row) * FIELDS, -1, mask=start + row < most)
