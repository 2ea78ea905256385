"""From logits to tokens: one opaque op that gives every row its own sampling parameters, in one graph for every batch.

The order is: report raw log-probabilities, logit_bias, repetition, presence and frequency penalties, the ban on
stop ids before min_tokens, temperature, top_k, top_p, min_p, draw. Each filter acts on what the one before left,
renormalised.

Tokens rank by logit, and equal logits by id, the lowest first. So top_k keeps exactly k tokens, the smallest set of
top_p is unique, and both top_k = 1 and temperature 0 are argmax with the lowest id on a tie. Numbers that decide are
integers where an order of summation could matter (`_mass`) and where noise is made (`_noise`), so that a row's token
depends on the row alone, and another implementation can give the same ones.

A row of the null slot 0 (padding, or a chunk that does not end its prompt) gets token 0 and changes no state.
A row with an infinite logit gets that token. A row with all at -inf, or with a NaN, gets the argmax of its raw logits:
bans give way, ids stay valid.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgraph.config import MAX_LOGPROBS
from fastgraph.kernels import serving

_BANNED = -torch.inf

# Noise lies within -log(24 log 2) = -2.82 and 24 log 2 = 16.64, so a token this far below the likeliest never wins.
_REACH = 19.5

# Weights are counted in units of 2^-35 of the likeliest token's: 2^18 tokens sum to 2^53, exact in float64 as well.
# One that is further below than 35 log 2 = 24.3 counts as nothing.
_UNIT = 2.0**35
_DEPTH = 24.5
_BUCKETS = 64  # per unit of depth, when a CPU looks for the edge of top_p


class SamplerState(NamedTuple):
    """Parameters and history of each slot. On a CPU columns may be strided. Slot 0 is the null slot."""

    temperature: Tensor  # [slots] float32, 0 is argmax
    top_k: Tensor  # [slots] int32, 0 is all
    top_p: Tensor  # [slots] float32
    min_p: Tensor  # [slots] float32
    repetition: Tensor  # [slots] float32, 1 is none
    presence: Tensor  # [slots] float32
    frequency: Tensor  # [slots] float32
    seed: Tensor  # [slots, 2] int32, low and high half
    generated: Tensor  # [slots] int32, index in the answer of the token to be sampled
    min_tokens: Tensor  # [slots] int32, stop_ids are banned while generated < min_tokens
    stop_ids: Tensor  # [slots, MAX_STOP_IDS] int32, -1 where unused
    bias_ids: Tensor  # [slots, MAX_LOGIT_BIAS] int32, filled from the left, -1 where unused
    bias_values: Tensor  # [slots, MAX_LOGIT_BIAS] float32
    logprobs: Tensor  # [slots] int32, -1 is none, else the number of alternatives
    output_counts: Tensor  # [slots, vocab] int16, kept (up to 32767) for slots with penalties only
    prompt_tokens: Tensor  # [slots, vocab] bool


class SamplerOutput(NamedTuple):
    """What the caller owns and `sample` fills. Where nothing was asked for: 0, id -1 and -inf."""

    tokens: Tensor  # [rows] int32
    logprobs: Tensor  # [rows] float32, of the sampled token
    top_ids: Tensor  # [rows, MAX_LOGPROBS] int32, likeliest first
    top_logprobs: Tensor  # [rows, MAX_LOGPROBS] float32


def outputs_of(rows: int, **where: Any) -> SamplerOutput:
    """Room for the outputs of so many rows. where: device or pin_memory, as `torch.empty` takes them."""
    return SamplerOutput(
        tokens=torch.empty(rows, dtype=torch.int32, **where),
        logprobs=torch.empty(rows, **where),
        top_ids=torch.empty(rows, MAX_LOGPROBS, dtype=torch.int32, **where),
        top_logprobs=torch.empty(rows, MAX_LOGPROBS, **where),
    )


def sample(logits: Tensor, slots: Tensor, state: SamplerState, vocab_limit: int, out: SamplerOutput) -> None:
    """Sample one token a row into `out`, and count it in `state.output_counts` if its slot has a penalty.

    logits: [rows, vocab], any float, calculated with as float32; slots: [rows] int32, each live slot at most once.
    Ids from `vocab_limit` up are padding of the embedding: never sampled, and no part of any log-probability.
    """
    run = _op if torch.compiler.is_compiling() else _sample
    run(logits, slots, vocab_limit, *state, *out)


def _sample(logits: Tensor, slots: Tensor, vocab_limit: int, *tensors: Tensor) -> None:
    state = SamplerState(*tensors[: len(SamplerState._fields)])
    out = SamplerOutput(*tensors[len(SamplerState._fields) :])
    serving.kernels(logits.device.type)["sample"](logits, slots, vocab_limit, state, out)


def sample_reference(logits: Tensor, slots: Tensor, vocab_limit: int, state: SamplerState, out: SamplerOutput) -> None:
    """`sample` in plain PyTorch: on a CPU row by row, on a GPU without a question asked of the host, but sorting."""
    for part, unused in zip(out, (0, 0, -1, _BANNED), strict=True):
        part.fill_(unused)
    run = _sample_rows if logits.is_cpu else _sample_batch
    run(logits[:, :vocab_limit].float(), slots, state, out)


_WRITTEN = tuple(f"out_{name}" for name in SamplerOutput._fields)
_NAMES = (*SamplerState._fields, *_WRITTEN)
_TENSORS = (f"Tensor{f'(a{i}!)' if n in ('output_counts', *_WRITTEN) else ''} {n}" for i, n in enumerate(_NAMES))
_op = torch.library.custom_op(
    "fastgraph::sample",
    _sample,
    mutates_args=("output_counts", *_WRITTEN),
    schema=f"(Tensor logits, Tensor slots, SymInt vocab_limit, {', '.join(_TENSORS)}) -> ()",
)


@_op.register_fake
def _(*_: object) -> None:
    return None


# --- every row through every stage, with no question asked of the host: what the GPU kernels are tested against ---


def _sample_batch(raw: Tensor, slots: Tensor, state: SamplerState, out: SamplerOutput) -> None:
    at = slots.long()
    mine = _gather(state, at)
    counts, in_prompt = (table[at, : raw.shape[1]] for table in (state.output_counts, state.prompt_tokens))
    adjusted = _ban(_penalise(_bias(raw, mine), counts, in_prompt, mine), mine)
    values, ids = adjusted.sort(dim=-1, descending=True, stable=True)
    top = values[:, 0]
    sampled = (mine.temperature > 0) & top.isfinite()
    scaled = _scale(values, top[:, None], torch.where(sampled, mine.temperature, 1.0)[:, None])
    score = scaled + _noise(ids, *(key[:, None] for key in _keys(mine.seed, mine.generated)))
    drawn = _pick(torch.where(_kept(scaled, mine), score, _BANNED), ids)
    tokens = torch.where(sampled, drawn, ids[:, 0])
    tokens = torch.where(top > _BANNED, tokens, raw.argmax(-1))
    tokens = torch.where(slots > 0, tokens, 0)
    out.tokens.copy_(tokens)
    _count(at, tokens, state)
    wanted = torch.where(slots > 0, mine.logprobs, -1)
    _report(raw, tokens, *raw.sort(dim=-1, descending=True, stable=True), wanted, out)


def _kept(scaled: Tensor, mine: SamplerState) -> Tensor:
    """Which of the ranked tokens the filters leave. scaled: [rows, vocab] -> bool."""
    top_k, top_p, min_p = (column[:, None] for column in (mine.top_k, mine.top_p, mine.min_p))
    keep = (torch.arange(scaled.shape[1], device=scaled.device) < top_k) | (top_k <= 0)
    mass = _mass(scaled) * keep
    before = mass.cumsum(-1) - mass
    # A top_p of 1 leaves out what weighs nothing: tokens that could not win anyhow.
    keep &= before < top_p.double() * mass.sum(-1, keepdim=True)
    return keep & (scaled >= min_p.log())


# --- on a CPU: row by row, and only the stages that the row asks for ---


def _sample_rows(raw: Tensor, slots: Tensor, state: SamplerState, out: SamplerOutput) -> None:
    rows = slots.numpy()
    wants = (
        (state.temperature > 0) & (state.top_k != 1),
        state.bias_ids[:, 0] >= 0,
        _penalised(state),
        state.generated < state.min_tokens,
        state.logprobs >= 0,
    )
    asked = zip(rows.tolist(), *(column.numpy()[rows].tolist() for column in wants), strict=True)
    drawn: list[int] = []
    candidates: list[tuple[Tensor, Tensor]] = []
    remembered: list[int] = []
    reported: list[int] = []
    for row, (slot, sampled, biased, penalised, banned, listed) in enumerate(asked):
        if slot == 0:
            continue
        logits = raw[row : row + 1]
        adjusted = logits
        if biased or penalised or banned:
            mine = SamplerState(*(table[slot : slot + 1] for table in state))
            adjusted = _bias(adjusted, mine) if biased else adjusted
            adjusted = _penalise_seen(adjusted, mine) if penalised else adjusted
            adjusted = _ban(adjusted, mine) if banned else adjusted
        token = _argmax(adjusted)
        top = adjusted[0, token]
        if not top > _BANNED:
            token = _argmax(logits)
        elif sampled and isfinite(top):
            drawn.append(row)
            candidates.append(_candidates(adjusted, top, slot, state))
        out.tokens[row] = token
        if penalised:
            remembered.append(row)
        if listed:
            reported.append(row)
    if drawn:
        at, sizes = slots[drawn].long(), torch.tensor([len(ids) for _, ids in candidates])
        scaled, ids = (torch.cat(part) for part in zip(*candidates, strict=True))
        keys = (key.repeat_interleave(sizes) for key in _keys(state.seed[at], state.generated[at]))
        score = (scaled + _noise(ids, *keys)).split(sizes.tolist())
        for row, mine_score, mine_ids in zip(drawn, score, ids.split(sizes.tolist()), strict=True):
            out.tokens[row] = _pick(mine_score, mine_ids)
    if remembered:
        _count(slots[remembered].long(), out.tokens[remembered].long(), state)
    for row in reported:
        part = SamplerOutput(*(tensor[row : row + 1] for tensor in out))
        wanted = state.logprobs[slots[row]]
        _report(raw[row : row + 1], part.tokens.long(), *_largest(raw[row : row + 1], int(wanted)), wanted[None], part)


def _candidates(x: Tensor, top: Tensor, slot: int, state: SamplerState) -> tuple[Tensor, Tensor]:
    """The tokens that a row's filters leave and that can win, and their ids. x: [1, vocab] -> [n] twice."""
    temperature, k, p = state.temperature[slot], int(state.top_k[slot]), float(state.top_p[slot])
    if 0 < k < x.shape[1]:
        values, ids = (part[0] for part in _largest(x, k))
        scaled = _scale(values, top, temperature)
        if p < 1:
            scaled, ids = _top_p(scaled, ids, p, int(_mass(scaled).sum()))
    else:
        scaled = _scale(x[0], top, temperature)
        if p < 1:
            ids, total = _near_top_p(scaled, p)
            scaled, ids = _top_p(scaled[ids], ids, p, total)
        else:
            ids = _at_least(scaled, -_REACH)
            scaled = scaled.index_select(0, ids)
    keep = scaled >= state.min_p[slot].log()
    return scaled[keep], ids[keep]


