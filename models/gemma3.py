"""Gemma 3, text: most layers look back a window only, every branch is normed on both sides, gates are GELU.

The computation is that of transformers' models/gemma3/modeling_gemma3.py (arXiv:2503.19786).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph import ops
from fastgraph.errors import ModelError

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")  # of the latter, the text part
Ropes = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # cos and sin for whole layers, and for windowed ones


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
    scale: float  # of the scores
    windows: tuple[int, ...]  # of each layer: tokens that attention looks back, itself included; 0 is all
    logit_cap: float  # logits stay within it, by a tanh; 0 is no cap
    tied: bool  # the head is the embedding
    attention_bias: bool
    ropes: tuple[Mapping[str, Any], Mapping[str, Any]]  # of whole layers, and of windowed ones

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        """Read a config.json. Raises `ModelError` for what is missing or would change the computation unsupported."""
        raw = {**raw, **(raw.get("text_config") or {})}
        ops.require(raw, "hidden_size", "intermediate_size", "num_hidden_layers")
        heads, kv_heads = raw.get("num_attention_heads", 8), raw.get("num_key_value_heads", 4)
        layers, window = raw["num_hidden_layers"], raw.get("sliding_window", 4096)
        period = raw.get("sliding_window_pattern", 6)  # so many layers, and the last of them is whole
        by_period = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
        kinds = raw.get("layer_types") or by_period
        activation = raw.get("hidden_activation") or "gelu_pytorch_tanh"
        refused = {
            f"hidden_activation {activation!r}": activation != "gelu_pytorch_tanh",
            f"{kv_heads} kv heads for {heads} heads": heads % kv_heads != 0,
            f"layer_types {sorted(set(kinds))}": not {"full_attention", "sliding_attention"}.issuperset(kinds),
            f"sliding_window {window!r}": not window,
            "attn_logit_softcapping": bool(raw.get("attn_logit_softcapping")),
            "use_bidirectional_attention": bool(raw.get("use_bidirectional_attention")),
        }
        ops.refuse("models/gemma3.py", refused)
        positions, given = raw.get("max_position_embeddings") or 131072, raw.get("rope_parameters") or {}
        whole = {"rope_theta": raw.get("rope_theta") or 1e6, **(raw.get("rope_scaling") or {})}
        local = {"rope_theta": raw.get("rope_local_base_freq") or 1e4}
        whole, local = (
            ops.rope_parameters({"rope_parameters": rope | (given.get(kind) or {})}, positions)
            for rope, kind in ((whole, "full_attention"), (local, "sliding_attention"))
        )
        return cls(
            layers=layers,
            hidden=raw["hidden_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=raw.get("head_dim") or 256,
            intermediate=raw["intermediate_size"],
            vocab=raw.get("vocab_size", 262208),
            max_positions=positions,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
            windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
            logit_cap=raw.get("final_logit_softcapping") or 0.0,
            tied=bool(raw.get("tie_word_embeddings", True)),
            attention_bias=bool(raw.get("attention_bias", False)),
            ropes=(whole, local),
        )


class RMSNorm(nn.Module):
    """Its weight is in float32 whatever the model's dtype: it is applied before rounding."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.eps = eps


class Attention(nn.Module):
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.head_dim, self.scale, self.window = config.head_dim, config.scale, window
        width = config.heads * config.head_dim
        self.norm, self.norm_after = (RMSNorm(config.hidden, config.norm_eps) for _ in range(2))
        self.qkv = nn.Linear(config.hidden, width + 2 * config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in "qk")
        self.o = nn.Linear(width, config.hidden, bias=config.attention_bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        qkv = ops.linear(x, self.qkv, norm=self.norm).unflatten(-1, (-1, self.head_dim))
        kv_heads = cache.k.shape[2]
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)  # [tokens, heads, head_dim] each
        norms = (self.q_norm, self.k_norm)
        y = ops.attention(q, k, v, cache, batch, scale=self.scale, window=self.window, rope=rope, norms=norms)
        return ops.norm_add(x, ops.linear(y.flatten(1), self.o), self.norm_after)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm, self.norm_after = (RMSNorm(config.hidden, config.norm_eps) for _ in range(2))
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = ops.linear(x, self.gate_up, norm=self.norm, gated=True, activation="gelu")
        return ops.norm_add(x, ops.linear(y, self.down), self.norm_after)


class Block(nn.Module):
    def __init__(self, config: Config, window: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config, window), MLP(config)
        self.windowed = window > 0

    def forward(self, x: Tensor, ropes: Ropes, cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        return self.mlp(self.attention(x, ropes[int(self.windowed)], cache, batch))  # [tokens, hidden]


class Model(nn.Module):
    """The engine calls `embed`, then every block of `layers`, then `head` on the rows that are sampled."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if torch.get_default_dtype() == torch.float16:
            raise ModelError("Gemma 3 overflows float16; run it in bfloat16 or float32 (dtype)")
        self.scale, self.logit_cap = config.hidden**0.5, config.logit_cap
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.ropes = nn.ModuleList(ops.Rope(rope, config.head_dim) for rope in config.ropes)
        self.layers = nn.ModuleList(Block(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.output = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def embed(self, batch: ops.Batch) -> tuple[Tensor, Ropes]:
        """The embedded tokens [tokens, hidden], and the two ropes of which each block takes one."""
        x = self.embedding(batch.ids)
        whole, local = (rope(batch.positions, batch.sequence_lengths) for rope in self.ropes)
        return x * x.new_full((), self.scale), (whole, local)  # the scale is rounded to the model's dtype first

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits. [rows, hidden] -> [rows, vocab]"""
        logits = ops.linear(x, self.output or self.embedding, norm=self.norm)
        return torch.tanh(logits / self.logit_cap) * self.logit_cap if self.logit_cap else logits


# Our parameters, and the checkpoint's that they are made of, one below the other. It holds the norms less 1.
_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
WEIGHTS: dict[str, str | tuple[str, ...]] = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention.norm.weight": "1 + model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.norm_after.weight": "1 + model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.attention.qkv.weight": tuple(f"{_ATTENTION}.{p}_proj.weight" for p in "qkv"),
    "layers.{}.attention.qkv.bias": tuple(f"{_ATTENTION}.{p}_proj.bias" for p in "qkv"),
    "layers.{}.attention.q_norm.weight": f"1 + {_ATTENTION}.q_norm.weight",
    "layers.{}.attention.k_norm.weight": f"1 + {_ATTENTION}.k_norm.weight",
    "layers.{}.attention.o.weight": f"{_ATTENTION}.o_proj.weight",
    "layers.{}.attention.o.bias": f"{_ATTENTION}.o_proj.bias",
    "layers.{}.mlp.norm.weight": "1 + model.layers.{}.pre_feedforward_layernorm.weight",
    "layers.{}.mlp.norm_after.weight": "1 + model.layers.{}.post_feedforward_layernorm.weight",
    "layers.{}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{}.mlp.down.weight": f"{_MLP}.down_proj.weight",
    "norm.weight": "1 + model.norm.weight",
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
