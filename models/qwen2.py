"""Qwen2 and Qwen2.5, the dense sizes: Llama's block with a bias on queries, keys and values.

The computation is that of transformers' models/qwen2/modeling_qwen2.py (arXiv:2407.10671, arXiv:2412.15115).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph import ops

ARCHITECTURES = ("Qwen2ForCausalLM",)


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes and switches of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int  # tokens that a sequence may have, with the rope scaling
    norm_eps: float
    windows: tuple[int, ...]  # of each layer: tokens that attention looks back, itself included; 0 is all
    tied: bool  # the head is the embedding
    rope: Mapping[str, Any]  # rope_type, rope_theta, trained_positions, and what the type needs

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        """Read a config.json. Raises `ModelError` for what is missing or would change the computation unsupported."""
        ops.require(raw, "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
        layers, head_dim = raw["num_hidden_layers"], raw.get("head_dim") or raw["hidden_size"] // heads
        # A window in the config means nothing unless it is to be used, and then for the layers after the first few.
        window = (raw.get("sliding_window", 4096) or 0) if raw.get("use_sliding_window") else 0
        whole = raw.get("max_window_layers", 28)
        kinds = raw.get("layer_types") or ["full_attention"] * whole + ["sliding_attention"] * (layers - whole)
        refused = {
            f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") not in ("silu", "swish"),
            f"{kv_heads} kv heads for {heads} heads": heads % kv_heads != 0,
            f"layer_types {sorted(set(kinds))}": not {"full_attention", "sliding_attention"}.issuperset(kinds),
        }
        ops.refuse("models/qwen2.py", refused)
        positions = raw.get("max_position_embeddings") or 32768
        rope = ops.rope_parameters(raw, positions)
        return cls(
            layers=layers,
            hidden=raw["hidden_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=raw["intermediate_size"],
            vocab=raw["vocab_size"],
            max_positions=ops.stretched(rope, positions),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            rope=rope,
        )


class RMSNorm(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.eps = config.norm_eps


class Attention(nn.Module):
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window
        width = config.heads * config.head_dim
        self.norm = RMSNorm(config)
        self.qkv = nn.Linear(config.hidden, width + 2 * config.kv_heads * config.head_dim, bias=True)
        self.o = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        qkv = ops.linear(x, self.qkv, norm=self.norm).unflatten(-1, (-1, self.head_dim))
        kv_heads = cache.k.shape[2]
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)  # [tokens, heads, head_dim] each
        y = ops.attention(q, k, v, cache, batch, scale=self.head_dim**-0.5, window=self.window, rope=rope)
        return ops.linear(y.flatten(1), self.o, residual=x)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = RMSNorm(config)
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(ops.linear(x, self.gate_up, norm=self.norm, gated=True), self.down, residual=x)


class Block(nn.Module):
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config, window), MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        return self.mlp(self.attention(x, rope, cache, batch))  # [tokens, hidden]


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


# Our parameters, and the checkpoint's that they are made of, one below the other.
_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
WEIGHTS: dict[str, str | tuple[str, ...]] = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention.norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.qkv.weight": tuple(f"{_ATTENTION}.{p}_proj.weight" for p in "qkv"),
    "layers.{}.attention.qkv.bias": tuple(f"{_ATTENTION}.{p}_proj.bias" for p in "qkv"),
    "layers.{}.attention.o.weight": f"{_ATTENTION}.o_proj.weight",
    "layers.{}.mlp.norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{}.mlp.down.weight": f"{_MLP}.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# How each linear is divided among ranks: "column" by its outputs (a fused one part by part), "row" by its inputs.
TENSOR_PARALLEL = {
    "layers.{}.attention.qkv": "column",
    "layers.{}.attention.o": "row",
    "layers.{}.mlp.gate_up": "column",
    "layers.{}.mlp.down": "row",
    "output": "column",
}
