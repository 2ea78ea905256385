"""gpt-oss, 20B and 120B: attention with sinks, a window in every other layer, and routed experts.

The computation is that of transformers' models/gpt_oss/modeling_gpt_oss.py (arXiv:2508.10925). Experts in MXFP4 are
widened when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph import ops

ARCHITECTURES = ("GptOssForCausalLM",)


_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes and switches of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of an expert
    experts: int
    top_k: int  # experts of a token
    vocab: int
    max_positions: int  # tokens that a sequence may have, with the rope scaling
    norm_eps: float
    windows: tuple[int, ...]  # of each layer: tokens that attention looks back, itself included; 0 is all
    limit: float  # of what goes into the activation
    tied: bool  # the head is the embedding
    attention_bias: bool
    rope: Mapping[str, Any]  # rope_type, rope_theta, trained_positions, and what the type needs

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        """Read a config.json. Raises `ModelError` for what is missing or would change the computation unsupported."""
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        ops.require(raw, *sizes, "num_local_experts", "num_experts_per_tok")
        experts, top_k = raw["num_local_experts"], raw["num_experts_per_tok"]
        heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads", 8) or raw["num_attention_heads"]
        window, layers = raw.get("sliding_window", 128) or 0, raw["num_hidden_layers"]
        kinds = raw.get("layer_types") or [_SLIDING if i % 2 == 0 else _FULL for i in range(layers)]
        refused = {
            f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") not in ("silu", "swish"),
            f"{kv_heads} kv heads for {heads} heads": heads % kv_heads != 0,
            f"{experts} experts, {top_k} for a token": experts < top_k,
            f"layer_types {kinds}": len(kinds) != layers or not {_SLIDING, _FULL}.issuperset(kinds),
            f"sliding_window {raw.get('sliding_window')}": _SLIDING in kinds and not window,
            "a config without rope scaling": not (raw.get("rope_scaling") or raw.get("rope_parameters")),
            f"swiglu_alpha {raw.get('swiglu_alpha')}": raw.get("swiglu_alpha", 1.702) != 1.702,
            f"swiglu_limit {raw.get('swiglu_limit')}": not raw.get("swiglu_limit", 7.0) > 0,
        }
        ops.refuse("models/gpt_oss.py", refused)
        positions = raw.get("max_position_embeddings") or 131072
        rope = ops.rope_parameters({"rope_theta": 150000.0, **raw}, positions)
        return cls(
            layers=layers,
            hidden=raw["hidden_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=raw.get("head_dim") or 64,
            intermediate=raw["intermediate_size"],
            experts=experts,
            top_k=top_k,
            vocab=raw["vocab_size"],
            max_positions=ops.stretched(rope, positions),
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            windows=tuple(window if kind == _SLIDING else 0 for kind in kinds),
            limit=raw.get("swiglu_limit", 7.0),
            tied=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", True)),
            rope=rope,
        )


class RMSNorm(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden, dtype=torch.float32))  # applied before rounding
        self.eps = config.norm_eps


class Attention(nn.Module):
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window
        width = config.heads * config.head_dim
        self.norm = RMSNorm(config)
        self.qkv = nn.Linear(config.hidden, width + 2 * config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.sinks = nn.Parameter(torch.empty(config.heads))
        self.o = nn.Linear(width, config.hidden, bias=config.attention_bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        qkv = ops.linear(x, self.qkv, norm=self.norm).unflatten(-1, (-1, self.head_dim))
        kv_heads = cache.k.shape[2]
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)  # [tokens, heads, head_dim] each
        scale = self.head_dim**-0.5
        y = ops.attention(q, k, v, cache, batch, scale=scale, window=self.window, rope=rope, sinks=self.sinks)
        return ops.linear(y.flatten(1), self.o, residual=x)


class Experts(nn.Module):
    """A router that sends each token to a few of many MLPs."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.limit = config.top_k, config.limit
        self.norm = RMSNorm(config)
        self.router = nn.Linear(config.hidden, config.experts)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate, config.hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.intermediate))
        self.down_bias = nn.Parameter(torch.empty(config.experts, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        y = ops.rms_norm(x, self.norm.weight, self.norm.eps)
        weights, ids = ops.route(ops.linear(y, self.router), self.top_k, normalised=True)  # [tokens, top_k] each
        biases = (self.gate_up_bias, self.down_bias)
        return ops.experts(y, self.gate_up, self.down, weights, ids, residual=x, biases=biases, limit=self.limit)


class Block(nn.Module):
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.attention, self.experts = Attention(config, window), Experts(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        return self.experts(self.attention(x, rope, cache, batch))  # [tokens, hidden]


class Model(nn.Module):
    """The engine calls `embed`, then every block of `layers`, then `head` on the rows that are sampled."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.rope = ops.Rope(config.rope, config.head_dim)
        self.layers = nn.ModuleList(Block(config, window) for window in config.windows)
        self.norm = RMSNorm(config)
        self.output = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def embed(self, batch: ops.Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The embedded tokens [tokens, hidden], and the rope that all blocks share."""
        return self.embedding(batch.ids), self.rope(batch.positions, batch.sequence_lengths)

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits. [rows, hidden] -> [rows, vocab]"""
        return ops.linear(x, self.output or self.embedding, norm=self.norm)


# Our parameters, and the checkpoint's that they are made of, one below the other. It holds a gate beside each up, and
# experts in MXFP4, or wider and then transposed.
_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
WEIGHTS: dict[str, str | tuple[str, ...] | list[str | tuple[str, ...]]] = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention.norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.qkv.weight": tuple(f"{_ATTENTION}.{p}_proj.weight" for p in "qkv"),
    "layers.{}.attention.qkv.bias": tuple(f"{_ATTENTION}.{p}_proj.bias" for p in "qkv"),
    "layers.{}.attention.sinks": f"{_ATTENTION}.sinks",
    "layers.{}.attention.o.weight": f"{_ATTENTION}.o_proj.weight",
    "layers.{}.attention.o.bias": f"{_ATTENTION}.o_proj.bias",
    "layers.{}.experts.norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.experts.router.weight": f"{_MLP}.router.weight",
    "layers.{}.experts.router.bias": f"{_MLP}.router.bias",
    "layers.{}.experts.gate_up": [
        f"paired mxfp4 {_MLP}.experts.gate_up_proj",
        f"paired transposed {_MLP}.experts.gate_up_proj",
    ],
    "layers.{}.experts.gate_up_bias": f"paired {_MLP}.experts.gate_up_proj_bias",
    "layers.{}.experts.down": [f"mxfp4 {_MLP}.experts.down_proj", f"transposed {_MLP}.experts.down_proj"],
    "layers.{}.experts.down_bias": f"{_MLP}.experts.down_proj_bias",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# How each linear is divided among ranks: "column" by its outputs (a fused one part by part), "row" by its inputs. Every
# expert is divided alike, and the router not at all.
TENSOR_PARALLEL = {
    "layers.{}.attention.qkv": "column",
    "layers.{}.attention.o": "row",
    "layers.{}.experts.gate_up": "column",
    "layers.{}.experts.down": "row",
    "output": "column",
}
