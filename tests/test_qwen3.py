"""models/qwen3.py against transformers, on tiny random models in float32, over a paged cache in every kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_helpers import SIZES, TRAINED, check_declarations, check_every_kind_of_step, hf_raw
from transformers import Qwen3Config

from fastgraph import models
from fastgraph.errors import ModelError
from fastgraph.models import qwen3

SMALL: dict[str, Any] = SIZES | {"head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": TRAINED}
VARIANTS = {
    "untied": Qwen3Config(**SMALL),
    "tied": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "attention bias": Qwen3Config(**SMALL, attention_bias=True),
    "one kv head": Qwen3Config(**SMALL | {"num_key_value_heads": 1}),
    "past the trained length": Qwen3Config(**SMALL, rope_parameters=YARN),
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers_in_every_kind_of_step(variant: str) -> None:
    check_every_kind_of_step(VARIANTS[variant])


def test_weight_names_and_the_tensor_parallel_plan_cover_the_model() -> None:
    check_declarations(VARIANTS["untied"], VARIANTS["attention bias"])


def test_what_would_change_the_computation_is_refused() -> None:
    raw = hf_raw(VARIANTS["untied"])
    assert models.find(raw) is qwen3
    with pytest.raises(ModelError, match="sliding window"):
        qwen3.Config.from_hf(raw | {"use_sliding_window": True})
    with pytest.raises(ModelError, match="hidden_act 'gelu'"):
        qwen3.Config.from_hf(raw | {"hidden_act": "gelu"})
    with pytest.raises(ModelError, match="lacks vocab_size"):
        qwen3.Config.from_hf({k: v for k, v in raw.items() if k != "vocab_size"})
