"""models/qwen3.py against transformers, on tiny random models in float32, over a paged cache in every kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import Paged, Piece, copy_weights
from transformers import AutoModelForCausalLM, Qwen3Config

from fastgraph import models
from fastgraph.errors import ModelError
from fastgraph.models import qwen3

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "past the trained length": {"rope_parameters": YARN},
}


def raw_of(config: Qwen3Config) -> dict[str, Any]:
    return config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers_in_prefill_chunks_and_decode(variant: str) -> None:
    torch.manual_seed(1)
    config = Qwen3Config(**{**SIZES, **VARIANTS[variant]}, attn_implementation="eager")
    reference = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a missing one
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    shape = qwen3.Config.from_hf(raw_of(config))
    model = qwen3.Model(shape)
    used = copy_weights(model, qwen3.WEIGHTS, reference.state_dict())
    assert set(reference.state_dict()) - used <= {"lm_head.weight"}
    ids = torch.randint(0, 96, (2, 45))
    want = reference(ids).logits  # [2, 45, vocab]
    first, second = ids.tolist()
    paged = Paged(shape, slots=2, span=45)
    steps = [
        [Piece(1, first[:17], whole=40)],
        [Piece(1, first[17:40], whole=40), Piece(2, second[:6], whole=30)],
        [Piece(1, first[40:41]), Piece(2, second[6:30], whole=30)],
        *([Piece(1, first[i : i + 1]), Piece(2, second[i - 11 : i - 10])] for i in range(41, 45)),
    ]
    done = {1: 0, 2: 0}
    for pieces in steps:
        for piece, got in zip(pieces, paged.step(model, pieces), strict=True):
            start = done[piece.slot]
            done[piece.slot] += len(piece.ids)
            torch.testing.assert_close(got, want[piece.slot - 1, start : done[piece.slot]], rtol=1e-4, atol=1e-4)


def test_the_tensor_parallel_plan_names_every_linear_once() -> None:
    model = qwen3.Model(qwen3.Config.from_hf(raw_of(Qwen3Config(**SIZES))))
    linears = {
        ".".join("{}" if part.isdigit() else part for part in name.split("."))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert linears == set(qwen3.TENSOR_PARALLEL)


def test_what_would_change_the_computation_is_refused() -> None:
    raw = raw_of(Qwen3Config(**SIZES))
    assert models.find(raw) is qwen3
    with pytest.raises(ModelError, match="sliding window"):
        qwen3.Config.from_hf(raw | {"use_sliding_window": True})
    with pytest.raises(ModelError, match="hidden_act 'gelu'"):
        qwen3.Config.from_hf(raw | {"hidden_act": "gelu"})
    with pytest.raises(ModelError, match="lacks vocab_size"):
        qwen3.Config.from_hf({k: v for k, v in raw.items() if k != "vocab_size"})
