"""Mixtral, 8x7B and 8x22B: Mistral's attention, and of several MLPs a few for each token.

The computation is that of transformers' models/mixtral/modeling_mixtral.py (arXiv:2401.04088).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph import ops

ARCHITECTURES = ("MixtralForCausalLM",)


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
    lookback: int  # tokens that every layer looks back, itself included; 0 is all
    tied: bool  # the head is the embedding
    rope: Mapping[str, Any]  # rope_type, rope_theta, trained_positions, and what the type needs

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        """Read a config.json. Raises `ModelError` for what is missing or would change the computation unsupported."""
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        ops.require(raw, *sizes, "num_local_experts", "num_experts_per_tok")
        experts, top_k = raw["num_local_experts"], raw["num_experts_per_tok"]
        heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads", 8) or raw["num_attention_heads"]
        refused = {
            f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") not in ("silu", "swish"),
            f"{kv_heads} kv heads for {heads} heads": heads % kv_heads != 0,
            f"{experts} experts, {top_k} for a token": experts < top_k,
        }
        ops.refuse("models/mixtral.py", refused)
        positions = raw.get("max_position_embeddings") or 131072
        rope = ops.rope_parameters({"rope_theta": 1e6, **raw}, positions)
        return cls(
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            intermediate=raw["intermediate_size"],
            experts=experts,
            top_k=top_k,
            vocab=raw["vocab_size"],
            max_positions=ops.stretched(rope, positions),
            norm_eps=raw.get("rms_norm_eps", 1e-5),
            lookback=raw.get("sliding_window") or 0,
            tied=bool(raw.get("tie_word_embeddings", False)),
            rope=rope,
        )


class RMSNorm(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.eps = config.norm_eps


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.lookback
        width = config.heads * config.head_dim
        self.norm = RMSNorm(config)
        self.qkv = nn.Linear(config.hidden, width + 2 * config.kv_heads * config.head_dim, bias=False)
        self.o = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        qkv = ops.linear(x, self.qkv, norm=self.norm).unflatten(-1, (-1, self.head_dim))
        kv_heads = cache.k.shape[2]
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)  # [tokens, heads, head_dim] each
        y = ops.attention(q, k, v, cache, batch, scale=self.head_dim**-0.5, window=self.window, rope=rope)
        return ops.linear(y.flatten(1), self.o, residual=x)


class Experts(nn.Module):
    """A router that sends each token to a few of many MLPs."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.norm = RMSNorm(config)
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.intermediate, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.intermediate))

    def forward(self, x: Tensor) -> Tensor:
        y = ops.rms_norm(x, self.norm.weight, self.norm.eps)
        weights, ids = ops.route(ops.linear(y, self.router), self.top_k, normalised=True)  # [tokens, top_k] each
        return ops.experts(y, self.gate_up, self.down, weights, ids, residual=x)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.experts = Attention(config), Experts(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        return self.experts(self.attention(x, rope, cache, batch))  # [tokens, hidden]


class Model(nn.Module):
    """The engine calls `embed`, then every block of `layers`, then `head` on the rows that are sampled."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.rope = ops.Rope(config.rope, config.head_dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config)
        self.output = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def embed(self, batch: ops.Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The embedded tokens [tokens, hidden], and the rope that all blocks share."""
        return self.embedding(batch.ids), self.rope(batch.positions, batch.sequence_lengths)

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits. [rows, hidden] -> [rows, vocab]"""
        return ops.linear(x, self.output or self.embedding, norm=self.norm)


# Our parameters, and the checkpoint's that they are made of, one below the other.
_ATTENTION, _MLP, _FUSED = (f"model.layers.{{}}.{part}" for part in ("self_attn", "block_sparse_moe", "mlp"))
# Checkpoints hold each expert by itself; those that transformers 5 saved in its own layout hold all in one tensor.
WEIGHTS: dict[str, str | tuple[str, ...] | list[str | tuple[str, ...]]] = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention.norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.qkv.weight": tuple(f"{_ATTENTION}.{p}_proj.weight" for p in "qkv"),
    "layers.{}.attention.o.weight": f"{_ATTENTION}.o_proj.weight",
    "layers.{}.experts.norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.experts.router.weight": [f"{_MLP}.gate.weight", f"{_FUSED}.gate.weight"],
    "layers.{}.experts.gate_up": [
        (f"{_MLP}.experts.{{expert}}.w1.weight", f"{_MLP}.experts.{{expert}}.w3.weight"),
        f"{_FUSED}.experts.gate_up_proj",
    ],
    "layers.{}.experts.down": [f"{_MLP}.experts.{{expert}}.w2.weight", f"{_FUSED}.experts.down_proj"],
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
