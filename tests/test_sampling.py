"""Biases, penalties, bans and log-probabilities, against transformers and brute force; rows with nothing to choose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import (
    INF,
    PATHS,
    VOCAB,
    by_rank,
    distinct,
    draws,
    expect_scores,
    run,
    scores_seen,
    state_of,
)

from fastgraph.config import MAX_LOGPROBS
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


# --- logit bias, penalties, bans ---


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 4.0])
def test_repetition_penalty_is_that_of_transformers(path: str, penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    logits, prompt, answer = distinct(3), (1, 5, 5, 90, 210), (5, 7, 7, 8)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.double()[None])[0]
    seen = scores_seen(logits, monkeypatch, repetition=penalty, prompt=prompt, answer=answer)
    expect_scores(seen, expected)


def test_presence_and_frequency_look_at_the_answer_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, prompt, answer = distinct(4), (1, 2, 3), (3, 7, 7, 7, 200)
    for presence, frequency in ((0.7, 0.0), (0.0, 0.4), (0.6, 0.3), (-1.0, -0.5)):
        expected = logits.double().clone()
        for token in set(answer):
            expected[token] -= presence + frequency * answer.count(token)
        request = {"presence": presence, "frequency": frequency, "prompt": prompt, "answer": answer}
        expect_scores(scores_seen(logits, monkeypatch, **request), expected)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bias_then_penalties_then_the_ban(data: st.DataObject) -> None:
    token = st.integers(0, 29)
    logits = distinct(data.draw(st.integers(0, 1000)), 30)
    bias = data.draw(st.dictionaries(token, st.floats(-5, 5), max_size=8))
    prompt, answer = (tuple(data.draw(st.lists(token, max_size=9))) for _ in range(2))
    stop_ids = tuple(data.draw(st.lists(token, max_size=5, unique=True)))
    repetition, presence, frequency = (data.draw(st.floats(low, 2)) for low in (0.3, -2, -2))
    min_tokens = data.draw(st.integers(0, 3))
    expected = logits.double().clone()
    for i, value in bias.items():
        expected[i] += value
    for i in {*prompt, *answer}:
        expected[i] = expected[i] / repetition if expected[i] > 0 else expected[i] * repetition
    for i in set(answer):
        expected[i] -= presence + frequency * answer.count(i)
    if min_tokens > 2:
        expected[list(stop_ids)] = -INF
    for each in PATHS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_sample_rows", each)
            seen = scores_seen(
                logits,
                patch,
                logit_bias=bias,
                prompt=prompt,
                answer=answer,
                repetition=repetition,
                presence=presence,
                frequency=frequency,
                generated=2,
                min_tokens=min_tokens,
                stop_ids=stop_ids,
            )
        expect_scores(seen, expected)
        if min_tokens > 2:
            assert (seen[list(stop_ids)] == -INF).all()


@pytest.mark.parametrize("filters", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_bias_of_a_hundred_forces_and_forbids(path: str, filters: dict) -> None:
    logits = distinct(6)
    likeliest = int(logits.argmax())
    assert set(draws(logits, 200, logit_bias={17: 100.0}, **filters).tolist()) == {17}
    assert likeliest not in draws(logits, 200, logit_bias={likeliest: -100.0}, **filters).tolist()
    full = dict.fromkeys(range(VOCAB - 1), -100.0)
    assert set(draws(logits, 20, logit_bias=full, **filters).tolist()) == {VOCAB - 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_allows_the_end_at_exactly_that_index(path: str, temperature: float) -> None:
    logits = torch.full((VOCAB,), -30.0)
    logits[[3, 9]] = 20.0  # two ends of text, certain unless banned
    for min_tokens in (0, 1, 3):
        state = state_of([{"temperature": temperature, "min_tokens": min_tokens, "stop_ids": (9, 3)}])
        for index in range(5):
            state.generated[1] = index
            assert (run(logits[None], state).tokens.item() in (3, 9)) == (index >= min_tokens)


def test_min_tokens_ignores_stop_ids_that_no_token_has(path: str) -> None:
    logits = distinct(8)
    state = state_of([{"min_tokens": 5, "stop_ids": (VOCAB, VOCAB + 70)}])
    assert run(logits[None], state).tokens.item() == int(logits.argmax())


# --- rows that leave nothing to choose from ---


@pytest.mark.parametrize("request_", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}], ids=str)
def test_a_row_with_everything_banned_falls_back_to_raw_argmax(path: str, request_: dict) -> None:
    logits = torch.full((4, 20), -INF)
    logits[0, [4, 11]] = torch.tensor([1.0, 2.0])
    logits[2, 3] = 1.0
    banned = {**request_, "min_tokens": 9, "stop_ids": (4, 11)}
    tokens = run(logits, state_of([banned, request_, request_, banned], 20)).tokens.tolist()
    assert tokens == [11, 0, 3, 0]


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize(
    "request_",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 9}],
    ids=str,
)
def test_nan_and_inf_give_a_valid_id_and_leave_the_neighbours_alone(path: str, bad: float, request_: dict) -> None:
    logits = torch.stack([distinct(i) for i in range(3)])
    state = state_of([{**request_, "seed": 5, "logprobs": 3}] * 3)
    expected = run(logits, state)
    logits[1, 77] = bad
    out = run(logits, state)
    assert out.tokens[1] == 77
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine[[0, 2]], theirs[[0, 2]])
    logits[1] = bad
    assert 0 <= run(logits, state).tokens[1] < VOCAB


def test_a_bias_beyond_float32_forces_and_forbids(path: str) -> None:
    assert set(draws(distinct(9), 20, temperature=1.0, logit_bias={5: INF}).tolist()) == {5}
    banned = draws(distinct(9), 200, temperature=3.0, logit_bias=dict.fromkeys(range(VOCAB - 2), -INF)).unique()
    assert banned.tolist() == [VOCAB - 2, VOCAB - 1]


@pytest.mark.parametrize("padding", [50.0, INF, math.nan])
def test_ids_of_the_padded_vocabulary_are_never_sampled_nor_counted(path: str, padding: float) -> None:
    limit = VOCAB - 11
    logits = torch.stack([distinct(i) for i in range(6)])
    logits[:, limit:] = padding
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": VOCAB},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 3},
        {"repetition": 1.3},
    ]
    requests = [{"temperature": 3.0, "logprobs": MAX_LOGPROBS, "seed": 3, **kind} for kind in kinds]
    requests[0]["logit_bias"] = {limit: 100.0}
    out = run(logits, state_of(requests), limit=limit)
    narrow = [{name: value for name, value in one.items() if name != "logit_bias"} for one in requests]
    expected = run(logits[:, :limit].contiguous(), state_of(narrow, limit))
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert (out.tokens < limit).all()
    assert (out.top_ids < limit).all()


# --- log-probabilities ---


def test_logprobs_are_those_of_the_raw_model(path: str) -> None:
    logits = torch.stack([distinct(i, spread=4) for i in range(7)])
    strong = {"temperature": 3.0, "top_k": 30, "logit_bias": {5: 50.0}, "repetition": 2.0, "prompt": (1, 2, 3)}
    counts = [0, 1, 5, MAX_LOGPROBS, -1, 2, -1]
    requests = [{"logprobs": n, **(strong if i % 2 else {})} for i, n in enumerate(counts)]
    out = run(logits, state_of(requests))
    exact = logits.double().log_softmax(-1)
    for row, count in enumerate(counts):
        if count < 0:
            assert out.logprobs[row] == 0
        else:
            assert abs(out.logprobs[row].item() - exact[row, out.tokens[row]].item()) < 1e-5
        count = max(count, 0)
        best = by_rank(logits[row])[:count]
        assert out.top_ids[row].tolist() == best + [-1] * (MAX_LOGPROBS - count)
        torch.testing.assert_close(out.top_logprobs[row, :count].double(), exact[row, best], rtol=1e-5, atol=1e-5)
        assert (out.top_logprobs[row, count:] == -INF).all()


def test_alternatives_of_equal_logits_are_listed_by_id(path: str) -> None:
    logits = torch.randint(0, 3, (1, VOCAB), generator=torch.Generator().manual_seed(1)).float()
    assert run(logits, state_of([{"logprobs": 20}])).top_ids[0].tolist() == by_rank(logits[0])[:20]


def test_a_vocabulary_smaller_than_the_alternatives(path: str) -> None:
    out = run(distinct(1, 4)[None], state_of([{"logprobs": 20}], 4))
    assert sorted(out.top_ids[0, :4].tolist()) == [0, 1, 2, 3]
    assert (out.top_ids[0, 4:] == -1).all()
