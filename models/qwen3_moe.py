"""Qwen3 with routed experts, as in 30B-A3B and 235B-A22B: Qwen3's attention, and of many MLPs a few for each token.

The computation is that of transformers' models/qwen3_moe/modeling_qwen3_moe.py (arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph import ops

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes and switches of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the layers that have one dense MLP
    expert_width: int
    experts: int
    top_k: int  # experts of a token
    normalised: bool  # a token's weights add up to 1
    routed: tuple[bool, ...]  # the layers that have experts
    vocab: int
    max_positions: int  # tokens that a sequence may have, with the rope scaling
    norm_eps: float
    tied: bool  # the head is the embedding
    attention_bias: bool
    rope: Mapping[str, Any]  # rope_type, rope_theta, trained_positions, and what the type needs

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        """Read a config.json. Raises `ModelError` for what is missing or would change the computation unsupported."""
        # transformers 5 calls it num_local_experts.
        raw = {**raw, "num_experts": raw.get("num_experts") or raw.get("num_local_experts")}
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        ops.require(raw, *sizes, "moe_intermediate_size", "num_experts_per_tok", "num_experts")
        experts: int = raw["num_experts"]
        heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
        refused = {
            f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") not in ("silu", "swish"),
            f"{kv_heads} kv heads for {heads} heads": heads % kv_heads != 0,
            f"{experts} experts, {raw['num_experts_per_tok']} for a token": experts < raw["num_experts_per_tok"],
            "a sliding window": bool(raw.get("use_sliding_window")),
        }
        ops.refuse("models/qwen3_moe.py", refused)
        positions = raw.get("max_position_embeddings") or 32768
        rope = ops.rope_parameters(raw, positions)
        dense, every = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step") or 1
        return cls(
            layers=raw["num_hidden_layers"],
            hidden=raw["hidden_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            intermediate=raw["intermediate_size"],
            expert_width=raw["moe_intermediate_size"],
            experts=experts,
            top_k=raw["num_experts_per_tok"],
            normalised=bool(raw.get("norm_topk_prob", False)),
            routed=tuple(i not in dense and (i + 1) % every == 0 for i in range(raw["num_hidden_layers"])),
            vocab=raw["vocab_size"],
            max_positions=ops.stretched(rope, positions),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            rope=rope,
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.heads * config.head_dim
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = nn.Linear(config.hidden, width + 2 * config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in "qk")
        self.o = nn.Linear(width, config.hidden, bias=config.attention_bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        qkv = ops.linear(x, self.qkv, norm=self.norm).unflatten(-1, (-1, self.head_dim))
        kv_heads = cache.k.shape[2]
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)  # [tokens, heads, head_dim] each
        scale, norms = self.head_dim**-0.5, (self.q_norm, self.k_norm)
        y = ops.attention(q, k, v, cache, batch, scale=scale, rope=rope, norms=norms)
        return ops.linear(y.flatten(1), self.o, residual=x)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(ops.linear(x, self.gate_up, norm=self.norm, gated=True), self.down, residual=x)


class Experts(nn.Module):
    """A router that sends each token to a few of many MLPs."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.normalised = config.top_k, config.normalised
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.expert_width, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_width))

    def forward(self, x: Tensor) -> Tensor:
        y = ops.rms_norm(x, self.norm.weight, self.norm.eps)
        logits = ops.linear(y, self.router)  # [tokens, experts]
        weights, ids = ops.route(logits, self.top_k, normalised=self.normalised)  # [tokens, top_k] each
        return ops.experts(y, self.gate_up, self.down, weights, ids, residual=x)


class Block(nn.Module):
    def __init__(self, config: Config, routed: bool) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config), Experts(config) if routed else MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        return self.mlp(self.attention(x, rope, cache, batch))  # [tokens, hidden]


class Model(nn.Module):
    """The engine calls `embed`, then every block of `layers`, then `head` on the rows that are sampled."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.rope = ops.Rope(config.rope, config.head_dim)
        self.layers = nn.ModuleList(Block(config, routed) for routed in config.routed)
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.output = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def embed(self, batch: ops.Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The embedded tokens [tokens, hidden], and the rope that all blocks share."""
        return self.embedding(batch.ids), self.rope(batch.positions, batch.sequence_lengths)

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits. [rows, hidden] -> [rows, vocab]"""
        return ops.linear(x, self.output or self.embedding, norm=self.norm)


# Our parameters, and the checkpoint's that they are made of, one below the other.
_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
# Checkpoints hold each expert by itself; those that transformers 5 saved in its own layout hold all in one tensor.
WEIGHTS: dict[str, str | tuple[str, ...] | list[str | tuple[str, ...]]] = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention.norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.qkv.weight": tuple(f"{_ATTENTION}.{p}_proj.weight" for p in "qkv"),
    "layers.{}.attention.qkv.bias": tuple(f"{_ATTENTION}.{p}_proj.bias" for p in "qkv"),
    "layers.{}.attention.q_norm.weight": f"{_ATTENTION}.q_norm.weight",
    "layers.{}.attention.k_norm.weight": f"{_ATTENTION}.k_norm.weight",
    "layers.{}.attention.o.weight": f"{_ATTENTION}.o_proj.weight",
    "layers.{}.attention.o.bias": f"{_ATTENTION}.o_proj.bias",
    "layers.{}.mlp.norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.mlp.router.weight": f"{_MLP}.gate.weight",
    "layers.{}.mlp.gate_up": [
        (f"{_MLP}.experts.{{expert}}.gate_proj.weight", f"{_MLP}.experts.{{expert}}.up_proj.weight"),
        f"{_MLP}.experts.gate_up_proj",
    ],
    "layers.{}.mlp.down": [f"{_MLP}.experts.{{expert}}.down_proj.weight", f"{_MLP}.experts.down_proj"],
    "layers.{}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{}.mlp.down.weight": f"{_MLP}.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

# How each linear is divided among ranks: "column" by its outputs (a fused one part by part), "row" by its inputs. Every
# expert is divided alike, and the router not at all.
TENSOR_PARALLEL = {
    "layers.{}.attention.qkv": "column",
    "layers.{}.attention.o": "row",
    "layers.{}.mlp.gate_up": "column",
    "layers.{}.mlp.down": "row",
    "output": "column",
}
