"""The attention kernels against a brute-force float64 computation, over pages whose unwritten cells are NaN."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import DEVICE, HAS_GPU, TOLERANCE, Paged, error, gpu, load, randn
from torch import Tensor

from fastgraph.kernels import reference, serving
from fastgraph.kernels.attention import Turn

decode, cutting, prefill, rotary, launch = load(
    "decode_attention", "decode_splits", "prefill_attention", "rotary", "launch"
)
EPS = 1e-6
# heads, kv_heads, head_dim, elements that rotate, norm of each head, window, page_size
KINDS = [
    (4, 2, 32, 32, True, 0, 16),
    (6, 2, 16, 8, False, 0, 8),
    (4, 1, 32, 32, False, 20, 16),
    (2, 2, 16, 0, False, 40, 64),
    (9, 3, 64, 64, False, 0, 16),
]
REAL = [(16, 8, 128, 128, True, 0, 16), (32, 8, 64, 64, False, 0, 16), (32, 8, 128, 128, False, 300, 16)]
REAL += [(4, 1, 256, 256, True, 512, 16), (9, 3, 64, 64, False, 0, 32)]


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels serve, on a CPU too."""
    kernels = {"rotate_and_write": rotary.rotate_and_write, "decode_attention": decode.decode_attention}
    monkeypatch.setattr(serving, "kernels", lambda device: kernels)


