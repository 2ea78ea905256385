"""From logits to tokens: one opaque op that gives every row its own sampling parameters, in one graph for every batch.

The order is: report raw log-probabilities, logit_bias, repetition, presence and frequency penalties, the ban on
stop ids before min_tokens, temperature, top_k, top_p, min_p, draw. Each filter acts on what the one before left,
renormalised.

Tokens rank by logit, and equal logits by id, the lowest first. So top_k keeps exactly k tokens, the smallest set of
top_p is unique, and both top_k = 1 and temperature 0 are argmax with the lowest id on a tie. Numbers that decide are
integers where an order of summation could matter (`_mass`) and where noise is made (`_noise`), so that a row's token
depends on the row alone, and another implementation can give the same ones.

A row of the null slot 0 (padding, or a chunk that does not end its prompt) gets token 0 and changes no state.
A row with no token left above -inf, or with a NaN, gets the argmax of its raw logits: bans give way, ids stay valid.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max
_BANNED = -torch.inf

# Noise lies within -log(24 log 2) = -2.82 and 24 log 2 = 16.64, so a token this far below the likeliest never wins.
_REACH = 19.5

# Weights are counted in units of 2^-35 of the likeliest token's: 2^18 tokens sum to 2^53, exact in float64 as well.
_UNIT = 2.0**35
# Looking for the tokens of top_p, how far below the likeliest to look first, and how far next. Past 35 log 2 = 24.3
# a weight counts as nothing.
_DEPTHS = (4.0, 8.0, 16.0, 25.0)


class SamplerState(NamedTuple):
    """Parameters and history of each slot. Columns may be strided; slot 0 is the null slot."""

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
    logprob: Tensor  # [rows] float32, of the sampled token
    top_ids: Tensor  # [rows, MAX_LOGPROBS] int32, likeliest first
    top_logprobs: Tensor  # [rows, MAX_LOGPROBS] float32


def sample(logits: Tensor, slots: Tensor, state: SamplerState, vocab_limit: int, out: SamplerOutput) -> None:
    """Sample one token a row into `out`, and count it in `state.output_counts` if its slot has a penalty.

    logits: [rows, vocab] float32; slots: [rows] int32, each live slot at most once. Ids from `vocab_limit` up are
    padding of the embedding: never sampled, and no part of any log-probability.
    """
    run = _op if torch.compiler.is_compiling() else _sample
    run(logits, slots, vocab_limit, *state, *out)


def _sample(logits: Tensor, slots: Tensor, vocab_limit: int, *tensors: Tensor) -> None:
    state = SamplerState(*tensors[: len(SamplerState._fields)])
    out = SamplerOutput(*tensors[len(SamplerState._fields) :])
    for part, unused in zip(out, (0, 0, -1, _BANNED), strict=True):
        part.fill_(unused)
    run = _sample_rows if logits.is_cpu else _sample_batch
    run(logits[:, :vocab_limit], slots, state, out)


_MUTATED = ("output_counts", *SamplerOutput._fields)
_TENSORS = (
    f"Tensor{f'(a{i}!)' if name in _MUTATED else ''} {name}"
    for i, name in enumerate((*SamplerState._fields, *SamplerOutput._fields))
)
_op = torch.library.custom_op(
    "fastgraph::sample",
    _sample,
    mutates_args=_MUTATED,
    schema=f"(Tensor logits, Tensor slots, SymInt vocab_limit, {', '.join(_TENSORS)}) -> ()",
)


@_op.register_fake
def _(*_: object) -> None:
    return None


# --- every row through every stage, with no question asked of the host ---


def _sample_batch(raw: Tensor, slots: Tensor, state: SamplerState, out: SamplerOutput) -> None:
    at = slots.long()
    adjusted = _bias(raw, at, state)
    in_prompt, counts = (table[at, : raw.shape[1]] for table in (state.prompt_tokens, state.output_counts))
    adjusted = _penalise(adjusted, counts, in_prompt, at, state)
    adjusted = _ban(adjusted, at, state)
    values, ids = adjusted.sort(dim=-1, descending=True, stable=True)
    drawn = _draw(_scale(values, values[:, :1], at, state), ids, at, state)
    greedy = (state.temperature[at] == 0) | (state.top_k[at] == 1)
    tokens = torch.where(greedy, ids[:, 0], drawn)
    tokens = torch.where(values[:, 0] > _BANNED, tokens, raw.argmax(-1))
    tokens = torch.where(slots > 0, tokens, 0)
    _count(tokens, at, state)
    out.tokens.copy_(tokens)
    _report(raw, tokens, *raw.sort(dim=-1, descending=True, stable=True), at, state, out)


# --- on a CPU: row by row, and only the stages that the row asks for ---


def _sample_rows(raw: Tensor, slots: Tensor, state: SamplerState, out: SamplerOutput) -> None:
    rows = slots.numpy()
    temperature, top_k, reported, repetition, presence, frequency, first_bias, ban = (
        column.numpy()[rows].tolist()
        for column in (
            state.temperature,
            state.top_k,
            state.logprobs,
            state.repetition,
            state.presence,
            state.frequency,
            state.bias_ids[:, 0],
            state.generated < state.min_tokens,
        )
    )
    for row, slot in enumerate(rows.tolist()):
        if slot == 0:
            continue
        logits, at = raw[row : row + 1], slots[row : row + 1].long()
        penalised = repetition[row] != 1 or presence[row] != 0 or frequency[row] != 0
        adjusted = logits
        if first_bias[row] >= 0:
            adjusted = _bias(adjusted, at, state)
        if penalised:
            adjusted = _penalise_seen(adjusted, slot, at, state)
        if ban[row]:
            adjusted = _ban(adjusted, at, state)
        token = _argmax(adjusted)
        top = adjusted[:, token : token + 1]
        if not top.item() > _BANNED:
            token = _argmax(logits)
        elif temperature[row] > 0 and top_k[row] != 1:
            token = int(_draw_row(adjusted, top, at, state))
        out.tokens[row] = token
        if penalised:
            _count(out.tokens[row : row + 1].long(), at, state)
        if reported[row] >= 0:
            best = _largest(logits, min(reported[row], logits.shape[1])) if reported[row] else (logits[:, :0],) * 2
            mine = SamplerOutput(*(part[row : row + 1] for part in out))
            _report(logits, mine.tokens.long(), *best, at, state, mine)


def _draw_row(x: Tensor, top: Tensor, at: Tensor, state: SamplerState) -> Tensor:
    """Draw from one row. Only tokens that can still win are ranked and given noise. x: [1, vocab] -> [1]."""
    k, p, least = (column[at].item() for column in (state.top_k, state.top_p, state.min_p))
    if 0 < k < x.shape[1]:
        values, ids = _largest(x, int(k))
        return _draw(_scale(values, top, at, state), ids, at, state)
    scaled = _scale(x, top, at, state)
    if p < 1:
        mass = _mass(scaled)
        total = mass.sum(-1, keepdim=True)
        for depth in _DEPTHS:
            near = _at_least(scaled, -depth)
            if mass[:, near].sum().double() >= _share(total, at, state):
                break
        ids = near[None]
        ranked, order = scaled[:, near].sort(dim=-1, descending=True, stable=True)
        return _draw(ranked, ids.gather(1, order), at, state, total)
    near = _at_least(scaled, max(-_REACH, log(least) - 1e-3) if least > 0 else -_REACH)
    return _draw(scaled[:, near], near[None], at, state)


def _argmax(x: Tensor) -> int:
    return int(x[0].numpy().argmax())  # numpy's takes a tenth of the time of torch's


def _at_least(x: Tensor, floor: float) -> Tensor:
    """Ids, ascending, of the values of one row from `floor` up. x: [1, vocab] -> [found]."""
    return torch.from_numpy(np.flatnonzero(x[0].numpy() >= floor))


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k values and ids of one row's ranking, without sorting the row. x: [1, vocab] -> [1, k] twice."""
    near = _at_least(x, x.topk(k).values[0, -1].item())
    values, order = x[:, near].sort(dim=-1, descending=True, stable=True)
    return values[:, :k], near[order][:, :k]


