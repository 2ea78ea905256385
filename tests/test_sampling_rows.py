"""A row of a batch stands alone: its history, its noise, padding beside it, and the compiled op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import (
    FILTERS,
    INF,
    PATHS,
    VOCAB,
    distinct,
    run,
    set_slot,
    state_of,
)
from torch import Tensor

from fastgraph.config import MAX_LOGPROBS
from fastgraph.kernels import sampling
from fastgraph.kernels.sampling import SamplerOutput, SamplerState, sample


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


# --- history and padding ---


def test_counts_grow_only_for_slots_with_a_penalty(path: str) -> None:
    requests: list[dict[str, Any]] = [
        {},
        {"repetition": 1.2},
        {"presence": 0.1},
        {"frequency": -0.1},
        {"temperature": 1.0},
    ]
    state = state_of(requests)
    expected = state.output_counts.clone()
    for step in range(4):
        logits = torch.stack([distinct(10 * step + row) for row in range(5)])
        tokens = run(logits, state).tokens
        for slot in (2, 3, 4):
            expected[slot, tokens[slot - 1]] += 1
        assert torch.equal(state.output_counts, expected)


def test_counts_stop_at_what_their_type_holds(path: str) -> None:
    state = state_of([{"frequency": 1e-6}])
    state.output_counts[1, 8] = 32767
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 9.0
    assert run(logits, state).tokens.item() == 8
    assert state.output_counts[1, 8] == 32767


def test_rows_of_the_null_slot_get_token_zero_and_change_nothing(path: str) -> None:
    requests = [{"temperature": 1.0, "seed": i, "presence": 0.5, "logprobs": 2, "answer": (4,)} for i in range(3)]
    logits = torch.stack([distinct(i) for i in range(6)])
    logits[[1, 4]] = torch.tensor([math.nan, INF])[:, None]
    alone, padded = state_of(requests), state_of(requests)
    for state in (alone, padded):
        set_slot(state, 0, temperature=1.0, presence=0.5, repetition=0.0, logprobs=4, answer=(5, 5))
    expected = run(logits[[0, 2, 3]], alone, [3, 1, 2])
    out = run(logits, padded, [3, 0, 1, 2, 0, 0])
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine[[0, 2, 3]], theirs)
    assert out.tokens[[1, 4, 5]].tolist() == [0, 0, 0]
    assert (out.logprobs[[1, 4, 5]] == 0).all()
    assert (out.top_ids[[1, 4, 5]] == -1).all()
    for mine, theirs in zip(padded, alone, strict=True):
        assert torch.equal(mine, theirs)


def test_a_batch_of_nothing_but_padding(path: str) -> None:
    state = state_of([{}])
    assert run(torch.full((4, VOCAB), math.nan), state, [0, 0, 0, 0]).tokens.tolist() == [0, 0, 0, 0]
    assert not state.output_counts.any()


# --- one stream of noise a request ---

requests_ = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 2, 17, 299, 300, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.95]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.5]),
        "repetition": st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        "presence": st.sampled_from([0.0, 0.0, 0.5]),
        "frequency": st.sampled_from([0.0, 0.0, 0.2]),
        "seed": st.integers(0, 2**63 - 1),
        "generated": st.integers(0, 3000),
        "min_tokens": st.sampled_from([0, 0, 2000]),
        "stop_ids": st.sampled_from([(), (3,), (5, 250)]),
        "logit_bias": st.sampled_from([{}, {}, {7: 4.0, 299: -2.0}]),
        "logprobs": st.sampled_from([-1, -1, 0, 4]),
        "prompt": st.lists(st.integers(0, 299), max_size=20).map(tuple),
        "answer": st.lists(st.integers(0, 299), max_size=20).map(tuple),
    }
)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(requests_, min_size=2, max_size=7), seed=st.integers(0, 2**31), rounded=st.booleans())
def test_a_row_alone_and_in_any_batch_gives_the_same(requests: list[dict[str, Any]], seed: int, rounded: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(requests), 300, generator=generator) * 3
    logits = logits.bfloat16().float() if rounded else logits  # as models give them, with many ties
    order = torch.randperm(len(requests), generator=generator)
    state = state_of(requests, 300)
    together = run(logits, state)
    shuffled = run(logits[order], state_of(requests, 300), (order + 1).tolist())
    for mine, theirs in zip(together, shuffled, strict=True):
        assert torch.equal(mine[order], theirs)
    for row, request in enumerate(requests):
        alone = run(logits[row : row + 1], state_of([request], 300))
        for mine, theirs in zip(together, alone, strict=True):
            assert torch.equal(mine[row : row + 1], theirs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_sample_rows", sampling._sample_batch)
        other = state_of(requests, 300)
        device = run(logits, other)
    assert torch.equal(together.tokens, device.tokens)
    assert torch.equal(together.top_ids, device.top_ids)
    torch.testing.assert_close(together.logprobs, device.logprobs)
    torch.testing.assert_close(together.top_logprobs, device.top_logprobs)
    assert torch.equal(state.output_counts, other.output_counts)


def test_a_preempted_request_goes_on_with_the_same_tokens(path: str) -> None:
    request = {"temperature": 1.2, "top_p": 0.95, "seed": 99, "presence": 0.4, "repetition": 1.2, "prompt": (1, 2)}
    logits = torch.stack([distinct(i, spread=1.0) for i in range(20)])
    state = state_of([request])
    whole = []
    for index in range(20):
        state.generated[1] = index
        whole.append(run(logits[index : index + 1], state).tokens.item())
    back = state_of([{}, {"temperature": 1.0}, {**request, "answer": tuple(whole[:8])}])
    for index in range(8, 20):
        back.generated[3] = index
        beside = torch.stack([logits[0], logits[index]])
        assert run(beside, back, [2, 3]).tokens[1].item() == whole[index]


def test_a_seed_gives_one_stream_and_another_seed_another() -> None:
    logits = torch.zeros(1000).expand(40, -1)
    streams = {}
    for seed in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1):
        requests = [{"temperature": 1.0, "seed": seed, "generated": i} for i in range(40)]
        tokens = tuple(run(logits, state_of(requests, 1000)).tokens.tolist())
        assert tokens == tuple(run(logits, state_of(requests, 1000)).tokens.tolist())
        assert len(set(tokens)) > 30
        streams[seed] = tokens
    for one in streams:
        for other in streams:
            if one != other:
                assert sum(a == b for a, b in zip(streams[one], streams[other], strict=True)) <= 3


# --- as an op in a graph ---


def test_the_op_tells_the_compiler_the_truth() -> None:
    state = state_of([{"temperature": 1.0, "presence": 0.5, "logprobs": 3}, {}])
    out = run(torch.randn(2, VOCAB), state)
    args = (torch.randn(2, VOCAB), torch.tensor([1, 2], dtype=torch.int32), VOCAB - 3, *state, *out)
    torch.library.opcheck(sampling._op, args)


def test_one_compiled_graph_for_every_batch_gives_what_a_direct_call_gives() -> None:
    requests: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "top_k": 20, "frequency": 0.4, "answer": (3, 3), "logprobs": 4},
        {"temperature": 1.5, "min_p": 0.02, "seed": 2**40},
        {"repetition": 1.5, "prompt": (2, 8), "logprobs": 20},
    ]

    def step(hidden: Tensor, head: Tensor, slots: Tensor, state: SamplerState) -> SamplerOutput:
        rows = hidden.shape[0]
        out = SamplerOutput(
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows),
            torch.empty(rows, MAX_LOGPROBS, dtype=torch.int32),
            torch.empty(rows, MAX_LOGPROBS),
        )
        sample(hidden @ head, slots, state, VOCAB - 4, out)
        state.generated[slots] += 1
        return out

    graphs = []

    def count_graphs(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    head = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(0))
    backends = {"graphs": count_graphs, "aot": "aot_eager"}
    for name, backend in backends.items():
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        direct_state, compiled_state = state_of(requests), state_of(requests)
        for rows in (5, 1, 3, 2, 4):
            slots = torch.randperm(5, generator=torch.Generator().manual_seed(rows))[:rows].int() + 1
            hidden = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
            for each in (hidden, slots):
                torch._dynamo.decorators.mark_unbacked(each, 0)
            expected = step(hidden, head, slots, direct_state)
            for mine, theirs in zip(compiled(hidden, head, slots, compiled_state), expected, strict=True):
                assert torch.equal(mine, theirs), name
            for mine, theirs in zip(compiled_state, direct_state, strict=True):
                assert torch.equal(mine, theirs), name
    assert len(graphs) == 1


def test_columns_may_be_strided(path: str) -> None:
    requests = [
        {"temperature": 1.0, "top_p": 0.9, "seed": i, "presence": 0.5, "logit_bias": {4: 2.0}} for i in range(6)
    ]
    logits = torch.stack([distinct(i) for i in range(6)])
    state = state_of(requests)
    strided = SamplerState(*(torch.stack([part, part], -1)[..., 0] for part in state))
    assert not any(part.is_contiguous() for part in strided)
    assert torch.equal(run(logits, strided).tokens, run(logits, state).tokens)
    assert torch.equal(strided.output_counts, state.output_counts)


def test_the_path_of_a_device_asks_nothing_of_the_host() -> None:
    """Tensors of the meta device have no values: whatever looked at one would raise."""
    state = SamplerState(*(part.to("meta") for part in state_of([{}] * 3)))
    out = SamplerOutput(
        torch.empty(3, dtype=torch.int32, device="meta"),
        torch.empty(3, device="meta"),
        torch.empty(3, MAX_LOGPROBS, dtype=torch.int32, device="meta"),
        torch.empty(3, MAX_LOGPROBS, device="meta"),
    )
    logits, slots = torch.empty(3, VOCAB, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    sampling.sample_reference(logits, slots, VOCAB, state, out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_samples_the_tokens_of_a_cpu_without_a_sync() -> None:
    generator = torch.Generator().manual_seed(0)
    requests = [
        {"temperature": 1.0, **filters, "seed": 1000 * i, "logprobs": 5, "answer": (4, 9), "prompt": (i,)}
        for i, filters in enumerate([{}, *FILTERS, {"presence": 0.5, "repetition": 1.2}, {"temperature": 0.0}])
    ]
    logits = torch.randn(len(requests), 3000, generator=generator).bfloat16().float() * 3
    host = state_of(requests, 3000)
    expected = run(logits, host)
    state = SamplerState(*(part.cuda() for part in state_of(requests, 3000)))
    out = SamplerOutput(*(part.cuda() for part in expected))
    on_device, slots = logits.cuda(), torch.arange(1, len(requests) + 1, dtype=torch.int32, device="cuda")
    sample(on_device, slots, SamplerState(*(part.clone() for part in state)), 3000, out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(on_device, slots, state, 3000, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out.tokens.cpu(), expected.tokens)
    assert torch.equal(out.top_ids.cpu(), expected.top_ids)
    torch.testing.assert_close(out.logprobs.cpu(), expected.logprobs, rtol=1e-4, atol=1e-4)
    assert torch.equal(state.output_counts.cpu(), host.output_counts)
