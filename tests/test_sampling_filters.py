"""Temperature, top_k, top_p, min_p and argmax: what is kept, and how often it comes, against transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import (
    FILTERS,
    INF,
    NEUTRAL,
    PATHS,
    VOCAB,
    by_rank,
    distinct,
    draws,
    expect_frequencies,
    kept,
    reference,
    run,
    state_of,
)

from fastgraph.kernels import sampling


@pytest.fixture(autouse=True)
def one_thread_no_grad() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sampling, "_sample_rows", PATHS[request.param])
    return str(request.param)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_transformers_keep(path: str, filters: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        logits = distinct(seed)
        expected = reference(logits, **{**NEUTRAL, **filters})
        # Without a filter a CPU leaves out what no noise can make win.
        assert (expected[expected > 0] / expected.max()).min() > math.exp(-19)
        assert kept(logits, monkeypatch, **filters) == set(expected.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_come_as_often_as_transformers_say(filters: dict) -> None:
    logits = distinct(5, 60)
    expect_frequencies(draws(logits, 2500, **filters), reference(logits, **{**NEUTRAL, **filters}))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.3, 3),
    top_k=st.integers(2, 50),
    top_p=st.floats(0.02, 1),
    min_p=st.floats(0, 0.9),
)
def test_any_filters_keep_what_transformers_keep(seed: int, **filters: float) -> None:
    logits = distinct(seed, 50)
    expected = set(reference(logits, **filters).nonzero()[:, 0].tolist())
    for each in PATHS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_sample_rows", each)
            assert kept(logits, patch, **filters) == expected


@pytest.mark.parametrize("k", [1, 2, 3, 7, 20, 39, 40])
def test_top_k_keeps_exactly_k_of_ties_lowest_ids_first(path: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(k)).float()
    assert kept(logits, monkeypatch, temperature=1.0, top_k=k) == set(by_rank(logits)[:k])
    assert kept(torch.zeros(40), monkeypatch, temperature=1.0, top_k=k) == set(range(k))


@pytest.mark.parametrize(("p", "size"), [(0.125, 40), (0.25, 80), (0.5, 160), (0.501, 161), (0.75, 240), (0.9999, 320)])
def test_top_p_is_the_smallest_set_of_ties_lowest_ids_first(
    path: str, p: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.full((500,), -INF)
    equal = torch.randperm(500, generator=torch.Generator().manual_seed(size))[:320].sort().values
    logits[equal] = 1.5
    logits[equal[::2]] -= 1e-6  # lower, yet so near that it is looked for in one place with the others
    ranked = [*equal[1::2].tolist(), *equal[::2].tolist()]
    assert kept(logits, monkeypatch, temperature=1.0, top_p=p) == set(ranked[:size])


def test_top_p_keeps_one_token_at_least(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = distinct(1)
    assert kept(logits, monkeypatch, temperature=1.0, top_p=1e-9) == {int(logits.argmax())}
    assert kept(logits, monkeypatch, temperature=1.0, min_p=1.0) == {int(logits.argmax())}


def test_top_p_of_a_large_flat_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = distinct(2, 30_000, 0.5)
    order = by_rank(logits)
    mass = logits.double().softmax(-1)[order].cumsum(-1)
    size = int((mass < 0.9).sum()) + 1
    state = state_of([{"temperature": 1.0, "top_p": 0.9}], len(logits))
    ids = sampling._candidates(logits[None], logits.max(), 1, state)[1]
    assert abs(len(ids) - size) <= 1  # 30,000 weights rounded to float32 may move the edge by one
    assert set(ids.tolist()) == set(order[: len(ids)])


# --- greedy ---


def test_temperature_zero_and_top_k_one_are_argmax_with_the_lowest_id_on_ties(path: str) -> None:
    logits = torch.randint(0, 3, (64, VOCAB), generator=torch.Generator().manual_seed(0)).float()
    expected = [by_rank(row)[0] for row in logits]
    assert run(logits, state_of([{"top_p": 0.5, "min_p": 0.1}] * 64)).tokens.tolist() == expected
    hot = [{"temperature": 5.0, "top_k": 1, "seed": i} for i in range(64)]
    assert run(logits, state_of(hot)).tokens.tolist() == expected


def test_greedy_rows_beside_sampled_rows_stay_argmax(path: str) -> None:
    logits = torch.stack([distinct(i, spread=8) for i in range(6)])
    requests = [
        {},
        {"temperature": 1.5},
        {"top_p": 0.3},
        {"temperature": 0.7, "top_k": 5},
        {"top_k": 4},
        {"min_p": 0.2},
    ]
    tokens = run(logits, state_of(requests)).tokens.tolist()
    for row in (0, 2, 4, 5):
        assert tokens[row] == int(logits[row].argmax())


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.1}], ids=str)
def test_a_tiny_temperature_is_argmax_and_no_nan(path: str, temperature: float, filters: dict) -> None:
    logits = torch.stack([distinct(i, spread=20) for i in range(8)])
    state = state_of([{"temperature": temperature, "seed": i, **filters} for i in range(8)])
    assert torch.equal(run(logits, state).tokens.long(), logits.argmax(-1))


@pytest.mark.parametrize("top_k", [VOCAB - 1, VOCAB, VOCAB + 1, 10**6, 2**31 - 1, 2**40])
def test_a_huge_top_k_is_all_of_the_vocabulary(path: str, top_k: int) -> None:
    logits = torch.stack([distinct(i) for i in range(20)])
    plain = [{"temperature": 2.0, "seed": i} for i in range(20)]
    expected = run(logits, state_of(plain)).tokens
    tokens = run(logits, state_of([{**one, "top_k": top_k} for one in plain])).tokens
    if top_k >= VOCAB:
        assert torch.equal(tokens, expected)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