def _top_p(scaled: Tensor, ids: Tensor, p: float, total: int) -> tuple[Tensor, Tensor]:
    mass = _mass(scaled)
    n = int((mass.cumsum(0) - mass < p * total).sum())
    return scaled[:n], ids[:n]


def _near_top_p(scaled: Tensor, p: float) -> tuple[Tensor, int]:
    """Ids of a row's tokens that hold the mass of top_p and little more, and the mass of all. scaled: [vocab].

    Ranked where it matters: every bucket but the last is within top_p whatever its order.
    """
    values, mass = scaled.numpy(), _mass(scaled).numpy()
    total = int(mass.sum())
    # Together, the tokens below their share of what top_p leaves out have less than it leaves out.
    ids = np.flatnonzero(mass >= int((1 - p) * total / len(mass)))
    buckets = (np.maximum(values[ids], -_DEPTH) * -_BUCKETS).astype(np.int64)
    reached = np.bincount(buckets, mass[ids]).cumsum()
    last = np.searchsorted(reached, p * total)
    edge = ids[buckets == last]
    edge = edge[np.argsort(-values[edge], kind="stable")]
    return torch.from_numpy(np.concatenate([ids[buckets < last], edge])), total


def _argmax(x: Tensor) -> int:
    return int(x[0].numpy().argmax())  # numpy's takes a tenth of the time of torch's


