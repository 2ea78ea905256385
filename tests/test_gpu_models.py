"""Dense models on a GPU, through the engine: compiled, captured decode steps and prefill against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_helpers import SIZES, check_answers_on_gpu
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config

pytestmark = pytest.mark.gpu

WIDE = SIZES | {"hidden_size": 64}  # heads of 16
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**WIDE, use_sliding_window=True, sliding_window=13, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral": MistralConfig(**WIDE, sliding_window=20),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=13, sliding_window_pattern=2),
    # Heads of 12, half of which turn, kept in pages of 16.
    "phi3": Phi3Config(
        **SIZES | {"max_position_embeddings": 80},
        original_max_position_embeddings=24,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.5},
        pad_token_id=0,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_answers_are_those_of_transformers(tmp_path: Path, name: str, rows: int) -> None:
    check_answers_on_gpu(tmp_path, CONFIGS[name], rows)
