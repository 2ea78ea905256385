"""models/llama.py against transformers, on tiny random models in float32, over a paged cache in every kind of step."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import SIZES, TRAINED, check_declarations, check_every_kind_of_step, hf_raw
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from fastgraph import models
from fastgraph.cli import app
from fastgraph.errors import ModelError
from fastgraph.models import llama
from fastgraph.rope import Rope, frequencies


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def rope_of(config: llama.Config) -> Rope:
    return Rope(config.rope, config.head_dim)


YARN = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "default": rope("default", rope_theta=5000.0),
    "linear": rope("linear", factor=3.0),
    "dynamic": rope("dynamic", factor=4.0),
    "dynamic-other-length": rope("dynamic", factor=4.0, original_max_position_embeddings=16),  # not looked at
    "llama3": rope("llama3", **LLAMA3),
    "yarn": rope("yarn", **YARN),
    "yarn-attention-factor": rope("yarn", **YARN, attention_factor=0.7),
    "yarn-mscale": rope("yarn", **YARN, mscale=0.8, mscale_all_dim=0.5),
    "yarn-one-mscale": rope("yarn", **YARN, mscale=0.8),
    "yarn-past-the-last-pair": rope("yarn", factor=4.0, original_max_position_embeddings=2**20, rope_theta=100.0),
    "yarn-untruncated": rope("yarn", **YARN, beta_fast=16.0, beta_slow=2.0, truncate=False),
}
CONFIGS = {
    "grouped": LlamaConfig(**SIZES),
    "one-kv-head": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "multi-head": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "wide-heads": LlamaConfig(**SIZES, head_dim=20),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "another-norm": LlamaConfig(**SIZES, rms_norm_eps=0.3),
} | {f"rope-{name}": LlamaConfig(**SIZES, **parameters) for name, parameters in ROPES.items()}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_in_every_kind_of_step(name: str) -> None:
    check_every_kind_of_step(CONFIGS[name])


# Rotary


@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
def test_frequencies_equal_transformers(name: str) -> None:
    config = LlamaConfig(**SIZES | {"hidden_size": 256}, **ROPES[name])
    want, want_scale = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_parameters"]["rope_type"]](copy.deepcopy(config))
    got, scale = frequencies(llama.Config.from_hf(hf_raw(config)).rope, 64)
    torch.testing.assert_close(torch.tensor(got), want, rtol=1e-6, atol=0)
    assert scale == pytest.approx(want_scale, rel=1e-12)


def published_frequency(kind: str, pair: int, dim: int, theta: float) -> float:
    """Meta's Llama 3.1 formula with its branches, and linear interpolation, each as published."""
    frequency = 1.0 / theta ** (2.0 * pair / dim)
    if kind == "linear":
        return frequency / 4.0
    if kind == "llama3":
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            return frequency
        if wavelength > 8192 / 1.0:
            return frequency / 8.0
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        return (1 - smooth) * frequency / 8.0 + smooth * frequency
    return frequency


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rope_is_exact_past_8k_positions(kind: str) -> None:
    """Against float64. A float32 angle at position p carries an error of up to p * 6e-8 radians, twice over."""
    given = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    }[kind]
    raw = hf_raw(LlamaConfig(**SIZES | {"max_position_embeddings": 131072}))
    raw["rope_parameters"] = {"rope_type": kind, "rope_theta": 500000.0, **given}
    raw["head_dim"] = 128
    rope_module = rope_of(llama.Config.from_hf(raw))
    assert len(rope_module.values[0]) == 64
    for pair, got in enumerate(rope_module.values[0]):
        assert got == pytest.approx(published_frequency(kind, pair, 128, 500000.0), rel=1e-12)
    positions = torch.tensor([0, 1, 8191, 8192, 8193, 20000, 65535, 131071])
    cos, sin = rope_module(positions.int(), positions.int() + 1)
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate(positions.tolist()):
        for pair in range(64):
            angle = position * published_frequency(kind, pair, 128, 500000.0)
            tolerance = 1e-6 + angle * 1.3e-7
            assert abs(float(cos[row, pair]) - math.cos(angle)) <= tolerance
            assert abs(float(sin[row, pair]) - math.sin(angle)) <= tolerance