def _at_least(x: Tensor, floor: float) -> Tensor:
    """Ids, ascending, of a row's values from `floor` up. x: [vocab] -> [n]."""
    return torch.from_numpy(np.flatnonzero(x.numpy() >= floor))


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k values and ids of one row's ranking, without sorting the row. x: [1, vocab] -> [1, k] twice."""
    k = min(k, x.shape[1])
    ids = _at_least(x[0], x.topk(max(k, 1)).values[0, -1].item())
    values, order = x[:, ids].sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[order][:, :k]


def _penalise_seen(x: Tensor, mine: SamplerState) -> Tensor:
    counts, in_prompt = (table[0, : x.shape[1]] for table in (mine.output_counts, mine.prompt_tokens))
    seen = torch.from_numpy(np.flatnonzero(in_prompt.numpy() | (counts.numpy() > 0)))
    return x.index_copy(1, seen, _penalise(x[:, seen], counts[seen], in_prompt[seen], mine))


# --- the stages: x is [rows, vocab] or [rows, candidates], `mine` the state of each row's slot ---


def _gather(state: SamplerState, at: Tensor) -> SamplerState:
    """The state of each row's slot, but for the two tables as wide as the vocabulary: they stay whole."""
    return SamplerState._make([*(table[at] for table in state[:-2]), *state[-2:]])


