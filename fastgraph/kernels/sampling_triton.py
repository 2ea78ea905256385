"""The sampler on a GPU: the tokens of `sampling._sample_batch`, from about one read of the logits and without sorting.

`scan` reads every logit once and leaves three numbers for each group of 32 tokens: the largest logit, how far the
best of them could get with its noise, and what they weigh. `_choose`, a program a row, opens the groups that matter.
A filter keeps a prefix of the ranking, so no row is sorted: a token is drawn from all, and drawn again from those that
rank above it for as long as it lies outside; FlashInfer's samplers without sorting do so with plain random numbers
(flashinfer.ai/2025/03/10/sampling.html), here the draw is the highest score, so the token is the one that sorting
would give. What does not decide is approximate, with a margin; what does is computed as the reference computes it.

The grids depend on rows and vocabulary alone, and each row reads its own parameters: nothing asks the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgraph.kernels.launch import can_overlap, cdiv, gdc_launch_dependents, gdc_wait, power_of_two
from fastgraph.kernels.sampling import SamplerOutput, SamplerState
from fastgraph.kernels.sampling_groups import (
    HIGHEST,
    LOWEST,
    UNIT,
    Row,
    draw,
    floor_of,
    highest,
    id_of,
    list_from,
    logit,
    order_of,
    rank_of,
    reached_by,
    top_of,
    value_of,
    weigh,
    weight_of,
)
from fastgraph.kernels.sampling_scan import EACH, LANES, LOG2E, TILE, changes, keys_of, log, ordered, scan

# Approximate weights add up to within a relative 1e-4; where that leaves an edge in doubt, exact ones decide.
_NEAR = 2e-4


class _Strides(NamedTuple):
    seed: int
    seed_half: int
    stop_ids: int
    bias_ids: int
    bias_values: int
    output_counts: int
    prompt_tokens: int


class _Groups(NamedTuple):
    """What `scan` knows of each group, [rows, groups] float32 each. Powers and logarithms are of base 2."""

    maxima: Tensor  # largest logit after biases, penalties and bans
    # Upper bound of its scores, relative to what `maxima` has without noise; if a row with no top_k samples.
    reach: Tensor
    weights: Tensor  # sum of the softmax's numerators relative to `maxima`; if that row has a top_p
    raw_maxima: Tensor  # the model's own logits, if the row reports log-probabilities
    raw_weights: Tensor


def sample_rows(logits: Tensor, slots: Tensor, vocab_limit: int, state: SamplerState, out: SamplerOutput) -> None:
    """As `sampling.sample`, in two launches whatever the rows ask for.

    logits: float32, bfloat16 or float16; a row is contiguous. The state's columns and the rows of its tables are
    contiguous too, but for the halves of the seeds; `out` is.
    """
    rows, width = logits.shape
    if not rows:
        return
    tiles = cdiv(vocab_limit, TILE.value)
    groups = tiles * LANES.value
    known = _Groups(*torch.empty(len(_Groups._fields), rows, groups, device=logits.device).unbind())
    adjusted = torch.empty(rows, tiles * TILE.value, device=logits.device)  # rows that change nothing leave it alone
    listed = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    tables = (state.stop_ids, state.bias_ids, state.bias_values, state.output_counts, state.prompt_tokens)
    strides = _Strides(*state.seed.stride(), *(table.stride(0) for table in tables))
    shared = (logits, logits.stride(0), width, vocab_limit, slots, state, strides, adjusted, known, groups)
    lengths = [n for table in tables[:2] for n in (table.shape[1], power_of_two(table.shape[1]))]
    most = out.top_ids.shape[1]
    vector = 16 // logits.element_size()
    overlap = can_overlap(logits.device)
    # Products and sums stay apart, as in PyTorch; where fusing them is wanted, the kernels say so.
    options = {"enable_fp_fusion": False, "launch_pdl": overlap}
    scan[(tiles, rows)](*shared, *lengths, vector, overlap, num_warps=LANES.value // 32, **options)
    sizes = (vector, most, power_of_two(most))
    _choose[(rows,)](*shared, listed, out, _NEAR, *sizes, overlap, num_warps=8, maxnreg=128, **options)


@triton.jit
def _sampled(row, top, state, strides, slot, near, VECTOR: tl.constexpr):
    """The token of a row with a temperature; `top` is its largest logit."""
    temperature = tl.maximum(tl.load(state.temperature + slot), 2.0**-126)
    top_k = tl.load(state.top_k + slot)
    top_p = tl.load(state.top_p + slot)
    lowest = log(tl.load(state.min_p + slot))
    first, second = keys_of(state, strides, slot)
    everything = (top_k <= 0) | (top_k >= row.limit)
    least = tl.full((), -(2**31), tl.int32)
    floor = tl.full((), LOWEST, tl.int64) + 1  # any token
    if not everything:
        least = reached_by(row, top_k)
        n = list_from(row, least)
        floor = floor_of(row, n, top_k, least.to(tl.int64) << 32, (ordered(top).to(tl.int64) + 1) << 32, VECTOR)
        least = order_of(floor)
    token = draw(row, floor, top, temperature, lowest, first, second, everything, VECTOR)
    if top_p < 1:
        share = top_p.to(tl.float64)
        if everything:
            total = weight_of(row, top, LOG2E / tl.maximum(temperature, 1e-30)).to(tl.float64) * UNIT
        else:
            total = weigh(row, list_from(row, least), floor, top, temperature, VECTOR, False)
        outside = 1
        while outside > 0:
            above = rank_of(logit(row, token), token) + 1
            before = weigh(row, list_from(row, order_of(above)), above, top, temperature, VECTOR, False)
            edge = share * total
            if tl.abs(before - edge) <= near * total:
                n = list_from(row, least)
                before = weigh(row, n, above, top, temperature, VECTOR, True)
                edge = share * weigh(row, n, floor, top, temperature, VECTOR, True)
            outside = tl.where((before > 0) & (before >= edge), 1, 0)
            if outside > 0:
                token = draw(row, above, top, temperature, lowest, first, second, everything, VECTOR)
    return token


@triton.jit
def _report(row, token, wanted, ids, logprobs, MOST: tl.constexpr, VECTOR: tl.constexpr):
    """`sampling._report` of one row, of raw logits. -> log-probability of the token, number of alternatives"""
    top = top_of(row)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = base + log(weight_of(row, base, LOG2E))
    alternatives = tl.minimum(tl.minimum(wanted, MOST), row.limit)
    if alternatives > 0:
        n = list_from(row, reached_by(row, alternatives))
        rank = tl.full((), HIGHEST, tl.int64)
        for i in range(alternatives):
            rank = highest(row, n, rank, VECTOR)
            tl.store(ids + i, id_of(rank))
            tl.store(logprobs + i, value_of(rank) - total)
    return logit(row, token) - total, alternatives


@triton.jit
def _choose(
    logits,
    stride,
    width,
    limit,
    slots,
    state,
    strides,
    adjusted,
    known,
    groups,
    listed,
    out,
    near,
    VECTOR: tl.constexpr,
    MOST: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    temperature = tl.load(state.temperature + slot)
    top_k = tl.load(state.top_k + slot)
    wanted = tl.load(state.logprobs + slot)
    biased, penalised, early = changes(state, strides, slot)
    changed = biased | penalised | early
    if OVERLAP:
        gdc_wait()
    logits += i * stride
    adjusted += i * groups * EACH
    listed += i * groups
    at = i * groups
    token, logprob, alternatives = 0, 0.0, 0
    if slot > 0:
        maxima, reach, weights = known.maxima + at, known.reach + at, known.weights + at
        row = Row(logits, adjusted, changed, width, limit, maxima, reach, weights, groups, listed)
        maxima, weights = known.raw_maxima + at, known.raw_weights + at
        raw = Row(logits, adjusted, False, width, limit, maxima, reach, weights, groups, listed)
        top = top_of(row)
        if (temperature > 0) & (top_k != 1) & (tl.abs(top) < float("inf")):
            token = _sampled(row, top, state, strides, slot, near, VECTOR)
        else:
            # The lowest id is in the first tile that has one: in one of as many groups.
            n = tl.minimum(list_from(row, ordered(top)), LANES)
            token = id_of(highest(row, n, tl.full((), HIGHEST, tl.int64), VECTOR))
            if changed & ((top != top) | (top == -float("inf"))):
                # The adjusted logits leave no choice; the groups of the model's own may be unknown.
                n = list_from(row, tl.full((), -(2**31), tl.int32))
                token = id_of(highest(raw, n, tl.full((), HIGHEST, tl.int64), VECTOR))
        if penalised:
            count = state.output_counts + slot * strides.output_counts + token
            tl.store(count, tl.minimum(tl.load(count).to(tl.int32) + 1, 32767).to(tl.int16))
        if wanted >= 0:
            ids, logprobs = out.top_ids + i * MOST, out.top_logprobs + i * MOST
            logprob, alternatives = _report(raw, token, wanted, ids, logprobs, MOST, VECTOR)
    tl.store(out.tokens + i, token)
    tl.store(out.logprobs + i, logprob)
    place = tl.arange(0, PADDED)
    unused = (place >= alternatives) & (place < MOST)
    tl.store(out.top_ids + i * MOST + place, tl.full((PADDED,), -1, tl.int32), mask=unused)
    tl.store(out.top_logprobs + i * MOST + place, tl.full((PADDED,), -float("inf"), tl.float32), mask=unused)
