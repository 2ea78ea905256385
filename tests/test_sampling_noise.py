"""The noise: its arithmetic, its range, and that it is as good as random, over seeds, positions and tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from sampling_helpers import copies, distinct, expect_frequencies, run
from torch import Tensor

from fastgraph.kernels import sampling


@pytest.fixture(autouse=True)
def one_thread_no_grad() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def noise(seeds: Tensor, indices: Tensor, ids: Tensor) -> Tensor:
    """[rows, 2] int32, [rows] int32, [n] int64 -> [rows, n]."""
    first, second = sampling._keys(seeds, indices)
    return sampling._noise(ids[None], first[:, None], second[:, None])


def test_the_hash_is_32_bit_arithmetic_that_wraps() -> None:
    """Against Python's integers, which do not wrap by themselves."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**31), 2**31, (50, 2), generator=generator, dtype=torch.int32)
    indices = torch.arange(50, dtype=torch.int32) * 601
    ids = torch.randint(0, 200_000, (30,), generator=generator)
    got = noise(seeds, indices, ids)
    for row, (low, high) in enumerate(seeds.tolist()):
        place = mix(indices[row].item())
        first, second = mix(place ^ low % 2**32), mix(place ^ high % 2**32 ^ 0x5BD1E995)
        for column, token in enumerate(ids.tolist()):
            u = ((mix(mix(token ^ first) ^ second) >> 9) + 0.5) / 2**23
            assert got[row, column].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-4, abs=1e-5)


def test_noise_is_finite_and_within_reach_for_every_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_mix", lambda x: x)
    extremes = torch.tensor([[0, 1, 511, 512, 2**31 - 1, -(2**31), -512, -1]])
    got = sampling._noise(extremes, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert got.isfinite().all()
    assert got.max() - got.min() < sampling._REACH
    assert got.min() < -2.8
    assert got.max() > 16.6


def uniforms(seeds: Tensor, indices: Tensor, ids: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-noise(seeds, indices, ids).double()))


def expect_uniform(u: Tensor) -> None:
    bins = min(1024, u.numel() // 12)
    expect_frequencies((u.flatten() * bins).long(), torch.full((bins,), 1 / bins))


def test_noise_is_uniform_and_uncorrelated_over_tokens_positions_and_seeds() -> None:
    n = 600
    steps, zeros = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    low_seeds, high_seeds = torch.stack([steps, zeros], 1), torch.stack([zeros, steps], 1)
    one_seed = torch.tensor([[12345, 678]], dtype=torch.int32).expand(n, 2)
    for seeds, indices in ((low_seeds, zeros), (high_seeds, zeros + 9), (one_seed, steps), (low_seeds, steps)):
        u = uniforms(seeds, indices, torch.arange(n))  # [seeds or positions, tokens]
        expect_uniform(u)
        expect_uniform(u[:, 17])
        expect_uniform(u[17])
        x = (u - 0.5) * math.sqrt(12)
        upper, lower = torch.triu_indices(n, n, 1)
        for one, other in (
            (x[1:], x[:-1]),
            (x[:, 1:], x[:, :-1]),
            (x[1:, 1:], x[:-1, :-1]),
            (x[1:, :-1], x[:-1, 1:]),
            (x[256:], x[:-256]),
            (x[:, 256:], x[:, :-256]),
            (x[upper, lower], x[lower, upper]),
        ):
            assert abs((one * other).mean().item()) < 5 / math.sqrt(one.numel())


def test_frequencies_over_many_seeds_and_over_the_positions_of_one_seed() -> None:
    logits = distinct(12, 50, 1.5)
    expected = logits.double().softmax(-1)
    count = 20_000
    state = copies(count, 50, temperature=1.0)
    rows = torch.arange(count, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_sample_rows", sampling._sample_batch)
        for column in (state.seed[1:, 0], state.seed[1:, 1], state.generated[1:]):
            state.seed.fill_(41)
            column.copy_(rows)
            tokens = run(logits.expand(count, -1), state).tokens.long()
            expect_frequencies(tokens, expected)
            pairs = tokens[1:] * 50 + tokens[:-1]
            expect_frequencies(pairs, torch.outer(expected, expected).flatten())


def test_equal_scores_go_to_the_lowest_id_in_whatever_order_they_come() -> None:
    score = torch.tensor([[1.0, 2.0, 2.0, -1.0], [3.0, 0.0, 3.0, 3.0]])
    ids = torch.tensor([[4, 9, 3, 0], [7, 1, 5, 6]])
    assert sampling._pick(score, ids).tolist() == [3, 5]
