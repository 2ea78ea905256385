"""models/qwen2.py, gemma3.py, phi3.py and mistral.py against transformers, in every variant of their configs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import (
    SIZES,
    TRAINED,
    check_answers,
    check_declarations,
    check_every_kind_of_step,
    hf_model,
    hf_raw,
    load,
    reference,
    tokens,
    write_checkpoint,
)
from paged import Paged, Piece
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    SiglipVisionConfig,
)

import fastgraph
from fastgraph import models, ops
from fastgraph.errors import ModelError
from fastgraph.loading.weights import WeightFiles, load_weights
from fastgraph.models import gemma3, llama, mistral, phi3, qwen2

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": TRAINED}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
GEMMA = {"head_dim": 16, "sliding_window": 13, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}
PHI = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}


def longrope(pairs: int, **parameters: Any) -> dict[str, Any]:
    """LongRoPE with another divisor for each pair, past 20 tokens others than before."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
    }
    sizes = {"max_position_embeddings": 80, "original_max_position_embeddings": 20}
    return {"rope_parameters": rope | parameters, **sizes}


CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-one-kv-head": Qwen2Config(**SIZES | {"num_key_value_heads": 1}),
    "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen2-window-unused": Qwen2Config(**SIZES, sliding_window=13, max_window_layers=0),
    "qwen2-window-in-upper-layers": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=13, max_window_layers=1
    ),
    "qwen2-window-by-layer-types": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=13, layer_types=[SLIDING, FULL]
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=13),
    "mistral-window-beyond": MistralConfig(**SIZES, sliding_window=400, tie_word_embeddings=True),
    "mistral-wide-heads": MistralConfig(**SIZES, head_dim=20, sliding_window=None),
    "mistral-dynamic": MistralConfig(**SIZES, rope_parameters=DYNAMIC, sliding_window=20),
    "gemma3": Gemma3TextConfig(**SIZES, **GEMMA),
    "gemma3-windows-alone": Gemma3TextConfig(**SIZES, **GEMMA, layer_types=[SLIDING, SLIDING]),
    "gemma3-no-windows": Gemma3TextConfig(**SIZES, **GEMMA, layer_types=[FULL, FULL]),
    "gemma3-untied-biased": Gemma3TextConfig(**SIZES, **GEMMA, tie_word_embeddings=False, attention_bias=True),
    "gemma3-capped": Gemma3TextConfig(**SIZES, **GEMMA, final_logit_softcapping=3.0),
    "gemma3-another-norm": Gemma3TextConfig(**SIZES, **GEMMA, rms_norm_eps=0.3),
    "gemma3-linear-rope": Gemma3TextConfig(
        **SIZES, **GEMMA, **ropes({"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4}, {"rope_theta": 3e3})
    ),
    "gemma3-scaled-by-transformers-4": Gemma3TextConfig(
        **SIZES, **GEMMA, rope_scaling={"rope_type": "linear", "factor": 4.0}, rope_theta=2e4, rope_local_base_freq=50.0
    ),
    "phi3": Phi3Config(**SIZES, **PHI),
    "phi3-tied": Phi3Config(**SIZES, **PHI, tie_word_embeddings=True),
    "phi3-window": Phi3Config(**SIZES, **PHI, sliding_window=13),
    "phi3-partial": Phi3Config(**SIZES | {"hidden_size": 64}, **PHI, partial_rotary_factor=0.75),
    "phi3-longrope": Phi3Config(**SIZES | PHI | longrope(6)),
    "phi3-longrope-partial": Phi3Config(
        **SIZES | PHI | {"hidden_size": 64, "partial_rotary_factor": 0.5} | longrope(4)
    ),
    "phi3-longrope-factors": Phi3Config(**SIZES | PHI | longrope(6, factor=3.0, attention_factor=1.3)),
}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_in_every_kind_of_step(name: str) -> None:
    check_every_kind_of_step(CONFIGS[name])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen2-window-in-upper-layers", {"use_sliding_window": False}),
        ("mistral-window", {"sliding_window": None}),
        ("phi3-window", {"sliding_window": None}),
        ("gemma3", {"layer_types": [FULL, FULL]}),
        ("gemma3", {"layer_types": [SLIDING, SLIDING]}),
        ("gemma3-scaled-by-transformers-4", {"rope_parameters": None}),
        ("gemma3-capped", {"final_logit_softcapping": None}),
        ("phi3-longrope", {"original_max_position_embeddings": 60}),
    ],
)
def test_what_the_variants_are_about_matters(name: str, change: dict[str, Any]) -> None:
    """The comparison above would prove nothing if both had ignored the option."""
    config, text = CONFIGS[name], tokens(1, 41)
    hf = hf_model(config)
    logits = []
    for raw in (hf_raw(config), hf_raw(config) | change):
        module, model = load(config, hf)
        shape = module.Config.from_hf(raw)
        other = module.Model(shape)
        other.load_state_dict(model.state_dict())
        logits.append(Paged(shape, slots=1, span=41).step(other, [Piece(1, text, 41)])[0])
    assert (logits[0] - logits[1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "names",
    [("qwen2",), ("mistral",), ("phi3",), ("gemma3-untied-biased",)],
    ids=lambda names: names[0],
)
def test_weight_names_and_the_tensor_parallel_plan_cover_the_model(names: tuple[str, ...]) -> None:
    check_declarations(*(CONFIGS[name] for name in names))


def test_each_architecture_has_its_file() -> None:
    found = {name: models.find(hf_raw(config)) for name, config in CONFIGS.items()}
    for module in (qwen2, mistral, gemma3, phi3):
        assert {m for name, m in found.items() if name.startswith(module.__name__.rpartition(".")[2])} == {module}
    assert models.find({"architectures": ["LlamaForCausalLM"]}) is llama


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"layer_types": [FULL, "chunked_attention"]}, "chunked_attention"),
        ("qwen2", {"num_key_value_heads": 3}, "3 kv heads for 4 heads"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("mistral", {"layer_types": [FULL, SLIDING]}, "layer_types"),
        ("mistral", {"vocab_size": None}, "lacks vocab_size"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma3", {"sliding_window": None}, "sliding_window None"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "lacks short_factor, long_factor"),
        ("phi3", {"rope_scaling": {"type": "llama4"}}, "llama4"),
    ],
)
def test_what_would_change_the_computation_unseen_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    raw = hf_raw(CONFIGS[name]) | change
    with pytest.raises(ModelError, match=words):
        models.find(raw).Config.from_hf(raw)


