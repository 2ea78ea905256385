"""The sampler's kernels against the sampler that sorts, which its own tests compare with transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_helpers import DEVICE, HAS_GPU, load
from sampling_helpers import FILTERS, INF, copies, expect_frequencies, reference, state_of
from torch import Tensor

from fastgraph.config import MAX_LOGPROBS
from fastgraph.kernels import sampling
from fastgraph.kernels.sampling import SamplerOutput, SamplerState, sample

kernels, scanning = load("sampling_triton", "sampling_scan")
TILE = scanning.TILE.value

ADJUSTED: list[dict[str, Any]] = [
    {"presence": 0.5, "repetition": 1.2, "answer": (4, 9, 9), "prompt": (3,)},
    {"temperature": 0.0, "frequency": -0.4, "logit_bias": {5: 9.0, 400: 14.0}},
    {"repetition": 0.7, "logit_bias": {5: 9.0, 400: -2.0}, "answer": (5, 7), "top_k": 5},
    {"min_tokens": 3, "stop_ids": (5, 400, 10**6), "logit_bias": {5: 50.0, 400: 40.0, 200: 11.0}},
    {"temperature": 0.0, "min_tokens": 3, "stop_ids": (5, 400), "logit_bias": {5: 50.0}, "top_p": 0.5},
    {"logit_bias": {5: INF}},
    {"logit_bias": {i: i / 90 for i in range(500)}, "top_p": 0.7},
]
EXTREME: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 1},
    {"temperature": 1e-6},
    {"temperature": 1e-40},
    {"temperature": 50.0, "top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"top_k": 10**6, "top_p": 0.5},
    {"top_k": 900, "top_p": 0.5},
    {"top_k": 450, "min_p": 1e-4},
]


@pytest.fixture(autouse=True)
def one_thread_no_grad() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad(), np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        yield
    torch.set_num_threads(threads)


def moved(state: SamplerState) -> SamplerState:
    return SamplerState(*(part.to(DEVICE, copy=True) for part in state))


def outputs(rows: int) -> SamplerOutput:
    return SamplerOutput(
        torch.full((rows,), -7, dtype=torch.int32, device=DEVICE),
        torch.full((rows,), math.nan, device=DEVICE),
        torch.full((rows, MAX_LOGPROBS), -7, dtype=torch.int32, device=DEVICE),
        torch.full((rows, MAX_LOGPROBS), math.nan, device=DEVICE),
    )


def run(logits: Tensor, state: SamplerState, slots: Tensor, limit: int) -> SamplerOutput:
    out = outputs(len(slots))
    kernels.sample_rows(logits.to(DEVICE), slots.int().to(DEVICE), limit, state, out)
    return out


def sorting(logits: Tensor, state: SamplerState, slots: Tensor, limit: int) -> SamplerOutput:
    out = outputs(len(slots))
    for part, unused in zip(out, (0, 0, -1, -INF), strict=True):
        part.fill_(unused)
    sampling._sample_batch(logits.to(DEVICE)[:, :limit].float(), slots.int().to(DEVICE), state, out)
    return out


def expect_same(logits: Tensor, state: SamplerState, slots: Tensor, limit: int | None = None) -> SamplerOutput:
    """Tokens, alternatives and counts to the bit; log-probabilities, which are sums in some order, nearly."""
    limit = limit or logits.shape[1]
    mine, theirs = moved(state), moved(state)
    out, expected = run(logits, mine, slots, limit), sorting(logits, theirs, slots, limit)
    assert out.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(out.top_ids, expected.top_ids)
    torch.testing.assert_close(out.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(out.top_logprobs, expected.top_logprobs, rtol=1e-4, atol=1e-4, equal_nan=True)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
    return out


def batch(kinds: list[dict[str, Any]], vocab: int, seed: int) -> tuple[SamplerState, Tensor]:
    requests = [
        {"temperature": 1.0, "seed": seed + 977 * i, "logprobs": i % 5 - 1, **kind} for i, kind in enumerate(kinds)
    ]
    return state_of(requests, vocab), torch.arange(1, len(kinds) + 1)


def noise(rows: int, vocab: int, scale: float, seed: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


SHAPES: dict[str, Callable[[int, int, int], Tensor]] = {
    "sharp": lambda rows, vocab, seed: noise(rows, vocab, 6.0, seed),
    "flat": lambda rows, vocab, seed: noise(rows, vocab, 0.2, seed),
    "bfloat16": lambda rows, vocab, seed: noise(rows, vocab, 3.0, seed).bfloat16(),
    "equal": lambda rows, vocab, seed: torch.zeros(rows, vocab),
    "few values": lambda rows, vocab, seed: noise(rows, vocab, 1.0, seed).round(),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_row_gets_the_token_that_sorting_gives(shape: str) -> None:
    kinds, vocab = [*FILTERS, *ADJUSTED, *EXTREME], 120_001
    if not HAS_GPU:
        kinds, vocab = kinds[len(shape) % 2 :: 2], TILE + 51
    for seed in range(8 if HAS_GPU else 1):
        state, slots = batch(kinds, vocab, seed)
        expect_same(SHAPES[shape](len(kinds), vocab, seed), state, slots)


@pytest.mark.parametrize("near", [INF, -1.0])
def test_the_edge_of_top_p_by_exact_weights_and_by_approximate_ones(
    near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_NEAR", near)
    kinds = [{"top_p": p, "top_k": k, "temperature": t} for p in (0.3, 0.8, 0.97) for k in (0, 30) for t in (0.6, 2.0)]
    for seed in range(20 if HAS_GPU else 2):
        state, slots = batch(kinds, 900, seed)
        expect_same(noise(len(kinds), 900, 3.0, seed), state, slots)


@pytest.mark.parametrize("vocab", [1, 5, 211, TILE, 2 * TILE + 1])
def test_vocabularies_of_any_size_and_padding_that_is_never_seen(vocab: int) -> None:
    kinds = [{}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.0}, {"logit_bias": {vocab: 99.0}, "logprobs": 20}]
    state, slots = batch(kinds, vocab + 9, 3)
    for padding in (50.0, INF, math.nan):
        logits = noise(len(kinds), vocab + 9, 3.0, vocab)
        logits[:, vocab:] = padding
        out = expect_same(logits, state, slots, vocab)
        assert (out.tokens < vocab).all()


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_rows_without_a_choice_fall_back_alike(bad: float) -> None:
    vocab = TILE + 300
    kinds = [{}, {"top_k": 9}, {"top_p": 0.5}, {"temperature": 0.0}, {"presence": 0.5, "answer": (7,)}]
    kinds.append({"min_tokens": 9, "stop_ids": (TILE + 7,), "logit_bias": {3: -INF}})
    state, slots = batch(kinds, vocab, 1)
    one, two, whole = (noise(len(kinds), vocab, 2.0, 5) for _ in range(3))
    one[:, TILE + 7] = bad
    two[:, [40, TILE + 7]] = bad
    whole[:] = bad
    alone = torch.full_like(one, -INF)
    alone[:, TILE + 7] = 1.0
    for logits in (one, two, whole, alone):
        expect_same(logits, state, slots)


def test_rows_of_the_null_slot_get_token_zero_and_change_nothing() -> None:
    requests = [{"temperature": 1.0, "seed": i, "presence": 0.5, "logprobs": 2} for i in range(3)]
    state = state_of(requests, 300)
    for name, value in {"temperature": 1.0, "presence": 0.5, "repetition": 0.0, "logprobs": 4}.items():
        getattr(state, name)[0] = value
    logits = noise(5, 300, 2.0, 0)
    logits[[1, 4]] = math.nan
    out = expect_same(logits, state, torch.tensor([3, 0, 1, 2, 0]))
    assert out.tokens[[1, 4]].tolist() == [0, 0]
    nothing = moved(state)
    assert run(logits, nothing, torch.zeros(5), 300).tokens.tolist() == [0] * 5
    assert torch.equal(nothing.output_counts.cpu(), state.output_counts)


def test_counts_stop_at_what_their_type_holds() -> None:
    state = state_of([{"frequency": 1e-6}], 50)
    state.output_counts[1, 8] = 32767
    logits = torch.zeros(1, 50)
    logits[0, 8] = 9.0
    assert expect_same(logits, state, torch.tensor([1])).tokens.item() == 8


def test_half_precision_is_its_float32_copy() -> None:
    kinds = [
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"temperature": 0.0},
        {"repetition": 1.3, "prompt": (1, 2), "top_p": 0.9},
    ]
    vocab = TILE + 77
    state, slots = batch(kinds, vocab, 4)
    for dtype in (torch.bfloat16, torch.float16):
        logits = noise(len(kinds), vocab, 3.0, 2).to(dtype)
        whole = run(logits.float(), moved(state), slots, vocab)
        half = run(logits, moved(state), slots, vocab)
        assert torch.equal(half.tokens, whole.tokens)
        assert torch.equal(half.top_ids, whole.top_ids)
        torch.testing.assert_close(half.logprobs, whole.logprobs)
    cpu = SamplerOutput(*(part.cpu() for part in outputs(len(kinds))))
    sample(logits, slots.int(), state, vocab, cpu)
    assert cpu.tokens.tolist() == half.tokens.tolist()


def test_a_row_alone_is_the_row_in_a_batch_to_the_bit() -> None:
    kinds = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0}, *ADJUSTED[:2]]
    vocab = TILE + 1000
    state, slots = batch([{"logprobs": 3, **kind} for kind in kinds], vocab, 8)
    logits = noise(len(kinds), vocab, 2.0, 9)
    together = run(logits, moved(state), slots, vocab)
    for row in range(len(kinds)):
        alone = run(logits[row : row + 1], moved(state), slots[row : row + 1], vocab)
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine[0], theirs[row])


# --- on a GPU alone ---


@pytest.mark.gpu
@pytest.mark.parametrize("request_", FILTERS, ids=str)
def test_frequencies_are_those_of_the_filtered_softmax(request_: dict[str, Any]) -> None:
    logits = noise(1, 60, 1.5, 12)[0]
    state = copies(20_000, 60, **request_)
    state.seed[1:, 0] = torch.arange(20_000, dtype=torch.int32)
    tokens = run(logits.expand(20_000, -1), moved(state), torch.arange(1, 20_001), 60).tokens
    expected = reference(
        logits,
        *(request_.get(name, 1.0 if name == "top_p" else 0) for name in ("temperature", "top_k", "top_p", "min_p")),
    )
    expect_frequencies(tokens.long().cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_batches_over_a_vocabulary_of_a_real_model(dtype: torch.dtype) -> None:
    vocab, limit, rows = 151_936, 151_669, 128
    choose = np.random.default_rng(0)
    options: dict[str, list[Any]] = {
        "temperature": [0.0, 0.3, 0.7, 1.0, 1.5],
        "top_k": [0, 0, 1, 20, 50, 500],
        "top_p": [1.0, 1.0, 0.5, 0.9, 0.99],
        "min_p": [0.0, 0.0, 0.05],
        "repetition": [1.0, 1.0, 1.2],
        "frequency": [0.0, 0.0, 0.3],
        "min_tokens": [0, 0, 5],
        "logprobs": [-1, -1, 0, 20],
    }
    for trial, scale in enumerate((0.5, 2.0, 4.0, 8.0)):
        kinds = [
            {
                **{name: values[choose.integers(len(values))] for name, values in options.items()},
                "prompt": tuple(choose.integers(limit, size=50).tolist()),
                "stop_ids": tuple(choose.integers(limit, size=4).tolist()),
                "logit_bias": {int(i): 5.0 for i in choose.integers(limit, size=choose.integers(3))},
            }
            for _ in range(rows)
        ]
        state, slots = batch(kinds, vocab, 31 * trial)
        expect_same(noise(rows, vocab, scale, trial).to(dtype), state, slots, limit)


@pytest.mark.gpu
def test_a_captured_step_serves_every_kind_of_row() -> None:
    """What rows ask for is read when the graph runs: neither the capture nor a replay looks at it on the host."""
    vocab, kinds = 50_000, [*FILTERS, *ADJUSTED, *EXTREME]
    state, slots = batch(kinds, vocab, 0)
    logits = noise(len(kinds), vocab, 3.0, 0).to(DEVICE)
    live, at = moved(batch([{}] * len(kinds), vocab, 5)[0]), torch.zeros(len(kinds), dtype=torch.int32, device=DEVICE)
    out = outputs(len(kinds))
    kernels.sample_rows(logits, at, vocab, live, out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kernels.sample_rows(logits, at, vocab, live, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for part, new in zip(live, state, strict=True):
        part.copy_(new)
    at.copy_(slots)
    graph.replay()
    assert out.tokens.tolist() == sorting(logits, moved(state), slots, vocab).tokens.tolist()
