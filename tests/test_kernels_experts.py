"""Routed experts against float64: however the tokens are spread, every row meets its own expert's weights."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import DEVICE, DTYPE, TOLERANCE, error, gpu, load, randn
from torch import Tensor

from fastgraph.kernels.experts import experts_reference, route_reference

experts, router = load("experts_triton", "routing")


def answer(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Token by token and expert by expert, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64) if residual is None else residual.double()
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            both = gate_up[expert].double() @ x[token].double()
            gate, up = (both if gate_up_bias is None else both + gate_up_bias[expert].double()).chunk(2)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            h = gate / (1 + torch.exp(-(1.702 if limit else 1) * gate)) * up
            y = down[expert].double() @ h
            out[token] += weights[token, place].double() * (y if down_bias is None else y + down_bias[expert].double())
    return out


def problem(ids: Tensor, count: int, hidden: int = 24, width: int = 20) -> list[Tensor]:
    """Arguments of `experts` for a routing."""
    weights = torch.rand(ids.shape, device=DEVICE)
    gate_up = randn(count, 2 * width, hidden, scale=2 * hidden**-0.5)
    down = randn(count, hidden, width, scale=2 * width**-0.5)
    return [randn(len(ids), hidden), gate_up, down, weights, ids, randn(len(ids), hidden)]


def routing(tokens: int, count: int, top_k: int) -> Tensor:
    return torch.rand(tokens, count, device=DEVICE).topk(top_k, sorted=False).indices


ROUTINGS = {
    "one token": (routing(1, 8, 2), 8),
    "one token of one expert": (routing(1, 3, 1), 3),
    "few tokens": (routing(3, 16, 2), 16),
    "few tokens, an odd number of experts each": (routing(2, 13, 3), 13),
    "few tokens that agree": (torch.tensor([[5, 1]] * 4, device=DEVICE), 16),
    "as many tokens as experts": (routing(6, 6, 2), 6),
    "all tokens to one expert": (torch.full((37, 1), 2, device=DEVICE), 4),
    "all tokens to the last experts": (torch.tensor([[4, 3]] * 21, device=DEVICE), 5),
    "one expert has one token": (torch.tensor([[0, 1]] * 40 + [[0, 3]], device=DEVICE), 5),
    "blocks that are exactly full": (torch.tensor([[0], [1]] * 16, device=DEVICE), 2),
    "every expert for every token": (routing(19, 3, 3), 3),
    "more rows than a program orders at once": (routing(700, 7, 2), 7),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("kernel", [experts.experts, experts_reference], ids=["triton", "reference"])
def test_every_token_gets_the_weighted_sum_of_its_experts(name: str, kernel) -> None:
    args = problem(*ROUTINGS[name])
    before = [x.clone() for x in args]
    for residual in (args[5], None):
        out = kernel(*args[:5], residual)
        assert out.dtype == DTYPE
        assert error(out, answer(*args[:5], residual)) < TOLERANCE
    assert all(torch.equal(x, old) for x, old in zip(args, before, strict=True))


@pytest.mark.parametrize("kernel", [experts.experts, experts_reference], ids=["triton", "reference"])
def test_a_token_that_is_no_number_reaches_no_other(kernel) -> None:
    for tokens, count in ((4, 16), (25, 4)):
        args = problem(routing(tokens, count, 2), count)
        want = answer(*args)
        for x in (args[0], args[3], args[5]):
            x[2::3] = torch.nan
        args[4][2::3] = torch.full((count,), torch.nan, device=DEVICE).topk(2, sorted=False).indices
        live = torch.arange(tokens, device=DEVICE) % 3 != 2
        assert error(kernel(*args)[live], want[live]) < TOLERANCE


@pytest.mark.parametrize("kernel", [experts.experts, experts_reference], ids=["triton", "reference"])
def test_biases_and_the_activation_of_gpt_oss(kernel) -> None:
    for tokens, count in ((1, 9), (3, 16), (25, 9)):
        args = problem(routing(tokens, count, 3), count)
        biases = randn(count, 40), randn(count, 24)
        for rest in ((*biases, 0.0), (None, None, 0.7), (*biases, 0.7)):
            assert error(kernel(*args, *rest), answer(*args, *rest)) < TOLERANCE


@pytest.mark.parametrize("sizes", [(16, 32), (40, 24), (64, 130), (136, 65)])
def test_sizes_that_are_no_multiples_of_the_tiles(sizes: tuple[int, int]) -> None:
    for tokens in (2, 20):
        args = problem(routing(tokens, 9, 2), 9, *sizes)
        assert error(experts.experts(*args), answer(*args)) < TOLERANCE


@pytest.mark.parametrize("rows", [16, 32])
def test_blocks_of_every_height(rows: int) -> None:
    args = problem(routing(50, 4, 2), 4, 40, 72)
    plan = experts.TilePlan(rows, 32, 16, 4, 2)
    assert error(experts._many(experts._Call(*args, None, None, 0.0), plan), answer(*args)) < TOLERANCE


def test_the_blocks_of_an_order_hold_every_row_once() -> None:
    for tokens, count, top_k, height in ((1, 4, 1, 16), (9, 4, 3, 2), (100, 7, 2, 16), (600, 3, 2, 4)):
        ids = routing(tokens, count, top_k)
        blocks = experts.block_count(tokens * top_k, count, height)
        order = torch.full((tokens * top_k,), -1, dtype=torch.int32, device=DEVICE)
        table = torch.full((3, blocks), -1, dtype=torch.int32, device=DEVICE)
        experts._order[(count,)](ids, order, table, tokens * top_k, blocks, height, 1024, False)
        assert order.tolist() == ids.flatten().argsort(stable=True).tolist()
        found = [(e, place) for e, start, rows in table.T.tolist() for place in range(start, start + max(rows, 0))]
        assert found == list(zip(ids.flatten()[order.long()].tolist(), range(tokens * top_k), strict=True))
        assert table[2].max() <= height


def test_what_is_chosen_by_the_number_of_tokens_stays_within_a_gpu() -> None:
    for rows in (2, 16, 64, 512, 4096, 65536):
        for count in (8, 32, 128):
            for itemsize in (2, 4):
                plan = experts.tile_plan(rows, count, itemsize)
                assert 16 <= plan.rows <= 128
                assert plan.stages >= 2
                assert plan.stages * plan.depth * itemsize * (plan.rows + plan.outputs) <= 100_000
    for k in (24, 768, 2048, 2880, 4096, 14336):
        for together in (1, 2, 4, 8):
            plan = experts.vector_plan(k, together)
            assert plan.block & (plan.block - 1) == 0
            assert plan.warps <= 16


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880)])
def test_the_layers_of_real_models_at_every_kind_of_batch(shape: tuple[int, int, int, int]) -> None:
    count, top_k, hidden, width = shape
    _, gate_up, down, *_ = problem(routing(1, count, top_k), count, hidden, width)
    for tokens in (1, 2, 3, 8, 16, 33, 256, 1000, 4096):
        x, ids = randn(tokens, hidden), routing(tokens, count, top_k)
        args = [x, gate_up, down, torch.rand(ids.shape, device=DEVICE), ids, randn(tokens, hidden)]
        assert error(experts.experts(*args), experts_reference(*args)) < TOLERANCE


@pytest.mark.gpu
@gpu
def test_a_captured_graph_follows_another_routing() -> None:
    for tokens in (1, 5, 40):
        args = problem(routing(tokens, 32, 4), 32, 256, 192)
        experts.experts(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts.experts(*args)
        for _ in range(20):
            args[4].copy_(routing(tokens, 32, 4))
            args[0].copy_(randn(tokens, 256))
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, experts.experts(*args))
            assert error(out, answer(*args)) < TOLERANCE


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (4, 2), (8, 1), (60, 4), (128, 8), (6, 6)])
def test_each_token_goes_to_its_likeliest_experts(count: int, top_k: int, normalised: bool) -> None:
    logits = torch.stack([torch.randperm(count, device=DEVICE) for _ in range(21)]).to(DTYPE) / 8  # no two are alike
    weights, ids = router.route(logits, top_k, normalised)
    shares = logits.double().softmax(-1)
    best = shares.topk(top_k, sorted=False)
    assert torch.equal(ids.sort(-1).values, best.indices.sort(-1).values)
    want = shares.gather(1, ids)
    assert error(weights, want / want.sum(-1, keepdim=True) if normalised else want) < 1e-5
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    known, named = route_reference(logits, top_k, normalised)
    assert torch.equal(named.sort(-1).values, ids.sort(-1).values)
    assert error(known.gather(1, named.argsort(-1)), weights.gather(1, ids.argsort(-1))) < 1e-5


def test_whatever_the_logits_each_token_goes_to_different_experts_that_exist() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[nan] * 5, [-inf] * 5, [0.0] * 5, [nan, 1.0, nan, 2.0, -inf], [inf, nan, inf, 0.0, -1.0]], device=DEVICE
    )
    for top_k in (1, 3, 5):
        _, ids = router.route(logits, top_k, True)
        for row in ids.tolist():
            assert len(set(row)) == top_k
            assert all(0 <= expert < 5 for expert in row)
    assert router.route(logits, 2, True)[1][3].tolist() == [3, 1]
