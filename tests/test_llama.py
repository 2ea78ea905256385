"""models/llama.py against transformers, on tiny random models in float32, over a paged cache in every kind of step."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from paged import Paged, Piece, copy_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastgraph import models
from fastgraph.errors import ModelError
from fastgraph.models import llama
from fastgraph.rope import Rope, frequencies

TRAINED = 32  # positions; the sequences below are longer
PROMPT, ANSWER = 41, 30
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.2,  # large enough for attention to look somewhere
}


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
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=13),
} | {f"rope-{name}": LlamaConfig(**SIZES, **parameters) for name, parameters in ROPES.items()}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def hf_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # transformers starts norms at 1 and biases at 0
        if name.endswith("bias") or "norm" in name:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def hf_raw(config: Any) -> dict[str, Any]:
    """The config.json that transformers would write."""
    architecture = "MistralForCausalLM" if config.model_type == "mistral" else "LlamaForCausalLM"
    return copy.deepcopy(config).to_dict() | {"architectures": [architecture]}


def load(config: Any, hf: Any) -> llama.Model:
    model = llama.Model(llama.Config.from_hf(hf_raw(config)))
    used = copy_weights(model, llama.WEIGHTS, hf.state_dict())
    assert set(hf.state_dict()) - used == ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model


def reference(config: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """transformers' logits: the prompt in one forward, then one token at a time. [tokens, vocab]"""
    hf = hf_model(config)  # a new one: its dynamic rope remembers the longest sequence it met
    cache = DynamicCache(config=hf.config)
    logits = [hf(torch.tensor([prompt]), past_key_values=cache).logits[0]]
    logits += [hf(torch.tensor([[token]]), past_key_values=cache).logits[0] for token in answer]
    return torch.cat(logits)


def tokens(seed: int, count: int) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_in_every_kind_of_step(name: str) -> None:
    """Whole prompts, uneven chunks, rows of several lengths, decode rows beside prefill rows and padding rows."""
    config = CONFIGS[name]
    model = load(config, hf_model(config))
    texts = {
        1: (tokens(1, PROMPT), tokens(2, ANSWER)),
        2: (tokens(3, 9), tokens(4, ANSWER)),
        3: (tokens(5, 35), [7, 8]),
    }
    want = {slot: reference(config, *text) for slot, text in texts.items()}
    paged = Paged(llama.Config.from_hf(hf_raw(config)), slots=3, span=PROMPT + ANSWER, page_size=4)
    got: dict[int, list[Tensor]] = {slot: [] for slot in texts}

    def step(*counts: tuple[int, int]) -> None:
        pieces = []
        for slot, count in counts:
            prompt, answer = texts.get(slot, ([0], []))
            done = int(paged.lengths[slot])
            pieces.append(Piece(slot, (prompt + answer)[done : done + count], whole=len(prompt)))
        for piece, logits in zip(pieces, paged.step(model, pieces), strict=True):
            if piece.slot:
                got[piece.slot].append(logits)

    step((2, 9))  # a whole prompt
    step((1, 7), (2, 1))  # a first chunk with a decode row
    step((2, 1), (1, 1), (3, 35), (0, 1))  # a chunk of one token, another prompt, a padding row
    step((1, 20), (3, 1), (2, 1))
    step((3, 1), (1, 13))
    for _ in range(15):
        step((1, 1), (2, 1), (0, 1), (0, 1))  # decode with padding rows
    for _ in range(12):
        step((2, 1), (1, 1))
    for _ in range(3):
        step((1, 1))
    for slot, logits in got.items():
        done = torch.cat(logits)
        torch.testing.assert_close(done, want[slot][: len(done)], rtol=1e-4, atol=2e-5)
    assert len(torch.cat(got[1])) == PROMPT + ANSWER
    assert len(torch.cat(got[3])) == 37


def test_a_window_shorter_than_the_sequence_matters() -> None:
    """The comparison above would prove nothing if both had ignored the window."""
    config = CONFIGS["mistral-window"]
    raw, hf = hf_raw(config), hf_model(config)
    text = tokens(1, PROMPT)
    logits = []
    for window in (13, None):
        model = llama.Model(llama.Config.from_hf(raw | {"sliding_window": window}))
        copy_weights(model, llama.WEIGHTS, hf.state_dict())
        paged = Paged(llama.Config.from_hf(raw), slots=1, span=PROMPT)
        logits.append(paged.step(model, [Piece(1, text, PROMPT)])[0])
    assert torch.equal(logits[0][:13], logits[1][:13])
    assert (logits[0][14:] - logits[1][14:]).abs().min(dim=1).values.max() > 1e-3


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
    assert len(rope_module.values) == 64
    for pair, got in enumerate(rope_module.values):
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
    assert (config.vocab, config.max_positions, config.tied, config.window) == (96, TRAINED, False, 0)
    assert llama.Config.from_hf(hf_raw(CONFIGS["mistral-window"])).window == 13
    assert llama.Config.from_hf(hf_raw(CONFIGS["grouped"]) | {"sliding_window": 13}).window == 0  # as transformers


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


def test_weight_names_cover_every_parameter_and_nothing_else() -> None:
    seen = set()
    for name in ("grouped", "biases"):
        for parameter, _ in llama.Model(llama.Config.from_hf(hf_raw(CONFIGS[name]))).named_parameters():
            seen.add(".".join("{}" if part.isdigit() else part for part in parameter.split(".")))
    assert seen == set(llama.WEIGHTS)


def test_tensor_parallel_plan_names_every_linear_once() -> None:
    model = llama.Model(llama.Config.from_hf(hf_raw(CONFIGS["biases"])))
    linears = {
        ".".join("{}" if part.isdigit() else part for part in name.split("."))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert linears == set(llama.TENSOR_PARALLEL)
    assert set(llama.TENSOR_PARALLEL.values()) == {"column", "row"}


def test_a_tied_head_is_the_embedding_and_no_parameter_of_its_own() -> None:
    model = llama.Model(llama.Config.from_hf(hf_raw(CONFIGS["tied"])))
    assert "output.weight" not in dict(model.named_parameters())
    x = torch.randn(3, 48)
    normed = torch.nn.functional.rms_norm(x, (48,), model.norm.weight, model.norm.eps)
    torch.testing.assert_close(model.head(x), normed @ model.embedding.weight.T)


def test_logits_are_float32_in_half_precision() -> None:
    model = llama.Model(llama.Config.from_hf(hf_raw(CONFIGS["grouped"]))).to(torch.bfloat16)
    assert model.head(torch.randn(3, 48, dtype=torch.bfloat16)).dtype == torch.float32


# Finding a model file


def test_a_model_file_is_found_by_architecture_alone() -> None:
    for architecture in llama.ARCHITECTURES:
        found = models.find({"architectures": [architecture], "_name_or_path": "qwen/gemma", "model_type": "phi"})
        assert found is llama
    assert models.supported()["MistralForCausalLM"] == "fastgraph.models.llama"


def test_an_unsupported_architecture_says_what_is_supported_and_what_comes_close() -> None:
    with pytest.raises(ModelError) as error:
        models.find({"architectures": ["MixtralForCausalLM"], "_name_or_path": "llama"})
    message = str(error.value)
    for words in ("MixtralForCausalLM", "closest is MistralForCausalLM", "LlamaForCausalLM", "docs/add-a-model.md"):
        assert words in message
    with pytest.raises(ModelError, match="names no `architectures`"):
        models.find({"model_type": "llama"})
