"""Paged attention against a brute-force float64 computation that knows nothing of pages."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastgraph.kernels.attention import attention


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass
class Row:
    slot: int
    past: int  # tokens whose KV is in the pages already
    count: int  # tokens of this step


@dataclass
class Problem:
    """q, k, v and `Pages`, and each row's whole keys and values [past + count, kv_heads, head_dim]."""

    rows: list[Row]
    args: list[Tensor]
    history: list[tuple[Tensor, Tensor]]

    def all(self, scale: float, window: int) -> tuple:
        """The op's arguments: q and k come rotated."""
        return (*self.args[:3], None, None, None, None, 0.0, *self.args[3:], scale, window, None)

    def attend(self, scale: float, window: int) -> Tensor:
        return attention(*self.all(scale, window))


def make(
    rows: list[Row],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 8,
    page_size: int = 4,
    scrambled: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """Slots with enough pages, every cell NaN but those of the past."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    slots = max(row.slot for row in rows)
    per_slot = max(-(-(row.past + row.count) // page_size) for row in rows) + 2
    order = torch.randperm(slots * per_slot, generator=generator) if scrambled else torch.arange(slots * per_slot)
    table = torch.zeros(slots + 1, per_slot, dtype=torch.int32)
    table[1:] = (order + 1).view(slots, per_slot)
    pool = (slots * per_slot + 1, page_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full(pool, math.nan, dtype=dtype), torch.full(pool, math.nan, dtype=dtype)
    lengths = torch.zeros(slots + 1, dtype=torch.int32)
    starts, new_k, new_v, history = [0], [], [], []
    for row in rows:
        total = row.past + row.count
        keys, values = randn(total, kv_heads, head_dim), randn(total, kv_heads, head_dim)
        for position in range(row.past):
            page, cell = int(table[row.slot, position // page_size]), position % page_size
            k_cache[page, cell], v_cache[page, cell] = keys[position], values[position]
        lengths[row.slot] = row.past
        starts.append(starts[-1] + row.count)
        new_k.append(keys[row.past :])
        new_v.append(values[row.past :])
        history.append((keys, values))
    q = randn(starts[-1], heads, head_dim)
    places = [row.past + i for row in rows for i in range(row.count)]
    token_slots = [row.slot for row in rows for _ in range(row.count)]
    where = [torch.tensor(x, dtype=torch.int32) for x in ([row.slot for row in rows], starts, places, token_slots)]
    args = [q, torch.cat(new_k), torch.cat(new_v), k_cache, v_cache, table, lengths, *where]
    return Problem(rows, args, history)


def brute_force(problem: Problem, scale: float, window: int) -> Tensor:
    """Softmax attention, one query and one head at a time, in float64. [tokens, heads, head_dim]"""
    q = problem.args[0].double()
    out, token = torch.empty_like(q), 0
    for row, (keys, values) in zip(problem.rows, problem.history, strict=True):
        for position in range(row.past, row.past + row.count):
            first = max(0, position + 1 - window) if window else 0
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // keys.shape[1])
                seen = slice(first, position + 1)
                weights = torch.softmax(keys[seen, kv_head].double() @ q[token, head] * scale, 0)
                out[token, head] = weights @ values[seen, kv_head].double()
            token += 1
    return out


def assert_written(problem: Problem, before: tuple[Tensor, Tensor]) -> None:
    """The new keys and values stand in their cells, and no other cell of a live page changed."""
    table, page_size = problem.args[5], problem.args[3].shape[1]
    for cache, old, index in zip(problem.args[3:5], before, (0, 1), strict=True):
        want = old.clone()
        for row, history in zip(problem.rows, problem.history, strict=True):
            for position in range(row.past, row.past + row.count):
                want[int(table[row.slot, position // page_size]), position % page_size] = history[index][position]
        torch.testing.assert_close(cache[1:], want[1:], rtol=0, atol=0, equal_nan=True)


DECODE = [Row(3, 17, 1), Row(1, 5, 1), Row(2, 12, 1)]
BATCHES = {
    "one decode row": [Row(2, 21, 1)],
    "the first token of all": [Row(1, 0, 1)],
    "decode": DECODE,
    "one decode row is far longer": [Row(1, 3, 1), Row(2, 90, 1), Row(3, 1, 1), Row(4, 2, 1), Row(5, 0, 1)],
    "prefill": [Row(1, 0, 9)],
    "several prompts": [Row(2, 0, 5), Row(1, 0, 16), Row(3, 0, 2)],
    "a chunk with a past": [Row(1, 13, 7)],
    "chunks, a prompt and decode rows": [Row(4, 8, 1), Row(1, 6, 5), Row(5, 3, 1), Row(2, 0, 4), Row(3, 30, 1)],
    "a prompt and one decode row": [Row(1, 0, 6), Row(2, 9, 1)],
    "a row without tokens": [Row(1, 4, 0), Row(2, 6, 3), Row(3, 2, 1)],
}


@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize("scrambled", [True, False], ids=["scrambled", "adjoining"])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_brute_force_in_a_pool_full_of_nan(name: str, scrambled: bool, window: int) -> None:
    problem = make(BATCHES[name], scrambled=scrambled)
    before = problem.args[3].clone(), problem.args[4].clone()
    got = problem.attend(0.3, window)
    torch.testing.assert_close(got.double(), brute_force(problem, 0.3, window), rtol=1e-5, atol=1e-6)
    assert_written(problem, before)


@pytest.mark.parametrize("window", [1, 5, 9])
@pytest.mark.parametrize("name", BATCHES)
def test_pages_before_the_window_may_hold_anything(name: str, window: int) -> None:
    problem = make(BATCHES[name])
    k_cache, v_cache, table = problem.args[3:6]
    for row in problem.rows:
        behind = table[row.slot, : max(row.past + 1 - window, 0) // k_cache.shape[1]].long()
        k_cache[behind] = v_cache[behind] = math.nan
    got = problem.attend(0.3, window)
    torch.testing.assert_close(got.double(), brute_force(problem, 0.3, window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (9, 3, 16), (5, 1, 8), (8, 2, 64)])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_every_grouping_of_heads_and_page_size(heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    for rows in (DECODE, BATCHES["chunks, a prompt and decode rows"], BATCHES["one decode row"]):
        problem = make(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
        got = problem.attend(head_dim**-0.5, 0)
        torch.testing.assert_close(got.double(), brute_force(problem, head_dim**-0.5, 0), rtol=1e-5, atol=1e-6)


def test_random_batches() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        slots = rng.sample(range(1, 9), rng.randint(1, 6))
        rows = [
            Row(slot, rng.choice([0, rng.randint(0, 40)]), rng.choice([1, 1, rng.randint(1, 12)])) for slot in slots
        ]
        problem = make(rows, heads=4, kv_heads=2, page_size=rng.randint(1, 9), scrambled=rng.random() < 0.7, seed=seed)
        before = problem.args[3].clone(), problem.args[4].clone()
        window = rng.choice([0, rng.randint(1, 30)])
        got = problem.attend(0.5, window)
        torch.testing.assert_close(
            got.double(),
            brute_force(problem, 0.5, window),
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, s=seed: f"seed {s}: {m}",
        )
        assert_written(problem, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype) -> None:
    for rows in BATCHES.values():
        problem = make(rows, dtype=dtype)
        got = problem.attend(0.3, 0)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), brute_force(problem, 0.3, 0), rtol=2e-2, atol=2e-2)


def test_several_padding_rows_leave_the_others_and_the_live_pages_alone() -> None:
    plain = make(DECODE)
    want = plain.attend(0.3, 0)
    padded = make([*DECODE, Row(0, 0, 1), Row(0, 0, 1), Row(0, 0, 1)])
    before = padded.args[3].clone(), padded.args[4].clone()
    padded.args[0][:3] = plain.args[0]
    got = padded.attend(0.3, 0)
    torch.testing.assert_close(got[:3], want, rtol=1e-5, atol=1e-6)
    assert got.isfinite().all()
    padded.rows, padded.history = padded.rows[:3], padded.history[:3]
    assert_written(padded, before)


def test_only_padding_rows() -> None:
    problem = make([Row(1, 4, 1), Row(0, 0, 1), Row(0, 0, 1)])
    problem.args[7][0] = 0
    before = problem.args[3].clone()
    assert problem.attend(0.3, 0).isfinite().all()
    torch.testing.assert_close(problem.args[3][1:], before[1:], rtol=0, atol=0, equal_nan=True)


def test_accepts_slices_of_a_fused_projection() -> None:
    problem = make(BATCHES["chunks, a prompt and decode rows"])
    want = brute_force(problem, 0.3, 0)
    fused = torch.cat(problem.args[:3], dim=1)  # [tokens, heads + 2 * kv_heads, head_dim]
    problem.args[:3] = fused.split([t.shape[1] for t in problem.args[:3]], dim=1)
    assert not problem.args[2].is_contiguous()
    torch.testing.assert_close(problem.attend(0.3, 0).double(), want, rtol=1e-5, atol=1e-6)


def test_a_changed_page_table_or_length_is_seen_by_the_next_call() -> None:
    """What is kept between the layers of a step may not outlive the step."""
    for seed in range(3):
        for past in (4, 5):
            problem = make([Row(1, past, 1), Row(2, past, 1)], seed=seed)
            got = problem.attend(0.3, 0)
            torch.testing.assert_close(got.double(), brute_force(problem, 0.3, 0), rtol=1e-5, atol=1e-6)


def test_works_in_and_after_inference_mode() -> None:
    with torch.inference_mode():
        make(DECODE).attend(0.3, 0)
    problem = make(DECODE)
    torch.testing.assert_close(problem.attend(0.3, 0).double(), brute_force(problem, 0.3, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["decode", "chunks, a prompt and decode rows"])
def test_the_op_is_what_it_tells_the_compiler(name: str) -> None:
    problem = make(BATCHES[name])
    for cache in problem.args[3:5]:
        cache.nan_to_num_(0.0)
    torch.library.opcheck(attention, problem.all(0.3, 0))
