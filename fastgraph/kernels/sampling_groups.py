"""Passes of one program over a row's groups of tokens, as `sampling_scan.scan` left them: the sampler's second pass.

A row's groups are looked through 1024 at a time; those that matter are listed, and then opened, token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.sampling_scan import EACH, LANES, LOG2E, TILE, exp, largest, log, mix, ordered

_WIDTH = tl.constexpr(1024)  # groups looked at in one go
_FEW = tl.constexpr(32)  # groups opened in one go
_MANY = tl.constexpr(128)

# A rank is 64 bits: the logit as an ordered integer, then the id inverted. No two tokens of a row have the same, and
# none has the lowest.
LOWEST = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)
_ID = tl.constexpr(2**31 - 1)

UNIT = tl.constexpr(2.0**35)  # as in `sampling._mass`
# The bound on the noise that `scan` uses, (1 - u) + (1 - u)^2 / 2 for -log u, is too wide by 2^3.472 at the most.
_SLACK = tl.constexpr(3.5)
_ROUNDING = tl.constexpr(0.01)  # float32's share in a bound


class Row(NamedTuple):
    """A row as the passes see it: pointers to its logits and groups, and numbers."""

    logits: Tensor  # the model's
    adjusted: Tensor  # float32, with biases, penalties and bans
    changed: Tensor | bool  # whether the adjusted ones count
    width: Tensor  # of the logits in memory
    limit: Tensor  # of the ids
    maxima: Tensor
    reach: Tensor
    weights: Tensor
    groups: Tensor  # how many there are
    listed: Tensor  # int32, those that the next pass opens


# --- ranks ---


@triton.jit
def rank_of(x, id):
    """The one of two tokens that has the larger value, or the lower id, has the higher rank. -> int64"""
    return (ordered(x).to(tl.int64) << 32) | (id ^ _ID)


@triton.jit
def id_of(rank):
    return ((rank & _ID) ^ _ID).to(tl.int32)


@triton.jit
def value_of(rank):
    bits = order_of(rank)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def order_of(rank):
    return (rank >> 32).to(tl.int32)


@triton.jit
def logit(row, token):
    return tl.load(row.adjusted + token) if row.changed else tl.load(row.logits + token).to(tl.float32)


# --- over the groups ---


@triton.jit
def _look(pointer, start, groups):
    group = start + tl.arange(0, _WIDTH)
    return tl.load(pointer + group, mask=group < groups, other=-float("inf"))


@triton.jit
def top_of(row):
    """The largest logit; NaN if there is one."""
    top = tl.full((_WIDTH,), -float("inf"), tl.float32)
    for start in range(0, row.groups, _WIDTH):
        top = tl.maximum(top, _look(row.maxima, start, row.groups), propagate_nan=tl.PropagateNan.ALL)
    return largest(top, 0)


@triton.jit
def weight_of(row, base, scale):
    """What all of the row weighs next to a logit `base`; `scale` turns differences of logits to powers of two."""
    total = tl.zeros((_WIDTH,), tl.float32)
    for start in range(0, row.groups, _WIDTH):
        maxima = _look(row.maxima, start, row.groups)
        bases = tl.where(tl.abs(maxima) == float("inf"), 0.0, maxima)
        weights = _look(row.weights, start, row.groups) * tl.exp2((bases - base) * scale)
        total += tl.where(maxima == -float("inf"), 0.0, weights)
    return tl.sum(total)


@triton.jit
def reached_by(row, k):
    """A logit, as an ordered integer, that at least k groups reach, and not many more if that can be."""
    low = tl.full((), -(2**31), tl.int64)
    high = ordered(top_of(row)).to(tl.int64) + 1
    reached = tl.full((), 2**31 - 1, tl.int32)
    while (reached - _FEW > k) & (low + 1 < high):
        middle = (low + high) >> 1
        count = tl.zeros((_WIDTH,), tl.int32)
        for start in range(0, row.groups, _WIDTH):
            count += (ordered(_look(row.maxima, start, row.groups)) >= middle.to(tl.int32)).to(tl.int32)
        n = tl.sum(count)
        low, high = tl.where(n >= k, middle, low), tl.where(n >= k, high, middle)
        reached = tl.where(n >= k, n, reached)
    return low.to(tl.int32)


@triton.jit
def _reach(row, start, top, per_unit):
    """What the scores of each group do not exceed, in powers of two."""
    return tl.fma(_look(row.maxima, start, row.groups) - top, per_unit, _look(row.reach, start, row.groups))


@triton.jit
def _furthest(row, order, top, per_unit):
    """The farthest reach of a group whose largest logit is at `order` or above."""
    best = tl.full((_WIDTH,), -float("inf"), tl.float32)
    for start in range(0, row.groups, _WIDTH):
        high = ordered(_look(row.maxima, start, row.groups)) >= order
        best = tl.maximum(best, tl.where(high, _reach(row, start, top, per_unit), -float("inf")))
    return tl.max(best, 0)


@triton.jit
def list_groups(row, order, level, top, per_unit):
    """List the groups with a logit at `order` or above and a reach of `level` or above, in their order.

    Returns how many they are. A level of -inf asks nothing of the reach.
    """
    tl.debug_barrier()  # nobody reads the list before
    n = 0
    for start in range(0, row.groups, _WIDTH):
        group = start + tl.arange(0, _WIDTH)
        wanted = (group < row.groups) & (ordered(_look(row.maxima, start, row.groups)) >= order)
        if level > -float("inf"):
            wanted &= _reach(row, start, top, per_unit) >= level
        more = tl.sum(wanted.to(tl.int32))
        if more > 0:  # seldom, of the few that the largest logit needs
            tl.store(row.listed + n + tl.cumsum(wanted.to(tl.int32), 0) - 1, group, mask=wanted)
            n += more
    tl.debug_barrier()
    return n


@triton.jit
def list_from(row, order):
    return list_groups(row, order, -float("inf"), 0.0, 0.0)


# --- over the tokens of the listed groups ---


@triton.jit
def _open(row, start, n, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of the groups from `start` in the list: logits, ranks (LOWEST past the end) and ids [BLOCK, EACH]."""
    i = start + tl.arange(0, BLOCK)
    group = tl.load(row.listed + i, mask=i < n, other=0)
    each = tl.arange(0, EACH)
    each = each // VECTOR * (LANES * VECTOR) + each % VECTOR
    id = (group // LANES * TILE + group % LANES * VECTOR)[:, None] + each[None, :]
    ok = (i < n)[:, None] & (id < row.width)
    if row.changed:
        x = tl.load(row.adjusted + id, mask=ok, other=0.0)
    else:
        x = tl.load(row.logits + id, mask=ok, other=0.0).to(tl.float32)
    return x, tl.where(ok & (id < row.limit), rank_of(x, id), LOWEST), id


@triton.jit
def highest(row, n, below, VECTOR: tl.constexpr):
    """The highest rank below another."""
    best = tl.full((), LOWEST, tl.int64)
    for start in range(0, n, _FEW):
        _, rank, _ = _open(row, start, n, VECTOR, _FEW)
        best = tl.maximum(best, tl.max(tl.where(rank < below, rank, LOWEST)))
    return best


@triton.jit
def _count(row, n, floor, VECTOR: tl.constexpr):
    """How many tokens rank from `floor` up."""
    count = 0
    for start in range(0, n, _MANY):
        _, rank, _ = _open(row, start, n, VECTOR, _MANY)
        count += tl.sum((rank >= floor).to(tl.int32))
    return count


@triton.jit
def floor_of(row, n, k, low, high, VECTOR: tl.constexpr):
    """The highest rank, from `low` up, that k tokens reach: by halving, until no more than k do."""
    reached = _count(row, n, low, VECTOR)
    while (reached > k) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count = _count(row, n, middle, VECTOR)
        low, high = tl.where(count >= k, middle, low), tl.where(count >= k, high, middle)
        reached = tl.where(count >= k, count, reached)
    return low


@triton.jit
def weigh(row, n, floor, top, temperature, VECTOR: tl.constexpr, EXACT: tl.constexpr):
    """What the tokens from `floor` up weigh, in units of `sampling._mass`. -> float64, of a whole number if exact."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, n, _MANY):
        x, rank, _ = _open(row, start, n, VECTOR, _MANY)
        if EXACT:
            mass = (exp(tl.div_rn(x - top, temperature)) * UNIT).to(tl.int64)
            total += tl.sum(tl.where(rank >= floor, mass, 0)).to(tl.float64)
        else:
            weight = tl.exp2((x - top) * (LOG2E / tl.maximum(temperature, 1e-30)))
            total += tl.sum(tl.where(rank >= floor, weight, 0.0)).to(tl.float64) * UNIT
    return total


@triton.jit
def draw(row, floor, top, temperature, lowest, first, second, bounded, VECTOR: tl.constexpr):
    """The token of the highest score among those that rank from `floor` up and are `lowest` or above when scaled.

    Groups are opened from the most promising down, until none that is left can have a better one; all at once if
    `scan` has not bounded them.
    """
    per_unit = LOG2E / tl.maximum(temperature, 1e-30)
    level = -float("inf")
    if bounded:
        level = _furthest(row, order_of(floor), top, per_unit)
    best = tl.full((), LOWEST, tl.int64)
    searching = 1
    while searching > 0:
        level -= _SLACK
        n = list_groups(row, order_of(floor), level, top, per_unit)
        for start in range(0, n, _FEW):
            x, rank, id = _open(row, start, n, VECTOR, _FEW)
            scaled = tl.div_rn(x - top, temperature)
            bits = mix(mix(id.to(tl.uint32) ^ first) ^ second)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * (2.0**-23)
            score = rank_of(scaled - log(-log(uniform)), id)
            best = tl.maximum(best, tl.max(tl.where((rank >= floor) & (scaled >= lowest), score, LOWEST)))
        # The value of LOWEST is NaN, and above nothing.
        searching = tl.where(value_of(best) * LOG2E - _ROUNDING >= level, 0, 1)
    return id_of(best)
