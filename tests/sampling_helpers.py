"""What the sampler's tests share: tables of slots, ways to see what the sampler did, independent references."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph.config import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from fastgraph.kernels import sampling
from fastgraph.kernels.sampling import SamplerOutput, SamplerState, sample

VOCAB = 211
INF = float("inf")

# A CPU takes short cuts that a device cannot. Both paths must do the same, so both are tested, on a CPU.
PATHS = {"rows": sampling._sample_rows, "batch": sampling._sample_batch}

FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.9},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.8, "top_k": 210},
    {"temperature": 1.0, "top_p": 0.1},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.5, "min_p": 0.9},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 30, "min_p": 0.1},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 60, "top_p": 0.95, "min_p": 0.03},
]
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def state_of(requests: list[dict[str, Any]], vocab: int = VOCAB) -> SamplerState:
    """Tables with the null slot and one slot a request. The numbers are rows of one matrix, floats as their bits."""
    slots = len(requests) + 1
    fields = torch.zeros(12, slots, dtype=torch.int32)
    floats = fields.view(torch.float32)
    state = SamplerState(
        temperature=floats[0],
        top_k=fields[1],
        top_p=floats[2].fill_(1),
        min_p=floats[3],
        repetition=floats[4].fill_(1),
        presence=floats[5],
        frequency=floats[6],
        seed=fields[7:9].T,
        generated=fields[9],
        min_tokens=fields[10],
        stop_ids=torch.full((slots, MAX_STOP_IDS), -1, dtype=torch.int32),
        bias_ids=torch.full((slots, MAX_LOGIT_BIAS), -1, dtype=torch.int32),
        bias_values=torch.zeros(slots, MAX_LOGIT_BIAS),
        logprobs=fields[11].fill_(-1),
        output_counts=torch.zeros(slots, vocab, dtype=torch.int16),
        prompt_tokens=torch.zeros(slots, vocab, dtype=torch.bool),
    )
    for slot, request in enumerate(requests, start=1):
        set_slot(state, slot, **request)
    return state


def set_slot(
    state: SamplerState,
    slot: int,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    logit_bias: dict[int, float] | None = None,
    prompt: tuple[int, ...] = (),
    answer: tuple[int, ...] = (),
    **columns: float,
) -> None:
    for name, value in columns.items():
        getattr(state, name)[slot] = min(value, 2**31 - 1) if name == "top_k" else value
    low, high = seed & 0xFFFFFFFF, seed >> 32
    state.seed[slot] = torch.tensor([low - 2**32 if low >= 2**31 else low, high], dtype=torch.int32)
    state.stop_ids[slot, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int32)
    for place, (token, value) in enumerate((logit_bias or {}).items()):
        state.bias_ids[slot, place], state.bias_values[slot, place] = token, value
    state.prompt_tokens[slot, list(prompt)] = True
    for token in answer:
        state.output_counts[slot, token] += 1


def copies(count: int, vocab: int, **request: Any) -> SamplerState:
    """A table with as many slots of one and the same request."""
    return SamplerState(*(part[[0] + [1] * count] for part in state_of([request], vocab)))


def run(logits: Tensor, state: SamplerState, slots: list[int] | None = None, limit: int | None = None) -> SamplerOutput:
    rows = torch.tensor(slots or range(1, len(logits) + 1), dtype=torch.int32)
    out = SamplerOutput(
        torch.full((len(rows),), -7, dtype=torch.int32),
        torch.full((len(rows),), math.nan),
        torch.full((len(rows), MAX_LOGPROBS), -7, dtype=torch.int32),
        torch.full((len(rows), MAX_LOGPROBS), math.nan),
    )
    sample(logits, rows, state, limit or logits.shape[1], out)
    return out


def draws(logits: Tensor, count: int, **request: Any) -> Tensor:
    """Tokens of `count` requests that differ by their seeds alone. logits: [vocab] -> [count]."""
    state = copies(count, len(logits), **request)
    state.seed[1:, 0] = torch.arange(count, dtype=torch.int32) * 7919
    return run(logits.expand(count, -1), state).tokens.long()


def kept(logits: Tensor, monkeypatch: pytest.MonkeyPatch, **request: Any) -> set[int]:
    """The set that the filters leave: row i has noise that makes token i win if it is there at all."""
    vocab = len(logits)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "_keys", lambda seed, index: (index, index))
        patch.setattr(sampling, "_noise", lambda ids, favourite, _: (ids == favourite) * 1e4)
        state = copies(vocab, vocab, **request)
        state.generated[1:] = torch.arange(vocab, dtype=torch.int32)
        tokens = run(logits.expand(vocab, -1), state).tokens
    return {i for i, token in enumerate(tokens.tolist()) if token == i}


def reference(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities by transformers' warpers, in float64. logits: [vocab] -> [vocab]."""
    from transformers import generation as hf

    scores = hf.TemperatureLogitsWarper(temperature)(None, logits.double()[None])
    if top_k:
        scores = hf.TopKLogitsWarper(min(top_k, len(logits)))(None, scores)
    if top_p < 1:
        scores = hf.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = hf.MinPLogitsWarper(min_p)(None, scores)
    return scores[0].softmax(-1)


def expect_frequencies(tokens: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square within five standard deviations; rare tokens are pooled. Nothing outside the support."""
    assert (probabilities[tokens] > 0).all()
    expected = probabilities.double() * len(tokens)
    seen = torch.bincount(tokens, minlength=len(expected)).double()
    rare = expected < 8
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    use = expected > 0
    chi = ((seen - expected)[use].square() / expected[use]).sum().item()
    freedom = int(use.sum()) - 1
    assert chi <= freedom + 5 * math.sqrt(2 * freedom), f"chi-square {chi:.0f} with {freedom} degrees of freedom"


def distinct(seed: int, vocab: int = VOCAB, spread: float = 2.0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def scores_seen(logits: Tensor, monkeypatch: pytest.MonkeyPatch, **request: Any) -> Tensor:
    """Logits less their maximum as the filters meet them, in one row; -inf where no noise could make a token win."""
    seen = torch.full_like(logits, -INF)

    def record(ids: Tensor, *_: Tensor) -> Tensor:
        where.append(ids.flatten())
        return torch.zeros(ids.shape)

    def look(score: Tensor, ids: Tensor) -> Tensor:
        seen[ids.flatten()] = score.flatten()
        return pick(score, ids)

    where: list[Tensor] = []
    pick: Callable[[Tensor, Tensor], Tensor] = sampling._pick
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "_noise", record)
        patch.setattr(sampling, "_pick", look)
        run(logits[None], state_of([{"temperature": 1.0, **request}], len(logits)))
    assert where
    return seen


def expect_scores(seen: Tensor, expected: Tensor) -> None:
    expected = (expected - expected.max()).float()
    reachable = expected > -19
    torch.testing.assert_close(seen[reachable], expected[reachable], rtol=1e-5, atol=1e-5)


def by_rank(logits: Tensor) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
