"""How the contexts of a decode step are cut into splits, on the device and once for all layers.

Long rows are cut so that none keeps the others waiting, and few rows so that they fill the machine. Of many rows the
long splits come first.
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
_SIDE_BY_SIDE = 8  # programs of heads of 128 on one multiprocessor: two for each quarter of its registers
_LEAST = 64  # programs, below which even short splits are cut
_MOST = tl.constexpr(8)  # times `least`: the splits of a row


class SplitPlan(NamedTuple):
    """What the cutting depends on beside the lengths. As measured on an H200, for head dimensions of 64 and 128."""

    wave: int  # splits that run side by side
    least: int  # splits, below which even short ones are cut
    block: int  # tokens that a program reads at a time
    cut: int  # rows that may be cut at most: each counts its splits, in a place of its own for each kv head


@cache
def split_plan(kv_heads: int, head_dim: int, multiprocessors: int) -> SplitPlan:
    wave = _SIDE_BY_SIDE * max(128 // head_dim, 1) * multiprocessors // kv_heads
    block = 32 if head_dim <= 128 else 16  # what registers hold
    return SplitPlan(max(wave, 1), max(_LEAST // kv_heads, 1), block, COUNTERS // kv_heads)


def lay_out(pages: Pages, plan: SplitPlan, window: int) -> Tensor:
    """Cut the contexts of all rows of one token: [most, 8] int32 of the splits; an unused one has counter -1.

    Fewer rows than a wave are cut into one full wave of splits, for a multiprocessor that has fewer of them than others
    waits for these in the end; into two, where the lengths would leave a quarter of one empty. But splits of less than
    128 tokens are only worth it where there would not even be `least` of them. Of more rows only those are cut that are
    longer than the mean by some, so that there are `spare_splits` more splits than rows at most. A row has `_MOST` *
    `least` splits at most: they are added up one after the other.
    """
    rows = len(pages.slots)
    # Programs that find no split cost little, but not nothing.
    most = min(most_splits(rows, plan), rows * _MOST.value * plan.least)
    splits = torch.empty(most, FIELDS.value, dtype=torch.int32, device=pages.slots.device)
    width = max(power_of_two(rows), 64)
    counts = (rows, most, plan.wave, plan.least, plan.cut)
    sizes = (window, pages.k_cache.shape[1], plan.block, width)
    warps = max(4, min(width // 128, 16))
    _lay_out[(1,)](pages.slots, pages.lengths, pages.query_start, splits, *counts, *sizes, num_warps=warps)
    return splits


def most_splits(rows: int, plan: SplitPlan) -> int:
    """Of so many rows, whatever their lengths."""
    if rows < plan.wave:
        return plan.wave if rows <= plan.wave // 4 else 2 * plan.wave
    return rows + spare_splits(rows, plan)


def spare_splits(rows: int, plan: SplitPlan) -> int:
    """How many more splits than rows there may be, of a wave of rows or more."""
    return max(plan.wave, min(rows * 5 // 8, plan.cut))


@triton.jit
def _cut(context, longest, of_row, BLOCK: tl.constexpr):
    """How many tokens a split of each row has, and how many splits a row: even ones, of about `longest` at most.

    of_row: the most splits that a row may have.
    """
    parts = tl.maximum(tl.cdiv(context, tl.maximum(tl.cdiv(context, of_row), longest)), 1)
    per = tl.maximum(tl.cdiv(tl.cdiv(context, parts), BLOCK) * BLOCK, BLOCK)
    return per, tl.maximum(tl.cdiv(context, per), 1)


@triton.jit
def _fitting(context, mine, total, live, splits, floor, of_row, BLOCK: tl.constexpr):
    """The shortest bound of a split's length, of sixteen, with which there are no more than so many splits > live.

    It is total / splits if every split is as long as that, and total / (splits - live) is enough in any case.
    """
    low, high = -1, 15
    for _ in range(4):
        middle = (low + high) // 2
        longest = tl.maximum(tl.cdiv(total, splits - live * middle // 15), floor)
        _, count = _cut(context, longest, of_row, BLOCK)
        fits = tl.sum(tl.where(mine, count, 0)) <= splits
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    return tl.maximum(tl.cdiv(total, splits - live * high // 15), floor)


@triton.jit(do_not_specialize=["rows", "most", "wave", "least", "cut"])  # they differ from step to step
def _lay_out(
    slots,
    lengths,
    query_start,
    splits,
    rows,
    most,
    wave,
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
    context = n - begin
    # Of the rows of one token, and not of those that are padding or prompts: there may be many of these.
    live = tl.sum(mine.to(tl.int32))
    total = tl.sum(context)
    floor = tl.maximum(tl.minimum(total // least, 128), 1)
    if live >= wave:
        longest = tl.cdiv(total, tl.maximum(wave, tl.minimum(live * 5 // 8, cut)))  # as in `spare_splits`
        longest = tl.maximum(tl.maximum(longest, total // live * 5 // 4), 1)
    elif total <= floor * (wave - live):
        longest = floor
    else:
        longest = _fitting(context, mine, total, live, wave, floor, _MOST * least, BLOCK)
        if (live > wave // 4) & (total // longest * 4 < 3 * wave):  # as in `most_splits`
            half = _fitting(context, mine, total, live, 2 * wave, floor, _MOST * least, BLOCK)
            longest = tl.where(2 * half <= longest + BLOCK, half, longest)
    per, count = _cut(context, longest, _MOST * least, BLOCK)
    count = tl.where(mine, count, 0)
    first = tl.cumsum(count) - count
    if ROWS > 64:
        # The long ones come first, by quarters of the longest, so that what runs last is short.
        widest = tl.maximum(tl.max(tl.where(mine, per, 0)), 1)
        quarter = tl.minimum(4 * per // widest, 3)
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