def _penalise_seen(x: Tensor, slot: int, at: Tensor, state: SamplerState) -> Tensor:
    counts, in_prompt = state.output_counts[slot, : x.shape[1]], state.prompt_tokens[slot, : x.shape[1]]
    seen = torch.from_numpy(np.flatnonzero(in_prompt.numpy() | (counts.numpy() > 0)))
    return x.index_copy(1, seen, _penalise(x[:, seen], counts[seen][None], in_prompt[seen][None], at, state))


# --- the stages: x is [rows, vocab], or of a row's candidates; at is [rows] int64 ---


def _bias(x: Tensor, at: Tensor, state: SamplerState) -> Tensor:
    ids = state.bias_ids[at].long()
    used = (ids >= 0) & (ids < x.shape[1])
    return x.scatter_add(1, torch.where(used, ids, 0), torch.where(used, state.bias_values[at], 0.0))


def _penalise(x: Tensor, counts: Tensor, in_prompt: Tensor, at: Tensor, state: SamplerState) -> Tensor:
    """Repetition as in CTRL (arXiv:1909.05858), presence and frequency as in OpenAI's API reference."""
    column = at[:, None]
    answered = counts > 0
    repetition = torch.where(in_prompt | answered, state.repetition[column], 1.0)
    x = torch.where(x > 0, x / repetition, x * repetition)
    return x - state.presence[column] * answered - state.frequency[column] * counts