def test_longrope_with_a_divisor_too_few_is_refused() -> None:
    raw = hf_raw(CONFIGS["phi3-longrope"])
    raw["rope_parameters"] = raw["rope_parameters"] | {"long_factor": [1.0] * 5}
    with pytest.raises(ModelError, match="long_factor has 5 numbers for 6 pairs"):
        phi3.Model(phi3.Config.from_hf(raw))


# From files, through the engine


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        ("qwen2-window-in-upper-layers", "off"),
        ("mistral-window", "off"),
        ("gemma3", "off"),
        ("gemma3", "regional"),  # blocks of two kinds, a rope for each
        ("phi3-longrope-partial", "off"),
        ("phi3-longrope-partial", "full"),
    ],
)
def test_a_saved_checkpoint_answers_as_transformers_does(tmp_path: Path, name: str, compile: str) -> None:
    write_checkpoint(tmp_path, CONFIGS[name])
    check_answers(tmp_path, CONFIGS[name], (41, 3, 25), device="cpu", compile=compile)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_behind_the_window_serve_other_requests_meanwhile(tmp_path: Path, prefix_cache: bool) -> None:
    write_checkpoint(tmp_path, CONFIGS["mistral-window"])
    prompts = [tokens(seed, 25) for seed in range(4)]
    # Together they come to 296 tokens, and are 4 * 13 tokens long for whoever looks back 13.
    limits = {"max_decode_bs": 4, "page_size": 4, "max_step_tokens": 16, "max_model_len": 76, "kv_pages": 52}
    small = {**limits, "prefix_cache": prefix_cache}
    with fastgraph.load_model(str(tmp_path), device="cpu", compile="off", dtype="float32", **small) as llm:
        answers = llm.generate(prompts, max_tokens=49, ignore_eos=True, temperature=0.0)
        assert llm.stats()["preemptions"] == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference(CONFIGS["mistral-window"], prompt, answer.token_ids)[len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()


def test_the_text_part_of_a_gemma3_that_sees_answers_as_transformers_does(tmp_path: Path) -> None:
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seeing = Gemma3Config(
        text_config=CONFIGS["gemma3"],
        vision_config=SiglipVisionConfig(**eyes, image_size=32, patch_size=16),
        mm_tokens_per_image=4,
        image_token_index=95,
    )
    torch.manual_seed(0)
    hf = Gemma3ForConditionalGeneration(seeing).eval()
    hf.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Gemma3ForConditionalGeneration"]
    module = models.find(raw)
    shape = module.Config.from_hf(raw)
    model = module.Model(shape)
    load_weights(model, WeightFiles(tmp_path), module.WEIGHTS, progress=lambda *_: None)
    text = tokens(1, 41)
    (got,) = Paged(shape, slots=1, span=41).step(model, [Piece(1, text, 41)])
    torch.testing.assert_close(got, hf(torch.tensor([text])).logits[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
def test_pages_may_be_wider_than_a_head(name: str) -> None:
    """As they are on a GPU for the heads of 96 elements that Phi-3-mini has."""
    module, model = load(CONFIGS[name], hf_model(CONFIGS[name]))
    shape, text = module.Config.from_hf(hf_raw(CONFIGS[name])), tokens(1, 20)
    narrow, wide = Paged(shape, slots=1, span=20), Paged(shape, slots=1, span=20, width=shape.head_dim + 4)
    for pieces in ([Piece(1, text[:15], 19)], [Piece(1, text[15:19], 19)], [Piece(1, text[19:])]):
        for got, want in zip(wide.step(model, pieces), narrow.step(model, pieces), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [ops.cache_width(dim, "cuda") for dim in (64, 80, 96, 128, 256)] == [64, 128, 128, 128, 256]


# Configs


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-7b", 7_615_616_512),
        ("gemma-3-1b", 999_885_952),
        ("phi-4", 14_659_507_200),
        ("mistral-7b", 7_241_732_096),
    ],
)
def test_the_shapes_that_bench_ships_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    raw = json.loads((Path(fastgraph.__file__).parent / "bench" / "shapes" / f"{name}.json").read_text())
    module = models.find(raw)
    with torch.device("meta"):
        model = module.Model(module.Config.from_hf(raw))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_old_phi_checkpoints_call_longrope_su_or_yarn() -> None:
    new = hf_raw(CONFIGS["phi3-longrope-partial"])
    base = {key: value for key, value in new.items() if key != "rope_parameters"} | {"partial_rotary_factor": 0.5}
    scaling = {key: value for key, value in new["rope_parameters"].items() if key.endswith("_factor")}
    scaling.pop("partial_rotary_factor")
    for kind in ("su", "yarn", "longrope"):
        for key in ("type", "rope_type"):
            assert phi3.Config.from_hf(base | {"rope_scaling": {key: kind, **scaling}}) == phi3.Config.from_hf(new)


def test_gemma3s_configs_of_transformers_4_and_5_mean_the_same() -> None:
    new = hf_raw(CONFIGS["gemma3-scaled-by-transformers-4"])
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")} | {
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_theta": 2e4,
        "rope_local_base_freq": 50.0,
    }
    assert gemma3.Config.from_hf(old) == gemma3.Config.from_hf(new)


def test_the_window_of_released_gemma3_configs_is_in_five_layers_of_six() -> None:
    raw = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "sliding_window": 512,
    }
    config = gemma3.Config.from_hf(raw)
    assert [i for i, window in enumerate(config.windows) if window == 0] == [5, 11, 17]
    assert set(config.windows) == {0, 512}
    assert [rope["rope_theta"] for rope in config.ropes] == [1e6, 1e4]


def test_gemma3_keeps_its_norms_in_float32_and_refuses_float16() -> None:
    config = gemma3.Config.from_hf(hf_raw(CONFIGS["gemma3"]))
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        model = gemma3.Model(config)
        torch.set_default_dtype(torch.float16)
        with pytest.raises(ModelError, match="overflows float16"):
            gemma3.Model(config)
    finally:
        torch.set_default_dtype(default)
    assert {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dtype == torch.float32} == {
        name for name, part in model.named_modules() if isinstance(part, gemma3.RMSNorm)
    }


def test_gemma3_in_bfloat16_stays_as_close_to_float32_as_transformers_does() -> None:
    config, text = CONFIGS["gemma3"], tokens(1, 41)
    hf = hf_model(config)
    exact = hf(torch.tensor([text])).logits[0]
    _, model = load(config, hf)
    theirs = hf.bfloat16()(torch.tensor([text])).logits[0]
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data = parameter.data.bfloat16()
    shape = gemma3.Config.from_hf(hf_raw(config))
    ours = Paged(shape, slots=1, span=41, dtype=torch.bfloat16).step(model, [Piece(1, text, 41)])[0]
    assert (ours.float() - exact).norm() < 1.3 * (theirs.float() - exact).norm()