def _bias(x: Tensor, mine: SamplerState) -> Tensor:
    used = (mine.bias_ids >= 0) & (mine.bias_ids < x.shape[1])
    return x.scatter_add(1, torch.where(used, mine.bias_ids, 0).long(), torch.where(used, mine.bias_values, 0.0))


def _penalised(state: SamplerState) -> Tensor:
    return (state.repetition != 1) | (state.presence != 0) | (state.frequency != 0)


def _penalise(x: Tensor, counts: Tensor, in_prompt: Tensor, mine: SamplerState) -> Tensor:
    """Repetition as in CTRL (arXiv:1909.05858), presence and frequency as in OpenAI's API reference."""
    answered = counts > 0
    repetition = torch.where(in_prompt | answered, mine.repetition[:, None], 1.0)
    x = torch.where(x > 0, x / repetition, x * repetition)
    return x - mine.presence[:, None] * answered - mine.frequency[:, None] * counts


def _ban(x: Tensor, mine: SamplerState) -> Tensor:
    early = (mine.generated < mine.min_tokens)[:, None]
    banned = early & (mine.stop_ids >= 0) & (mine.stop_ids < x.shape[1])
    ids = torch.where(banned, mine.stop_ids, 0).long()
    return x.scatter_reduce(1, ids, torch.where(banned, _BANNED, torch.inf), "amin")


def _scale(x: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Temperature, on the distance from the largest logit: however small, it makes no inf and no 0 / 0."""
    return (x - top) / temperature


def _mass(scaled: Tensor) -> Tensor:
    """Weights of a softmax as integers, whose sums no order of summation can change. float32 -> int64."""
    return (scaled.exp() * _UNIT).long()


def _pick(score: Tensor, ids: Tensor) -> Tensor:
    """The id of the highest score, the lowest of several. [..., n] twice -> [...]."""
    best = score == score.amax(-1, keepdim=True)
    return torch.where(best, ids, torch.iinfo(torch.int32).max).amin(-1)


def _noise(ids: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Gumbel noise: adding it and taking the maximum draws from the softmax (arXiv:1611.00712). float32."""
    bits = _mix(_mix(ids.int() ^ first) ^ second)
    # 23 bits and a half: float32 holds each of them exactly, and none is 0 or 1.
    uniform = (((bits >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()


def _keys(seed: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """What the noise of a row is made from, besides the token id. seed: [rows, 2], index in the answer: [rows].

    No two pairs of seed and index have both keys alike, unless the high halves of their seeds differ.
    """
    place = _mix(index)
    return _mix(place ^ seed[:, 0]), _mix(place ^ seed[:, 1] ^ 0x5BD1E995)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit changes every output bit with a probability near one half.

    The function is lowbias32 of "Prospecting for Hash Functions" (Wellons, 2018, nullprogram.com/blog/2018/07/31/),
    which is in the public domain. Products wrap; a shift of int32 copies the sign, hence the masks.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _count(at: Tensor, tokens: Tensor, state: SamplerState) -> None:
    """Count the tokens in the answers of slots with a penalty. Rows of the null slot all write what is there."""
    counts = state.output_counts[at, tokens]
    counted = _penalised(state)[at] & (at > 0) & (counts < torch.iinfo(counts.dtype).max)
    state.output_counts[at, tokens] = counts + counted.to(counts.dtype)


def _report(raw: Tensor, tokens: Tensor, values: Tensor, ids: Tensor, wanted: Tensor, out: SamplerOutput) -> None:
    """Write raw log-probabilities of the tokens and the likeliest. values, ids: [rows, n], ranked; wanted: [rows]."""
    total = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(1, tokens[:, None]) - total
    out.logprobs.copy_(torch.where(wanted >= 0, chosen[:, 0], 0.0))
    n = min(values.shape[1], out.top_ids.shape[1])
    listed = torch.arange(n, device=raw.device) < wanted[:, None]
    out.top_ids[:, :n] = torch.where(listed, ids[:, :n], -1)
    out.top_logprobs[:, :n] = torch.where(listed, values[:, :n] - total, _BANNED)