def _ban(x: Tensor, at: Tensor, state: SamplerState) -> Tensor:
    ids = state.stop_ids[at].long()
    banned = (ids >= 0) & (ids < x.shape[1]) & (state.generated[at] < state.min_tokens[at])[:, None]
    return x.scatter_reduce(1, torch.where(banned, ids, 0), torch.where(banned, _BANNED, torch.inf), "amin")


def _scale(x: Tensor, top: Tensor, at: Tensor, state: SamplerState) -> Tensor:
    """Temperature, on the distance from the largest logit: at most 0, and never inf - inf or 0 / 0."""
    temperature = state.temperature[at][:, None]
    temperature = torch.where(temperature > 0, temperature, 1.0)
    return (x.clamp(max=_LARGEST) - top.clamp(max=_LARGEST)) / temperature


def _mass(scaled: Tensor) -> Tensor:
    """Weights of a softmax as integers, whose sums no order of summation can change. [rows, n] -> [rows, n] int64."""
    return (scaled.exp() * _UNIT).long()


def _share(total: Tensor, at: Tensor, state: SamplerState) -> Tensor:
    """The mass that top_p asks for. total: [rows, 1] int64 -> [rows, 1] float64."""
    return state.top_p[at][:, None].double() * total


def _draw(scaled: Tensor, ids: Tensor, at: Tensor, state: SamplerState, total: Tensor | None = None) -> Tensor:
    """Filter, then draw by the Gumbel-max trick (arXiv:1611.00712). Returns [rows] token ids.

    scaled, ids: [rows, n] candidates, ranked unless neither top_k nor top_p is asked for. total: [rows, 1] mass of all
    tokens of the row, if the candidates are but some of them.
    """
    top_k, top_p, min_p = (column[at][:, None] for column in (state.top_k, state.top_p, state.min_p))
    keep = (torch.arange(ids.shape[1], device=ids.device) < top_k) | (top_k <= 0)
    mass = _mass(scaled) * keep
    total = mass.sum(-1, keepdim=True) if total is None else total
    keep &= (mass.cumsum(-1) - mass < _share(total, at, state)) | (top_p >= 1)
    keep &= scaled >= min_p.log()
    score = torch.where(keep, scaled + _noise(ids, at, state), _BANNED)
    best = score.amax(-1, keepdim=True)
    return torch.where(score == best, ids, torch.iinfo(torch.int32).max).amin(-1)


def _noise(ids: Tensor, at: Tensor, state: SamplerState) -> Tensor:
    """Gumbel noise, a pure function of (seed, index in the answer, token id). ids: [rows, n] -> [rows, n] float32."""
    low, high = state.seed[at].unbind(1)
    index = state.generated[at]
    # Two keys, as a single one of 32 bits would make different seeds meet too often.
    first, second = (_mix(_mix(_mix(start) ^ low) ^ high)[:, None] for start in (index, index ^ 0x5BD1E995))
    bits = _mix(_mix(ids.int() ^ first) ^ second)
    # 23 bits and a half: float32 holds each of them exactly, and none is 0 or 1.
    uniform = (((bits >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return -(-uniform.log()).log()


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit changes every output bit with a probability near one half.

    The function is lowbias32 of "Prospecting for Hash Functions" (Wellons, 2018, nullprogram.com/blog/2018/07/31/),
    which is in the public domain. Products wrap; a shift of int32 copies the sign, hence the masks.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _count(tokens: Tensor, at: Tensor, state: SamplerState) -> None:
    """Add the tokens to the counts of slots that have a penalty. Of the null slot, 0 is written over 0."""
    penalised = (state.repetition[at] != 1) | (state.presence[at] != 0) | (state.frequency[at] != 0)
    counts = state.output_counts[at, tokens]
    state.output_counts[at, tokens] = counts + (penalised & (at > 0) & (counts < 32767)).to(counts.dtype)


def _report(
    raw: Tensor, tokens: Tensor, values: Tensor, ids: Tensor, at: Tensor, state: SamplerState, out: SamplerOutput
) -> None:
    """Write raw log-probabilities of the tokens and the likeliest. values, ids: [rows, n], ranked."""
    wanted = torch.where(at > 0, state.logprobs[at], -1)[:, None]
    total = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(1, tokens[:, None]) - total
    out.logprob.copy_(torch.where(wanted >= 0, chosen, 0.0)[:, 0])
    n = min(values.shape[1], out.top_ids.shape[1])
    listed = torch.arange(n, device=raw.device) < wanted
    out.top_ids[:, :n] = torch.where(listed, ids[:, :n], -1)
    out.top_logprobs[:, :n] = torch.where(listed, values[:, :n] - total, _BANNED)