def test_dynamic_rope_stretches_only_past_the_trained_length_and_token_by_token() -> None:
    config = llama.Config.from_hf(hf_raw(CONFIGS["rope-dynamic"]))
    plain = llama.Config.from_hf(hf_raw(CONFIGS["rope-default"]) | {"rope_parameters": None, "rope_theta": 10000.0})
    module, unstretched = rope_of(config), rope_of(plain)
    positions = torch.tensor([5, 5, 5, 5, 90])
    lengths = torch.tensor([6, TRAINED, TRAINED + 1, 91, 91])
    cos, _ = module(positions, lengths)
    torch.testing.assert_close(cos[:2], unstretched(positions, lengths)[0][:2], rtol=0, atol=0)
    dim = config.head_dim
    for row in range(2, 5):
        length = float(lengths[row])
        theta = 10000.0 * (4.0 * length / TRAINED - 3.0) ** (dim / (dim - 2))
        want = [math.cos(float(positions[row]) * theta ** (-2 * i / dim)) for i in range(dim // 2)]
        torch.testing.assert_close(cos[row], torch.tensor(want), rtol=0, atol=2e-5)


def test_rope_stays_in_float32_whatever_happens_to_the_model() -> None:
    config = llama.Config.from_hf(hf_raw(CONFIGS["rope-llama3"]))
    want = rope_of(config).frequencies
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        made_in_half = llama.Model(config)
    finally:
        torch.set_default_dtype(default)
    with torch.device("meta"):
        meta = llama.Model(config)
    for model in (llama.Model(config).to(torch.bfloat16), made_in_half, meta.to_empty(device="cpu")):
        assert model.rope.frequencies.dtype == torch.float32
        assert torch.equal(model.rope.frequencies, want)
    assert made_in_half.norm.weight.dtype == torch.bfloat16
    assert not any("rope" in name for name in made_in_half.state_dict())


# Config


def test_configs_of_transformers_4_and_5_mean_the_same() -> None:
    base = {k: v for k, v in hf_raw(CONFIGS["grouped"]).items() if k != "rope_parameters"}
    old = base | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    older = base | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    new = base | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    assert llama.Config.from_hf(old) == llama.Config.from_hf(older) == llama.Config.from_hf(new)
    absent = llama.Config.from_hf(base | {"rope_scaling": None})
    assert absent.rope["rope_type"] == "default"
    assert absent.rope["rope_theta"] == 10000.0


def test_config_has_the_sizes_that_the_engine_reads() -> None:
    config = llama.Config.from_hf(hf_raw(CONFIGS["wide-heads"]))
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (2, 48, 4, 2, 20)
    assert (config.vocab, config.max_positions, config.tied) == (96, TRAINED, False)


@pytest.mark.parametrize(("name", "positions"), [("linear", 32), ("dynamic", 128), ("yarn", 128), ("llama3", 32)])
def test_max_positions_counts_what_the_scaling_adds(name: str, positions: int) -> None:
    assert llama.Config.from_hf(hf_raw(CONFIGS[f"rope-{name}"])).max_positions == positions


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "3 kv heads for 4 heads"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "su"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
        ({"vocab_size": None, "hidden_size": None}, "hidden_size, vocab_size"),
    ],
)
def test_what_would_change_the_computation_unseen_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        llama.Config.from_hf(hf_raw(CONFIGS["grouped"]) | change)


# The data beside the model


def test_weight_names_and_the_tensor_parallel_plan_cover_the_model() -> None:
    check_declarations(CONFIGS["grouped"], CONFIGS["biases"])


def test_a_tied_head_is_the_embedding_and_no_parameter_of_its_own() -> None:
    model = llama.Model(llama.Config.from_hf(hf_raw(CONFIGS["tied"])))
    assert "output.weight" not in dict(model.named_parameters())
    x = torch.randn(3, 48)
    normed = torch.nn.functional.rms_norm(x, (48,), model.norm.weight, model.norm.eps)
    torch.testing.assert_close(model.head(x), normed @ model.embedding.weight.T)


# Finding a model file


def test_the_command_line_lists_every_file_and_what_it_runs() -> None:
    listed = CliRunner().invoke(app, ["models"]).stdout
    assert re.search(r"^LlamaForCausalLM +models/llama\.py +Llama 2, 3, ", listed, re.MULTILINE)
    found = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    root = Path(__file__).parent.parent
    assert {entry["file"] for entry in found.values()} == {
        f"models/{path.name}" for path in (root / "models").glob("*.py") if path.name != "__init__.py"
    }
    assert found.keys() == models.supported().keys()
    assert all(entry["runs"] and entry["runs"] in listed for entry in found.values())


def test_a_model_file_is_found_by_architecture_alone() -> None:
    for architecture in llama.ARCHITECTURES:
        found = models.find({"architectures": [architecture], "_name_or_path": "qwen/gemma", "model_type": "phi"})
        assert found is llama
    assert models.supported()["LlamaForCausalLM"] == "fastgraph.models.llama"


def test_an_unsupported_architecture_says_what_is_supported_and_what_comes_close() -> None:
    with pytest.raises(ModelError) as error:
        models.find({"architectures": ["Llama9ForCausalLM"], "_name_or_path": "llama"})
    message = str(error.value)
    for words in (
        "Llama9ForCausalLM",
        r"closest is LlamaForCausalLM (models/llama.py)",
        "Qwen3ForCausalLM",
        "docs/add-a-model.md",
    ):
        assert words in message
    with pytest.raises(ModelError, match="names no `architectures`"):
        models.find({"model_type": "llama"})
