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
from importlib import import_module
from typing import Any

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


def _of(module: str, name: str) -> Kernel:
    """A function of a module in this folder."""
    kernel: Kernel = getattr(import_module(f"fastgraph.kernels.{module}"), name)
    return kernel


def _powers_of_two(signature: Signature) -> str:
    odd = [name for name in ("head_dim", "page_size") if (size := getattr(signature, name)) & (size - 1)]
    return "".join(f"{name} {getattr(signature, name)} is no power of two" for name in odd[:1])


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
    _triton("decode_attention", lambda: _of("decode_attention", "decode_attention"), _powers_of_two),
    _reference("decode_attention", lambda: _of("reference", "attention_reference"), capturable=False),
    _triton("prefill_attention", lambda: _of("prefill_attention", "mixed_attention"), _powers_of_two),
    _FLASHINFER,
    _reference("prefill_attention", lambda: _of("reference", "attention_reference"), capturable=False),
    _triton("rotate_and_write", lambda: _of("rotary", "rotate_and_write"), _powers_of_two),
    _reference("rotate_and_write", lambda: _of("reference", "rotate_and_write_reference")),
    _triton("linear", lambda: _of("linear", "linear")),
    _reference("linear", lambda: _of("reference", "linear_reference")),
    _triton("experts", lambda: _of("experts_triton", "experts")),
    _reference("experts", lambda: _of("experts", "experts_reference"), capturable=False),
    _triton("sample", lambda: _of("sampling_triton", "sample_rows")),
    _reference("sample", lambda: _of("sampling", "sample_reference")),
)
