"""What a model file may call, beside torch: the ops whose implementation depends on the machine, and a few readers of
its config.json.

A model file knows nothing of pages, graphs or batches. It receives a `Batch` and one `LayerCache` a layer and hands
them on to `attention`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from fastgraph.hf import refuse, require
from fastgraph.kernels import attention as _attention
from fastgraph.kernels import cuda
from fastgraph.kernels import experts as _experts
from fastgraph.kernels.reference import gate_mul, linear_reference, rms_norm, rotary, turned
from fastgraph.rope import Rope, rope_parameters, stretched

__all__ = [
    "Batch",
    "LayerCache",
    "Rope",
    "attention",
    "cache_width",
    "gate_mul",
    "linear",
    "norm_add",
    "refuse",
    "require",
    "rms_norm",
    "rope_parameters",
    "rotary",
    "route",
    "stretched",
]

Activation = Literal["silu", "gelu"]


class LayerCache(NamedTuple):
    """The paged keys and values of one layer."""

    k: Tensor  # [pages, page_size, kv_heads, width], as wide as a head or wider
    v: Tensor  # [pages, page_size, kv_heads, width]


class Batch(NamedTuple):
    """The tokens of one step. A row is one request's share of it: one token when decoding, a chunk when prefilling.

    Rows lie back to back: row r owns tokens [query_start[r], query_start[r + 1]). Before the step, the KV of the first
    `lengths[slots[r]]` tokens of a row is in its pages.
    """

    ids: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32, place in the sequence
    sequence_lengths: Tensor  # [tokens] int32, of the token's sequence: the whole prompt's, or position + 1 past it
    token_slots: Tensor  # [tokens] int32, the slot of each token's row
    slots: Tensor  # [rows] int32
    query_start: Tensor  # [rows + 1] int32
    lengths: Tensor  # [slots] int32
    page_table: Tensor  # [slots, pages_per_slot] int32


class Norm(Protocol):
    """An RMSNorm of the model file."""

    @property
    def weight(self) -> Tensor: ...  # [width]

    @property
    def eps(self) -> float: ...


def linear(
    x: Tensor,
    layer: nn.Linear | nn.Embedding,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    activation: Activation = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """A linear layer with what stands around it: the norm of its input, SwiGLU on its output, the residual's addition.

    x: [tokens, in] -> [tokens, out]. `gated`: the layer's first half of outputs is the gate, half as many come out, and
    `activation` is the gate's. `residual` takes the sum and is what comes back: what it was is gone. A tied head gives
    its embedding as the layer. On a GPU this is one kernel for a small batch.
    """
    bias = layer.bias if isinstance(layer, nn.Linear) else None
    scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    if not _has_kernels(x):
        y = linear_reference(x, layer.weight, bias, scale, eps, gated, None, activation)
        return y if residual is None else residual.add_(y)
    if residual is None:
        return cuda.linear(x, layer.weight, bias, scale, eps, gated, activation)
    cuda.add_linear(x, layer.weight, bias, scale, eps, gated, activation, residual)
    return residual


def norm_add(residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """residual + norm(x), the norm that some models have behind a linear. [tokens, hidden]

    The residual takes the sum and is what comes back: what it was is gone.
    """
    if not _has_kernels(x):
        return residual.add_(rms_norm(x, norm.weight, norm.eps))
    cuda.norm_add(x, norm.weight, norm.eps, residual)
    return residual


def route(logits: Tensor, top_k: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """The experts that each token goes to: the `top_k` likeliest, and their weights, by softmax over all experts.

    logits: [tokens, experts] -> weights [tokens, top_k] float32, ids [tokens, top_k] int64, in any order. `normalised`
    makes the weights of each token add up to 1.
    """
    if not _has_kernels(logits):
        return _experts.route_reference(logits, top_k, normalised)
    weights, ids = cuda.route(logits, top_k, normalised)
    return weights, ids


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    residual: Tensor | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Routed SwiGLU experts: for each token, the weighted sum of what the experts that it was routed to make of it.

    x: [tokens, hidden]; gate_up: [experts, 2 * width, hidden], gates first; down: [experts, hidden, width];
    weights: [tokens, top_k] float32; ids: [tokens, top_k] int64, of experts, each token's all different; residual:
    [tokens, hidden], added to the result; biases: of gate_up [experts, 2 * width] and of down [experts, hidden].
    `limit` > 0 makes the activation gpt-oss's: what is beyond the limit is cut, the gate is steeper, and up is raised
    by 1. Returns [tokens, hidden].
    """
    return _experts.experts(x, gate_up, down, weights, ids, residual, *(biases or (None, None)), limit)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    rope: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Norm, Norm] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v into the pages, attend causally over everything the row has there.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]. Returns [tokens, heads, head_dim].
    `window` > 0 lets a token see only itself and the `window - 1` before it. `rope` is cos and sin as in `rotary`;
    `norms` are those of each head of q and of k, before it. Without them q and k are taken as they come. `sinks`,
    [heads], are logits that take part in each softmax and whose share is lost (arXiv:2309.17453).
    """
    spare = cache.k.shape[-1] - q.shape[-1]  # by which the pages are wider than a head
    scales = (norms[0].weight, norms[1].weight, norms[0].eps) if norms else (None, None, 0.0)
    turn = _attention.Turn(*(rope or (None, None)), *scales)
    if rope is None or spare or not _has_kernels(q):  # a CPU's compiler fuses them
        q, k = turned(q, k, turn)
        turn = _attention.NO_TURN
    if spare:
        q, k, v = (F.pad(x, (0, spare)) for x in (q, k, v))
    rows = (batch.page_table, batch.lengths, batch.slots, batch.query_start, batch.positions, batch.token_slots)
    y = _attention.attention(q, k, v, *turn, cache.k, cache.v, *rows, scale, window, sinks)
    return y[..., :-spare] if spare else y


def cache_width(head_dim: int, device: str) -> int:
    """How many elements a head's keys have in the pages: on a GPU a power of two, which its kernels want."""
    return head_dim if device == "cpu" else 1 << (head_dim - 1).bit_length()


def _has_kernels(x: Tensor) -> bool:
    """Whether x is where the fused kernels run, or stands for it. The compiler knows the answer when it traces."""
    return x.device.type != "cpu"
