"""Models with routed experts on a GPU, through the engine: captured decode steps and prefill against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_helpers import SIZES, check_answers_on_gpu
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

pytestmark = pytest.mark.gpu

MANY = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "head_dim": 16}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MANY, norm_topk_prob=True, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**SIZES | {"hidden_size": 64}, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=16, num_local_experts=8, num_experts_per_tok=4, sliding_window=13),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_answers_are_those_of_transformers(tmp_path: Path, name: str, rows: int) -> None:
    """Few rows go to their experts as vectors, more in blocks; prompts come in chunks."""
    check_answers_on_gpu(tmp_path, CONFIGS[name], rows)
