"""The implementations that come with fastgraph, and the arguments of each op.

    decode_attention    (q, k, v, turn: Turn, pages: Pages, scale, window[, sinks]) -> [tokens, heads, head_dim]
    prefill_attention   the same
    rotate_and_write    (q, k, v, turn: Turn, pages: Pages) -> q [tokens, heads, head_dim]
    linear              (x, weight, bias, norm, eps, gated, residual, activation) -> [rows, out]
    experts             (x, gate_up, down, weights, ids, residual, gate_up_bias, down_bias, limit) -> [tokens, hidden]
    sample              (logits, slots, vocab_limit, state: SamplerState, out: SamplerOutput) -> None

What they mean: `fastgraph.kernels.attention`, `fastgraph.ops.linear`, `fastgraph.ops.experts`,
`fastgraph.kernels.sampling.sample`. What an implementation imports, it imports when it is loaded, as a CPU may lack
Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastgraph.kernels import flashinfer_prefill, registry, serving
from fastgraph.kernels.attention import Pages, Turn
from fastgraph.kernels.registry import Implementation, Kernel, Signature, nothing


def after_writing(attend: Callable[..., Tensor]) -> Kernel:
    """An attention op made of a function that only attends: `attend(q, pages, scale, window)`, all written already.

    One that takes sinks gets them behind the window, where a model has some.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, turn: Turn, pages: Pages, *rest: Any) -> Tensor:
        q = serving.kernels(q.device.type)["rotate_and_write"](q, k, v, turn, pages)
        return attend(q, pages, *rest)

    return run


# --- plain PyTorch ---


def _turned(q: Tensor, k: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
    if turn.cos is None or turn.sin is None:
        return q, k
    from fastgraph.kernels.rotary import rotate_reference

    norms = (turn.q_norm, turn.k_norm)
    q, k = (rotate_reference(x, turn.cos, turn.sin, n, turn.eps) for x, n in zip((q, k), norms, strict=True))
    return q, k


def _attend_reference() -> Kernel:
    from fastgraph.kernels.reference import attend_reference

    def run(q: Tensor, k: Tensor, v: Tensor, turn: Turn, pages: Pages, *rest: Any) -> Tensor:
        q, k = _turned(q, k, turn)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attend_reference(q, k, v, *pages[:6], out, *rest)
        return out

    return run


def _write_reference() -> Kernel:
    def run(q: Tensor, k: Tensor, v: Tensor, turn: Turn, pages: Pages) -> Tensor:
        q, k = _turned(q, k, turn)
        size = pages.k_cache.shape[1]
        page = pages.page_table[pages.token_slots, pages.positions // size]
        cell = (page.long(), (pages.positions % size).long())
        pages.k_cache[cell], pages.v_cache[cell] = k, v
        return q

    return run


def _linear_reference() -> Kernel:
    from fastgraph.kernels.linear import linear_reference

    return linear_reference


def _experts_reference() -> Kernel:
    from fastgraph.kernels.experts import experts_reference

    return experts_reference


def _sample_reference() -> Kernel:
    from fastgraph.kernels.sampling import sample_reference

    return sample_reference


# --- Triton ---


def _powers_of_two(signature: Signature) -> str:
    odd = [name for name in ("head_dim", "page_size") if (size := getattr(signature, name)) & (size - 1)]
    return "".join(f"{name} {getattr(signature, name)} is no power of two" for name in odd[:1])


def _decode_triton() -> Kernel:
    from fastgraph.kernels.decode_attention import decode_attention

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turn: Turn,
        pages: Pages,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        cos, sin, q_norm, k_norm, eps = turn
        return decode_attention(q, k, v, cos, sin, *pages[:5], scale, window, q_norm, k_norm, eps, sinks)

    return run


def _prefill_triton() -> Kernel:
    from fastgraph.kernels.prefill_attention import prefill_attention

    return after_writing(lambda q, pages, *rest: prefill_attention(q, *pages[:6], *rest))


def _write_triton() -> Kernel:
    from fastgraph.kernels.rotary import rotate_and_write

    def run(q: Tensor, k: Tensor, v: Tensor, turn: Turn, pages: Pages) -> Tensor:
        cos, sin, q_norm, k_norm, eps = turn
        where = (*pages[:3], pages.positions, pages.token_slots)
        return rotate_and_write(q, k, v, cos, sin, *where, q_norm, k_norm, eps)

    return run


def _linear_triton() -> Kernel:
    from fastgraph.kernels.linear import linear

    return linear


def _experts_triton() -> Kernel:
    from fastgraph.kernels.experts_triton import experts

    return experts


def _sample_triton() -> Kernel:
    from fastgraph.kernels.sampling_triton import sample_rows

    return sample_rows


def _triton(op: str, load: Callable[[], Kernel], refuses: Callable[[Signature], str] = nothing) -> Implementation:
    features = registry.OPS[op].features
    return Implementation(
        op, "triton", load, devices=("cuda",), packages=("triton",), features=features, refuses=refuses, rank=10
    )


def _reference(op: str, load: Callable[[], Kernel], capturable: bool = True) -> Implementation:
    return Implementation(op, "reference", load, features=registry.OPS[op].features, capturable=capturable)


_FLASHINFER = Implementation(
    "prefill_attention",
    "flashinfer",
    flashinfer_prefill.load,
    devices=("cuda",),
    capability=(8, 0),
    packages=("flashinfer",),
    dtypes=("bfloat16", "float16"),
    features=frozenset({"rope", "norms", "window"}),
    capturable=False,
    refuses=flashinfer_prefill.refuses,
    build=flashinfer_prefill.build,
    rank=5,
)

BUILTIN = (
    _triton("decode_attention", _decode_triton, _powers_of_two),
    _reference("decode_attention", _attend_reference, capturable=False),
    _triton("prefill_attention", _prefill_triton, _powers_of_two),
    _FLASHINFER,
    _reference("prefill_attention", _attend_reference, capturable=False),
    _triton("rotate_and_write", _write_triton, _powers_of_two),
    _reference("rotate_and_write", _write_reference),
    _triton("linear", _linear_triton),
    _reference("linear", _linear_reference),
    _triton("experts", _experts_triton),
    _reference("experts", _experts_reference, capturable=False),
    _triton("sample", _sample_triton),
    _reference("sample", _sample_reference),
)
