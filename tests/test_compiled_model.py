"""The model file under torch.compile: one graph for every batch, the same numbers as eager, and no copy of a cache."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paged import Paged, Piece, forward
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fastgraph.models import llama
from fastgraph.ops import Batch, LayerCache

CONFIG = llama.Config.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "max_position_embeddings": 16,
        "rope_scaling": {"type": "dynamic", "factor": 4.0},  # the one rope whose cos and sin depend on the batch
    }
)
STEPS = (
    [Piece(1, [3, 1, 4, 1, 5, 9], 6)],
    [Piece(1, [2])],
    [Piece(2, [6, 5, 3], 3), Piece(1, [5]), Piece(0, [0])],
    [Piece(1, [8]), Piece(2, [9])],
    [Piece(3, list(range(20)), 20), Piece(4, [7] * 3, 9), Piece(1, [9]), Piece(2, [7])],
    [Piece(slot, [slot]) for slot in (1, 2, 3)],
    [Piece(4, [1] * 6, 9), Piece(0, [0]), Piece(0, [0])],
    [Piece(slot, [slot]) for slot in (4, 3, 2, 1)],
    [Piece(3, [2])],
)
Forward = Callable[[llama.Model, Batch, list[LayerCache]], Tensor]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> llama.Model:
    torch.manual_seed(0)
    return llama.Model(CONFIG)


def mark(*tensors: Tensor) -> None:
    """Their tokens may be as many as they like, one included, in a single graph."""
    for tensor in tensors:
        mark_unbacked(tensor, 0, shape_id="tokens")


def marked(batch: Batch) -> Batch:
    mark(batch.ids, batch.positions, batch.sequence_lengths, batch.token_slots)
    mark_unbacked(batch.slots, 0, shape_id="rows")
    mark_unbacked(batch.query_start, 0)
    return batch


def whole() -> Forward:
    compiled = torch.compile(forward, fullgraph=True)
    return lambda model, batch, caches: compiled(model, marked(batch), caches)


def by_block() -> Forward:
    """One compiled function for all layers."""
    compiled = torch.compile(llama.Block.forward, fullgraph=True)

    def run(model: llama.Model, batch: Batch, caches: list[LayerCache]) -> Tensor:
        x, rope = model.embed(marked(batch))
        for block, cache in zip(model.layers, caches, strict=True):
            mark(x, *rope)
            x = compiled(block, x, rope, cache, batch)
        return x

    return run


@pytest.mark.parametrize("compiled", [whole, by_block])
def test_one_graph_serves_every_batch(compiled: Callable[[], Forward], model: llama.Model) -> None:
    run = compiled()
    got, want = (Paged(CONFIG, slots=4, span=48) for _ in range(2))
    stance: Any = "default"
    for pieces in STEPS:
        with torch.compiler.set_stance(stance):
            logits = got.step(model, pieces, run)
        for compiled_row, eager_row in zip(logits, want.step(model, pieces), strict=True):
            torch.testing.assert_close(compiled_row, eager_row, rtol=1e-5, atol=2e-6)
        stance = "fail_on_recompile"  # the first step's graph is the only one
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_first_batch_may_have_any_size(rows: int, model: llama.Model) -> None:
    """A graph traced from one row, where sizes often specialise, serves larger batches; and the other way round."""
    run = by_block()
    got, want = (Paged(CONFIG, slots=3, span=48) for _ in range(2))
    for count, stance in ((rows, "default"), (3, "fail_on_recompile"), (1, "fail_on_recompile")):
        pieces = [Piece(slot, [slot]) for slot in range(1, count + 1)]
        with torch.compiler.set_stance(stance):
            logits = got.step(model, pieces, run)
        for compiled_row, eager_row in zip(logits, want.step(model, pieces), strict=True):
            torch.testing.assert_close(compiled_row, eager_row, rtol=1e-5, atol=2e-6)


def test_the_caches_are_written_in_place_and_never_copied(model: llama.Model) -> None:
    paged, eager = (Paged(CONFIG, slots=2, span=28, page_size=4) for _ in range(2))
    pages = paged.caches[0].k.shape[0]
    assert pages == 15  # a size that nothing else here has
    pieces = [Piece(1, [3, 1, 4, 1, 5, 9], 6), Piece(2, [1])]
    eager.step(model, pieces)
    where = [t.data_ptr() for cache in paged.caches for t in cache]
    compiled = torch.compile(forward, fullgraph=True)
    _, (code, *_) = run_and_get_code(compiled, model, marked(paged.batch(pieces)), paged.caches)
    assert [t.data_ptr() for cache in paged.caches for t in cache] == where
    for cache, expected in zip(paged.caches, eager.caches, strict=True):
        for got, want in zip(cache, expected, strict=True):
            torch.testing.assert_close(got[1:], want[1:], equal_nan=True)
    calls = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fastgraph.attention.default")
    ]
    assert len(calls) == CONFIG.layers
    for call in calls:
        caches = [ast.unparse(argument) for argument in call.args[8:10]]
        assert all(re.fullmatch(r"arg\d+_1", name) for name in caches), caches  # the graph's own inputs
    assert not re.findall(rf"empty_strided\w*\(\({pages},|clone|copy_\(arg", code)
