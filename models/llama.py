"""Llama 2, 3, 3.1, 3.2, Mistral, SmolLM2 and everything else that Hugging Face calls Llama or Mistral.

The computation is that of transformers' models/llama/modeling_llama.py (arXiv:2302.13971, arXiv:2310.06825).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph import ops
from fastgraph.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


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
    window: int  # tokens that attention looks back, itself included; 0 is all
    tied: bool  # the head is the embedding
    attention_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]  # rope_type, rope_theta, trained_positions, and what the type needs

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Config:
        """Read a config.json. Raises `ModelError` for what is missing or would change the computation unsupported."""
        required = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        missing = [name for name in required if raw.get(name) is None]
        if missing:
            raise ModelError(f"the model's config.json lacks {', '.join(missing)}")
        heads, positions = raw["num_attention_heads"], raw.get("max_position_embeddings") or 2048
        kv_heads, head_dim = raw.get("num_key_value_heads") or heads, raw.get("head_dim") or raw["hidden_size"] // heads
        mistral = "MistralForCausalLM" in raw.get("architectures", ())
        refused = {
            f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") not in ("silu", "swish"),
            f"{kv_heads} kv heads for {heads} heads": heads % kv_heads != 0,
            f"head_dim {head_dim}": head_dim % 2 != 0,
            "rope_interleaved": bool(raw.get("rope_interleaved")),
            "partial_rotary_factor": raw.get("partial_rotary_factor") not in (None, 1),
            "several layer_types": len(set(raw.get("layer_types") or ())) > 1,
        }
        if any(refused.values()):
            found = ", ".join(name for name, present in refused.items() if present)
            raise ModelError(f"models/llama.py cannot run {found}; docs/add-a-model.md shows how to add a model file")
        rope = _rope_parameters(raw, positions)
        if rope["rope_type"] in ("dynamic", "yarn"):  # max_position_embeddings may be the length before the stretch
            positions = max(positions, int(rope["trained_positions"] * rope["factor"]))
        window = raw.get("sliding_window", 4096) or 0 if mistral else 0
        biased = {name: bool(raw.get(name)) and not mistral for name in ("attention_bias", "mlp_bias")}
        sizes = (raw["num_hidden_layers"], raw["hidden_size"], heads, kv_heads, head_dim, raw["intermediate_size"])
        eps, tied = raw.get("rms_norm_eps", 1e-6), bool(raw.get("tie_word_embeddings", False))
        return cls(*sizes, raw["vocab_size"], positions, eps, window, tied, **biased, rope=rope)


def _rope_parameters(raw: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """`rope_scaling` and `rope_theta` of transformers 4, or `rope_parameters` of transformers 5, in one form."""
    given = {k: v for k, v in (raw.get("rope_scaling") or raw.get("rope_parameters") or {}).items() if v is not None}
    rope: dict[str, Any] = {"rope_theta": raw.get("rope_theta") or 10000.0, "rope_type": given.pop("type", "default")}
    rope.update(given)
    needs = {"default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}
    needs["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
    kind = rope["rope_type"]
    nested = any(isinstance(value, Mapping) for value in given.values())  # a rope for each layer type
    if kind not in needs or nested or given.get("partial_rotary_factor", 1) != 1:
        raise ModelError(f"rope scaling {given or kind!r} is not supported; supported types are {', '.join(needs)}")
    lacking = [name for name in needs[kind] if name not in rope]
    if lacking:
        raise ModelError(f"rope scaling of type {kind} lacks {', '.join(lacking)} in the model's config.json")
    # A dynamic rope stretches past max_position_embeddings; the others may state what length they were trained for.
    stated = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rope["trained_positions"] = positions if kind == "dynamic" else stated or positions
    return rope


def frequencies(rope: Mapping[str, Any], dim: int) -> tuple[list[float], float]:
    """Radians that a position turns each pair of a head, in float64, and what cos and sin are multiplied with.

    RoPE: arXiv:2104.09864. YaRN: arXiv:2309.00071. Scaling as in transformers' modeling_rope_utils.py: a share of each
    frequency is kept, the rest is divided by the factor.
    """
    theta, kind, trained = rope["rope_theta"], rope["rope_type"], rope["trained_positions"]
    factor, scale = rope.get("factor", 1.0), 1.0
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    kept = [0.0 if kind == "linear" else 1.0] * len(plain)
    if kind == "llama3":  # by the turns a pair makes over the trained length
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = [(trained * f / (2 * math.pi) - low) / (high - low) for f in plain]
    if kind == "yarn":  # by the pair's place between those that turn beta_fast and beta_slow times
        turns = (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
        first, last = (dim * math.log(trained / (t * 2 * math.pi)) / (2 * math.log(theta)) for t in turns)
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 if first == last else 0.0
        kept = [(last - i) / (last - first) for i in range(len(plain))]
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        above, below = (rope["mscale"], rope["mscale_all_dim"]) if both else (1.0, 0.0)
        growth = 0.1 * math.log(max(factor, 1.0))
        scale = rope.get("attention_factor", (above * growth + 1) / (below * growth + 1))
    kept = [min(max(share, 0.0), 1.0) for share in kept]
    return [f * k + f / factor * (1 - k) for f, k in zip(plain, kept, strict=True)], scale


class Rope(nn.Module):
    """cos and sin of each token's rotary angles, always in float32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.values, self.scale = frequencies(config.rope, config.head_dim)
        self.frequencies: Tensor  # [head_dim / 2]
        self.register_buffer("frequencies", torch.tensor(self.values, dtype=torch.float32), persistent=False)
        self.dynamic = config.rope["rope_type"] == "dynamic"
        self.factor, self.trained = config.rope.get("factor", 1.0), config.rope["trained_positions"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        """Follow the model to another device but not to another dtype: bfloat16 angles are useless."""
        super()._apply(fn, recurse)
        self.frequencies = torch.tensor(self.values, dtype=torch.float32, device=self.frequencies.device)
        return self

    def forward(self, positions: Tensor, sequence_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """positions, sequence_lengths: [tokens] -> cos, sin: [tokens, head_dim / 2]"""
        angles = positions.float()[:, None] * self.frequencies
        if self.dynamic:  # NTK: theta grows with the sequence, once that is longer than the trained length
            stretch = (self.factor * sequence_lengths.float() / self.trained - (self.factor - 1)).clamp(min=1.0)
            pairs = torch.arange(len(self.frequencies), device=angles.device)
            angles = angles * stretch[:, None] ** (pairs / (1 - len(self.frequencies)))
        return angles.cos() * self.scale, angles.sin() * self.scale


class RMSNorm(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.eps = config.norm_eps


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.window
        width = config.heads * config.head_dim
        self.norm = RMSNorm(config)
        self.qkv = nn.Linear(config.hidden, width + 2 * config.kv_heads * config.head_dim, bias=config.attention_bias)
        self.o = nn.Linear(width, config.hidden, bias=config.attention_bias)

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
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(ops.linear(x, self.gate_up, norm=self.norm, gated=True), self.down, residual=x)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: ops.LayerCache, batch: ops.Batch) -> Tensor:
        return self.mlp(self.attention(x, rope, cache, batch))  # [tokens, hidden]


class Model(nn.Module):
    """`forward` is `embed` and then every block; `head` follows, on the rows that are sampled."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config)
        self.output = None if config.tied else nn.Linear(config.hidden, config.vocab, bias=False)

    def embed(self, batch: ops.Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The embedded tokens [tokens, hidden], and the rope that all blocks share."""
        return self.embedding(batch.ids), self.rope(batch.positions, batch.sequence_lengths)

    def forward(self, batch: ops.Batch, caches: list[ops.LayerCache]) -> Tensor:
        """The hidden states after the last block, before the final norm. [tokens, hidden]"""
        x, rope = self.embed(batch)
        for block, cache in zip(self.layers, caches, strict=True):
            x = block(x, rope, cache, batch)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits. [rows, hidden] -> [rows, vocab] float32"""
        return ops.linear(x, self.output or self.embedding, norm=self.norm).float()


# Our parameters, and the checkpoint's that they are made of, one below the other.
_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
WEIGHTS: dict[str, str | tuple[str, ...]] = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention.norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.qkv.weight": tuple(f"{_ATTENTION}.{p}_proj.weight" for p in "qkv"),
    "layers.{}.attention.qkv.bias": tuple(f"{_ATTENTION}.{p}_proj.bias" for p in "qkv"),
    "layers.{}.attention.o.weight": f"{_ATTENTION}.o_proj.weight",
    "layers.{}.attention.o.bias": f"{_ATTENTION}.o_proj.bias",
    "layers.{}.mlp.norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.mlp.gate_up.weight": (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    "layers.{}.mlp.gate_up.bias": (f"{_MLP}.gate_proj.bias", f"{_MLP}.up_proj.bias"),
    "layers.{}.mlp.down.weight": f"{_MLP}.down_proj.weight",
    "layers.{}.mlp.down.bias": f"{_MLP}.down_proj.bias",
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
