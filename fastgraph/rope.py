"""Rotary position embeddings (arXiv:2104.09864) and the ways in which they are stretched, for all model files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastgraph.errors import ModelError


def rope_parameters(raw: Mapping[str, Any], positions: int, *, partial: bool = False) -> dict[str, Any]:
    """`rope_scaling` and `rope_theta` of transformers 4, or `rope_parameters` of transformers 5, in one form.

    `partial`: whether the model turns only a part of each head where its config says so; for others it is refused.
    """
    given = {k: v for k, v in (raw.get("rope_scaling") or raw.get("rope_parameters") or {}).items() if v is not None}
    rope: dict[str, Any] = {"rope_theta": raw.get("rope_theta") or 10000.0, "rope_type": given.pop("type", "default")}
    rope["partial_rotary_factor"] = raw.get("partial_rotary_factor") or 1.0
    rope.update(given)
    needs = {"default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}
    needs["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
    needs["longrope"] = ("short_factor", "long_factor")
    kind = rope["rope_type"]
    if rope["partial_rotary_factor"] != 1 and not partial:
        raise ModelError(
            f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported for this architecture"
        )
    if kind not in needs or any(isinstance(value, Mapping) for value in given.values()):  # a rope for each layer type
        raise ModelError(f"rope scaling {given or kind!r} is not supported; supported types are {', '.join(needs)}")
    lacking = [name for name in needs[kind] if name not in rope]
    if lacking:
        raise ModelError(f"rope scaling of type {kind} lacks {', '.join(lacking)} in the model's config.json")
    # A dynamic rope stretches past max_position_embeddings; the others may state what length they were trained for.
    stated = rope.pop("original_max_position_embeddings", None)
    stated = raw.get("original_max_position_embeddings") or stated
    rope["trained_positions"] = positions if kind == "dynamic" else stated or positions
    if kind == "longrope":
        rope.setdefault("factor", positions / rope["trained_positions"])
    return rope


def stretched(rope: Mapping[str, Any], positions: int) -> int:
    """Tokens that a sequence may have: a config's `max_position_embeddings` may be the length before the stretch."""
    longer = rope["rope_type"] in ("dynamic", "yarn")
    return max(positions, int(rope["trained_positions"] * rope["factor"])) if longer else positions


def frequencies(rope: Mapping[str, Any], dim: int, *, long: bool = False) -> tuple[list[float], float]:
    """Radians that a position turns each pair of a head, in float64, and what cos and sin are multiplied with.

    RoPE: arXiv:2104.09864. YaRN: arXiv:2309.00071. LongRoPE: arXiv:2402.13753, which alone has others for `long`
    sequences, those past the trained length. Scaling as in transformers' modeling_rope_utils.py: a share of each
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
    if kind == "longrope":  # every pair has a divisor of its own
        name = "long_factor" if long else "short_factor"
        if len(rope[name]) != len(plain):
            raise ModelError(f"the rope's {name} has {len(rope[name])} numbers for {len(plain)} pairs of a head")
        plain = [f / divisor for f, divisor in zip(plain, rope[name], strict=True)]
        scale = rope.get("attention_factor", math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(trained)))
    kept = [min(max(share, 0.0), 1.0) for share in kept]
    return [f * k + f / factor * (1 - k) for f, k in zip(plain, kept, strict=True)], scale


class Rope(nn.Module):
    """cos and sin of each token's rotary angles, always in float32."""

    def __init__(self, rope: Mapping[str, Any], head_dim: int) -> None:
        super().__init__()
        dim = int(head_dim * rope["partial_rotary_factor"])
        self.kind, self.factor, self.trained = rope["rope_type"], rope.get("factor", 1.0), rope["trained_positions"]
        # Up to the trained length, and past it where that makes others.
        both = [frequencies(rope, dim, long=long) for long in ([False, True] if self.kind == "longrope" else [False])]
        self.values, self.scale = [values for values, _ in both], both[0][1]
        self.frequencies: Tensor  # [1 or 2, dim / 2]
        self.register_buffer("frequencies", torch.tensor(self.values, dtype=torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        """Follow the model to another device but not to another dtype: bfloat16 angles are useless."""
        super()._apply(fn, recurse)
        self.frequencies = torch.tensor(self.values, dtype=torch.float32, device=self.frequencies.device)
        return self

    def looks_ahead(self, longest: int) -> bool:
        """Whether a token's angles depend on what follows it, in prompts of up to `longest` tokens."""
        return self.kind in ("dynamic", "longrope") and longest > self.trained

    def forward(self, positions: Tensor, sequence_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """positions, sequence_lengths: [tokens] -> cos, sin: [tokens, dim / 2]"""
        own = self.frequencies[(sequence_lengths > self.trained).int()] if len(self.values) > 1 else self.frequencies
        angles = positions.float()[:, None] * own
        if self.kind == "dynamic":  # NTK: theta grows with the sequence, once that is longer than the trained length
            stretch = (self.factor * sequence_lengths.float() / self.trained - (self.factor - 1)).clamp(min=1.0)
            pairs = torch.arange(angles.shape[1], device=angles.device)
            angles = angles * stretch[:, None] ** (pairs / (1 - angles.shape[1]))
        return angles.cos() * self.scale, angles.sin() * self.scale
