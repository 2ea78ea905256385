"""Attention with sinks against float64: in the Triton kernels, and in plain PyTorch in every shape of step."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import DEVICE, TOLERANCE, Paged, error, load, randn
from torch import Tensor

from fastgraph.kernels import serving
from fastgraph.kernels.attention import NO_TURN
from fastgraph.kernels.reference import attention_reference

decode, cutting, prefill = load("decode_attention", "decode_splits", "prefill_attention")
KINDS = [(4, 2, 32, 0, 16), (6, 2, 16, 0, 16), (8, 1, 32, 21, 16), (3, 3, 16, 5, 4)]  # heads, kv, dim, window, page


def answer(paged: Paged, q: Tensor, row: int, position: int, scale: float, window: int, sinks: Tensor) -> Tensor:
    """Softmax over the keys and one more logit, in float64. q: [heads, head_dim]"""
    start = max(0, position + 1 - window) if window else 0
    page, offset = paged.cells(row, start, position + 1)
    group = q.shape[0] // paged.k_cache.shape[2]
    k = paged.k_cache[page, offset].double().repeat_interleave(group, 1)  # [tokens, heads, head_dim]
    v = paged.v_cache[page, offset].double().repeat_interleave(group, 1)
    logits = torch.einsum("hd,thd->ht", q.double(), k) * scale
    share = torch.softmax(torch.cat([logits, sinks.double()[:, None]], 1), dim=1)[:, :-1]
    return torch.einsum("ht,thd->hd", share, v)


def inputs(tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv = randn(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    return (*qkv, torch.linspace(-4, 6, heads, device=DEVICE).to(qkv[0].dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [1, 4])
def test_decode(kind: tuple[int, ...], pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "split_plan", lambda *_: cutting.SplitPlan(pieces, 32, 32, 4096))
    heads, kv_heads, dim, window, page_size = kind
    past = [0, 37, 100, 15, 64]
    paged = Paged.of(past, max(past) + 1, kv_heads, dim, page_size)
    q, k, v, sinks = inputs(len(past), heads, kv_heads, dim)
    pages = paged.pages([1] * len(past))
    serving.begin_step()
    out = decode.decode_attention(q, k, v, NO_TURN, pages, dim**-0.5, window, sinks)
    for row, position in enumerate(past):
        assert error(out[row], answer(paged, q[row], row, position, dim**-0.5, window, sinks)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", ["mixed", "decode", "one row", "uneven decode"])
def test_rows_of_any_length(kind: tuple[int, ...], steps: str) -> None:
    heads, kv_heads, dim, window, page_size = kind
    past, counts = {
        "mixed": ([0, 37, 100, 15, 3, 40], [9, 20, 5, 1, 0, 1]),
        "decode": ([20, 21, 22], [1, 1, 1]),
        "one row": ([0], [30]),
        "uneven decode": ([2, 3, 100], [1, 1, 1]),
    }[steps]
    span = max(p + c for p, c in zip(past, counts, strict=True)) + 1
    paged = Paged.of(past, span, kv_heads, dim, page_size)
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    q, k, v, sinks = inputs(starts[-1], heads, kv_heads, dim)
    pages = paged.pages(counts)
    plain = attention_reference(q, k, v, NO_TURN, pages, dim**-0.5, window, sinks)  # writes the keys and values
    out = prefill.prefill_attention(q, pages, dim**-0.5, window, sinks)
    for row, count in enumerate(counts):
        for i in range(count):
            token = starts[row] + i
            want = answer(paged, q[token], row, past[row] + i, dim**-0.5, window, sinks)
            assert error(out[token], want) < TOLERANCE
            assert error(plain[token], want) < TOLERANCE