def inputs(tokens: int, kind: tuple) -> tuple[tuple[Tensor, ...], Turn]:
    """q, k, v as views of one tensor, and what is done to q and k."""
    heads, kv_heads, dim, turns, normed, *_ = kind
    qkv = randn(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    angles = torch.rand(tokens, turns // 2, device=DEVICE) * 6
    norms = [1 + randn(dim, scale=0.1) if normed else None for _ in "qk"]
    return qkv, Turn(*((angles.cos(), angles.sin()) if turns else (None, None)), *norms, EPS)


def turned(q: Tensor, k: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    """In float64."""
    wide = (None if x is None else x.double() for x in turn[:4])
    return reference.turned(q.double(), k.double(), Turn(*wide, EPS))


def check_decode(past: list[int], kind: tuple) -> None:
    """Output and pages after one step; nothing but the new cells changes."""
    _, kv_heads, dim, _, _, window, page_size = kind
    paged = Paged.of(past, max(past) + 1, kv_heads, dim, page_size)
    if window:
        paged.forget(window)
    (q, k, v), turn = inputs(len(past), kind)
    before = paged.k_cache.clone(), paged.v_cache.clone()
    scale, pages = dim**-0.5, paged.pages([1] * len(past))
    serving.begin_step()
    out = decode.decode_attention(q, k, v, turn, pages, scale, window)
    q_wide, k_wide = turned(q, k, turn)
    for row, length in enumerate(past):
        cell = paged.cells(row, length, length + 1)
        assert error(paged.k_cache[cell][0], k_wide[row]) < TOLERANCE
        assert torch.equal(paged.v_cache[cell][0], v[row])
        for cache, old in zip(pages, before, strict=False):
            old[cell] = cache[cell]
        assert error(out[row], paged.attention(q_wide[row], row, length, scale, window)) < TOLERANCE
    for cache, old in zip(pages, before, strict=False):
        assert torch.equal(cache.nan_to_num(9.0), old.nan_to_num(9.0))
    assert not launch.counters(DEVICE).any()  # ready for the next launch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [1, 4, 16])
def test_decode_norms_rotates_writes_and_attends(kind: tuple, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "split_plan", lambda *_: cutting.SplitPlan(pieces, 32, 32, 4096))
    check_decode([0, 37, 100, 15, 64], kind)
    check_decode([700, 0, 1], kind)


def test_padding_rows_write_to_page_zero_alone_and_change_no_other_row() -> None:
    kind = (4, 2, 32, 32, False, 0, 16)
    paged = Paged.of([20, 33], 40, 2, 32, 16)
    (q, k, v), turn = inputs(6, kind)
    caches = [c.clone() for c in (paged.k_cache, paged.v_cache)]
    live = paged.pages([1, 1])._replace(k_cache=caches[0], v_cache=caches[1])
    two = turn._replace(cos=turn.cos[:2], sin=turn.sin[:2])
    serving.begin_step()
    alone = decode.decode_attention(q[:2], k[:2], v[:2], two, live, 0.2)
    pages = paged.pages([1, 1], unowned=4, empty=4)
    serving.begin_step()
    out = decode.decode_attention(q, k, v, turn, pages, 0.2)
    assert error(out[:2], alone) < TOLERANCE
    for cache, expected in zip(pages, caches, strict=False):
        assert torch.equal(cache[1:].nan_to_num(9.0), expected[1:].nan_to_num(9.0))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    wave=st.integers(1, 140),
    least=st.integers(1, 70),
    cut=st.sampled_from([1, 4096]),
    window=st.sampled_from([0, 40, 512]),
)
def test_splits_cover_each_row_of_one_token_once_and_are_of_like_length(
    data: st.DataObject, wave: int, least: int, cut: int, window: int
) -> None:
    """Whatever there is beside them: rows of prompts, and empty ones that fill up a graph."""
    page_size, block = 16, 32
    past = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=40))
    counts = data.draw(st.lists(st.sampled_from([1, 1, 1, 0, 7]), min_size=len(past), max_size=len(past)))
    paged = Paged.of([0] * len(past), 1, 1, 8, page_size)
    paged.lengths[paged.slots.long()] = torch.tensor(past, dtype=torch.int32, device=DEVICE)
    pages = paged.pages(counts, empty=data.draw(st.sampled_from([0, 3, 90])))
    found = cutting.lay_out(pages, cutting.SplitPlan(wave, least, block, cut), window).tolist()
    single = [row for row, count in enumerate(counts) if count == 1]
    begins = [max(n + 1 - window, 0) // page_size * page_size if window else 0 for n in past]
    total, live = sum(past[row] - begins[row] for row in single), max(len(single), 1)
    used = [split for split in found if split[0] >= 0]
    if len(single) >= wave:
        extra = max(wave, min(len(single) * 5 // 8, cut))
        longest = max(-(-total // extra), total // live * 5 // 4, block)
    else:
        extra = 2 * wave
        longest = max(-(-total // (wave - len(single))), min(total // least, 128), block)
        assert len(used) <= (wave if len(single) <= wave // 4 else 2 * wave)
    counters = set()
    for row in single:
        token = int(pages.query_start[row])
        at = next(at for at, split in enumerate(found) if split[0] >= 0 and split[7] == token)
        mine = found[at : at + found[at][6]]
        about = (past[row], at, len(mine), token)
        assert {(split[0], split[1], *split[4:]) for split in mine} == {(mine[0][0], int(paged.slots[row]), *about)}
        bounds = [split[2] for split in mine] + [past[row]]
        assert bounds[0] == begins[row]
        assert [split[3] for split in mine] == bounds[1:]
        most = max(longest, -(-(past[row] - begins[row]) // (8 * least)))
        assert all(0 < b - a < most + block for a, b in pairwise(bounds)) or not past[row]
        assert len(mine) <= 8 * least
        assert all(a % page_size == 0 for a in bounds[:-1])
        if len(mine) > 1:
            assert 0 <= mine[0][0] < extra
            assert mine[0][0] not in counters, "two rows count at one place"
            counters.add(mine[0][0])
    assert len(used) == sum(found[at][6] for at in {split[5] for split in used})
    assert found[: len(used)] == used
    if len(pages.slots) > 64 and used:  # what runs last is short
        whole = [max(-(-(found[split[5]][3] - found[split[5]][2]) // block) * block, block) for split in used]
        quarters = [min(4 * length // max(whole), 3) for length in whole]
        assert quarters == sorted(quarters, reverse=True)


@pytest.mark.parametrize("kv_heads", [1, 8, 32, 128])
@pytest.mark.parametrize("rows", [1, 300, 5000, 20_000])
def test_there_are_counters_for_all_rows_that_may_be_cut(kv_heads: int, rows: int) -> None:
    plan = cutting.split_plan(kv_heads, 64, 148)
    assert cutting.spare_splits(rows, plan) * kv_heads <= launch.COUNTERS
    assert plan.wave * kv_heads <= launch.COUNTERS


@pytest.mark.parametrize(
    ("past", "splits"),
    [
        ([8500] * 16, 128),  # eight each: nine would be more than a wave
        ([1000] * 32, 128),
        ([2000] * 4, 64),  # of 128 tokens: shorter ones are not worth it
        ([700] * 96, 192),  # whole rows would leave a quarter of a wave empty
        ([700] * 128, 128),
        ([600] * 200, 200),
    ],
)
def test_few_rows_fill_one_wave_or_two(past: list[int], splits: int) -> None:
    pages = Paged.of([0] * len(past), 1, 1, 8, 16).pages([1] * len(past))
    pages.lengths[pages.slots.long()] = torch.tensor(past, dtype=torch.int32, device=DEVICE)
    found = cutting.lay_out(pages, cutting.SplitPlan(132, 8, 32, 8192), 0)
    assert int((found[:, 0] >= 0).sum()) == splits


def test_a_step_is_laid_out_once_and_the_next_one_anew() -> None:
    paged = Paged.of([100, 5], 500, 2, 32, 16)
    (q, k, v), turn = inputs(2, (4, 2, 32, 32, False, 0, 16))
    pages = paged.pages([1, 1])
    for step in range(3):
        serving.begin_step()
        for cache in (pages.k_cache, pages.v_cache):  # two layers
            cache.nan_to_num_(0.5)
            out = decode.decode_attention(q, k, v, turn, pages, 0.2)
        want = [
            paged.attention(turned(q, k, turn)[0][row], row, int(paged.lengths[paged.slots[row]]), 0.2, 0)
            for row in (0, 1)
        ]
        assert error(out, torch.stack(want)) < TOLERANCE
        paged.lengths[paged.slots.long()] += 100 * (step + 1)


def check_prefill(
    past: list[int], counts: list[int], kind: tuple, unowned: int = 0, empty: int = 0, mixed: bool = False
) -> None:
    """Rotation, KV write and attention of ragged chunks: by the prefill kernel, or of single tokens by the other one.

    Behind them `unowned` tokens that are NaN and belong to no row, and `empty` rows that have no tokens: what a step is
    padded with.
    """
    _, kv_heads, dim, _, _, window, page_size = kind
    paged = Paged.of(past, max(p + c for p, c in zip(past, counts, strict=True)) + 1, kv_heads, dim, page_size)
    if window:
        paged.forget(window)
    pages, live = paged.pages(counts, unowned, empty), sum(counts)
    (q, k, v), turn = inputs(live + unowned, kind)
    for x in (q, k, v):
        x[live:] = torch.nan
    row_of = [row for row, count in enumerate(counts) for _ in range(count)]
    place = [past[row] + i for row, count in enumerate(counts) for i in range(count)]
    before = paged.k_cache.clone(), paged.v_cache.clone()
    if mixed:
        serving.begin_step()
        out = prefill.mixed_attention(q, k, v, turn, pages, dim**-0.5, window)
    else:
        out = prefill.prefill_attention(rotary.rotate_and_write(q, k, v, turn, pages), pages, dim**-0.5, window)
    q_wide, k_wide = turned(q, k, turn)
    picked = range(live) if not HAS_GPU else random.Random(0).sample(range(live), min(live, 150))
    for token in {*picked, live - 1}:
        row, position = row_of[token], place[token]
        cell = paged.cells(row, position, position + 1)
        assert error(paged.k_cache[cell][0], k_wide[token]) < TOLERANCE
        assert torch.equal(paged.v_cache[cell][0], v[token])
        assert error(out[token], paged.attention(q_wide[token], row, position, dim**-0.5, window)) < TOLERANCE
    assert not out[:live].isnan().any()
    for row, count in enumerate(counts):
        cell = paged.cells(row, past[row], past[row] + count)
        for cache, old in zip(pages, before, strict=False):
            old[cell] = cache[cell]
    for cache, old in zip(pages, before, strict=False):
        assert torch.equal(cache[1:].nan_to_num(9.0), old[1:].nan_to_num(9.0))  # page 0 alone is anybody's


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_of_ragged_chunks_with_and_without_history(kind: tuple) -> None:
    check_prefill([0, 37, 100, 15, 3], [9, 80, 5, 1, 0], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_prompts_and_of_rows_that_decode(kind: tuple) -> None:
    check_prefill([0, 37, 100, 15, 3, 70], [9, 1, 1, 1, 0, 33], kind, 12, 2, mixed=True)
    check_prefill([5, 0], [1, 1], kind, mixed=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("unowned", "empty"), [(1, 1), (70, 3), (0, 40)])
def test_what_a_prefill_is_padded_with_reaches_no_row(kind: tuple, unowned: int, empty: int) -> None:
    check_prefill([20, 0], [1, 33], kind, unowned, empty)
    check_prefill([5, 37], [1, 1], kind, unowned, empty)  # one token a row, as in a decode step


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("kind", REAL)
def test_decode_of_real_shapes_at_every_kind_of_batch(kind: tuple) -> None:
    draw = random.Random(1)
    for rows in (1, 2, 7, 33, 256):
        check_decode([0, 1, 31, 32, 33][:rows] + [draw.randrange(1500) for _ in range(rows - 5)], kind)
    check_decode([20_000], kind)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("kind", REAL)
def test_prefill_of_real_shapes(kind: tuple) -> None:
    check_prefill([0], [3000], kind)
    check_prefill([0, 500, 4000, 17, 0, 0, 64], [700, 33, 1, 256, 0, 128, 2000], kind)
    check_prefill([900, 17, 0], [1, 1, 150], kind, 40, 90)
    draw = random.Random(2)
    past = [draw.randrange(2500) for _ in range(80)]
    check_prefill([*past, 0, 40], [1] * 80 + [600, 64], kind, 28, 30, mixed=True)


@pytest.mark.gpu
@gpu
def test_a_captured_decode_follows_lengths_and_pages_that_change_on_the_device() -> None:
    kind = (16, 8, 128, 128, True, 0, 16)
    past = [5, 600, 63, 1200]
    paged = Paged.of(past, 1300, 8, 128, 16)
    (q, k, v), turn = inputs(4, kind)
    pages = paged.pages([1] * 4)

    def run() -> Tensor:
        serving.begin_step()
        return decode.decode_attention(q, k, v, turn, pages, math.sqrt(1 / 128))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for step in range(40):
        q.copy_(randn(*q.shape))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())
        if step == 20:
            pages.slots.copy_(pages.slots.flip(0))
        paged.lengths[pages.slots.long()] += 1
