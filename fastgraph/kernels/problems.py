"""Random problems for each op, and how far an implementation's answer is from the reference's.

What serves is checked with them before it is timed; who writes a kernel can do the same:
`error(kernel, "prefill_attention", signature, rows=100)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fastgraph.kernels import registry, serving
from fastgraph.kernels.attention import NO_TURN, Pages, Turn
from fastgraph.kernels.registry import Kernel, Signature
from fastgraph.kernels.sampling import SamplerState, outputs_of

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}  # of `error`

_CHUNK = 1024  # tokens of a prompt; a problem of more has several
_PAST = (0, 100, 700, 33)  # tokens that rows have in their pages already, in turn


def problem(op: str, signature: Signature, rows: int, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of an op. rows: tokens, or for `sample` logits. Cells of pages that were never written are NaN."""
    generator = torch.Generator(signature.device).manual_seed(seed)
    dtype = getattr(torch, signature.dtype)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=signature.device) * scale).to(dtype)

    with torch.device(signature.device):
        if op == "linear":
            width = signature.hidden
            weight, norm = randn(width, width, scale=width**-0.5), 1 + randn(width, scale=0.1)
            return randn(rows, width), weight, None, norm, 1e-5, False, randn(rows, width), "silu"
        if op == "experts":
            return _routing(signature, rows, randn)
        if op == "sample":
            return _sampling(randn(rows, signature.vocab, scale=3.0).float(), rows)
        chunk = 1 if op == "decode_attention" else _CHUNK
        counts = [min(chunk, rows - start) for start in range(0, rows, chunk)]
        q, k, v = (randn(rows, heads, signature.head_dim) for heads in (signature.heads, *[signature.kv_heads] * 2))
        pages = _pages(signature, counts, randn)
        turn = _turn(signature, pages.positions, randn)
        if op == "rotate_and_write":
            return q, k, v, turn, pages
        window = 64 if "window" in signature.features else 0
        sinks = (randn(signature.heads, scale=3.0),) if "sinks" in signature.features else ()
        return (q, k, v, turn, pages, signature.head_dim**-0.5, window, *sinks)


def _pages(signature: Signature, counts: list[int], randn: Callable[..., Tensor]) -> Pages:
    size, rows = signature.page_size, len(counts)
    past = torch.tensor([_PAST[row % len(_PAST)] for row in range(rows)], dtype=torch.int32)
    new = torch.tensor(counts, dtype=torch.int32)
    per_slot = -(-int((past + new).max()) // size)
    shape = (rows * per_slot + 1, size, signature.kv_heads, signature.head_dim)
    table = (torch.randperm(rows * per_slot, device="cpu") + 1).int().view(rows, per_slot).to(past.device)
    slots = (torch.randperm(rows, device="cpu") + 1).int().to(past.device)
    page_table = torch.cat([torch.zeros(1, per_slot, dtype=torch.int32), table])
    lengths = torch.zeros(rows + 1, dtype=torch.int32).index_copy(0, slots.long(), past)
    start = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()])
    row_of = torch.repeat_interleave(torch.arange(rows), new)
    positions = (past[row_of] + torch.arange(int(new.sum())) - start[row_of]).int()
    # A cell holds a token if its position in the row is below what the row has.
    written = torch.zeros(shape[0], size, dtype=torch.bool)
    written[page_table[slots.long()].long()] = (torch.arange(per_slot * size) < past[:, None]).view(
        rows, per_slot, size
    )
    k_cache, v_cache = (torch.where(written[..., None, None], randn(*shape), torch.nan) for _ in "kv")
    return Pages(k_cache, v_cache, page_table, lengths, slots, start, positions, slots[row_of])


def _turn(signature: Signature, positions: Tensor, randn: Callable[..., Tensor]) -> Turn:
    if "rope" not in signature.features:
        return NO_TURN
    half = signature.head_dim // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    norms = [1 + randn(signature.head_dim, scale=0.1) if "norms" in signature.features else None for _ in "qk"]
    return Turn(angles.cos(), angles.sin(), norms[0], norms[1], 1e-6)


def _routing(signature: Signature, rows: int, randn: Callable[..., Tensor]) -> tuple[Any, ...]:
    """Two of eight experts a token, if the signature has none."""
    hidden, experts = signature.hidden, signature.experts or 8
    inside = signature.intermediate or hidden
    weights, ids = randn(rows, experts).float().softmax(-1).topk(signature.top_k or min(2, experts))
    gate_up = randn(experts, 2 * inside, hidden, scale=hidden**-0.5)
    down = randn(experts, hidden, inside, scale=inside**-0.5)
    return randn(rows, hidden), gate_up, down, weights, ids, randn(rows, hidden), None, None, 0.0


def _sampling(logits: Tensor, rows: int) -> tuple[Any, ...]:
    """Every other row samples; the others are greedy."""
    slots, vocab = rows + 1, logits.shape[1]
    place = torch.arange(slots)
    zeros, ones = torch.zeros(slots), torch.ones(slots)
    none, lists = torch.zeros(slots, dtype=torch.int32), torch.full((slots, 8), -1, dtype=torch.int32)
    counts, seen = torch.zeros(slots, vocab, dtype=torch.int16), torch.zeros(slots, vocab, dtype=torch.bool)
    seeds = torch.stack([place, place * 7919], 1).int()
    filters = (none + 50, zeros + 0.9, zeros)  # top_k, top_p, min_p
    limits = (none, none, lists, lists, torch.zeros(slots, 8), none - 1)
    state = SamplerState(place % 2 * 0.8, *filters, ones, zeros, zeros, seeds, *limits, counts, seen)
    return logits, place[1:].int(), vocab, state, outputs_of(rows)


def answer(op: str, kernel: Kernel, args: tuple[Any, ...]) -> list[Tensor]:
    """What a kernel makes of a problem: what it returns, and what it has written."""
    serving.begin_step()
    returned = kernel(*args)
    if op == "sample":
        return [args[-1].tokens]
    if op in ("linear", "experts"):
        return [returned]
    pages: Pages = args[4]
    size = pages.k_cache.shape[1]
    page = pages.page_table[pages.token_slots.long(), (pages.positions // size).long()].long()
    return [returned, *(cache[page, (pages.positions % size).long()] for cache in pages[:2])]


@torch.inference_mode()
def error(kernel: Kernel, op: str, signature: Signature, rows: int) -> float:
    """How far a kernel's answer to a random problem is from the reference's, computed in float32.

    ||answer - reference|| / ||reference||, the largest of all results; of tokens, the share that differ. NaN, which is
    below nothing, where the answer has one.
    """
    args = problem(op, signature, rows)
    wide = tree_map(_widened, args)
    reference = next(i for i in registry.implementations(op) if i.name == "reference").load()
    want, got = answer(op, reference, wide), answer(op, kernel, args)
    return float(torch.stack([_distance(x, y) for x, y in zip(got, want, strict=True)]).max())


def _widened(x: Any) -> Any:
    """A copy of a tensor, since ops write into their arguments; in float32."""
    if not isinstance(x, Tensor):
        return x
    return x.to(torch.float32 if x.is_floating_point() else x.dtype, copy=True)


def _distance(got: Tensor, want: Tensor) -> Tensor:
    if not want.is_floating_point():
        return (got != want).double().mean()
    return (got.double() - want.double()).norm() / want.double().norm()
