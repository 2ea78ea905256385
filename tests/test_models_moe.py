"""Models with routed experts against transformers, in every variant of their configs and layout of their weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
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
    tokens,
    write_checkpoint,
)
from paged import Paged, Piece
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import fastgraph
from fastgraph import models
from fastgraph.errors import ModelError
from fastgraph.loading.weights import WeightFiles, load_weights
from fastgraph.models import gpt_oss, mixtral, qwen3_moe

QWEN = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 13}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": TRAINED}

CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **QWEN),
    "qwen3_moe-normalised": Qwen3MoeConfig(**SIZES, **QWEN, norm_topk_prob=True),
    "qwen3_moe-many-experts": Qwen3MoeConfig(**SIZES, **QWEN | {"num_experts": 64}, norm_topk_prob=True),
    "qwen3_moe-one-expert-each": Qwen3MoeConfig(**SIZES, **QWEN | {"num_experts_per_tok": 1}),
    "qwen3_moe-every-expert": Qwen3MoeConfig(**SIZES, **QWEN | {"num_experts_per_tok": 6}),
    "qwen3_moe-every-other-layer": Qwen3MoeConfig(**SIZES, **QWEN, decoder_sparse_step=2),
    "qwen3_moe-dense-layers": Qwen3MoeConfig(**SIZES, **QWEN, mlp_only_layers=[1]),
    "qwen3_moe-tied": Qwen3MoeConfig(**SIZES, **QWEN, tie_word_embeddings=True),
    "qwen3_moe-biased": Qwen3MoeConfig(**SIZES, **QWEN, attention_bias=True),
    "qwen3_moe-narrow-heads": Qwen3MoeConfig(**SIZES, **{k: v for k, v in QWEN.items() if k != "head_dim"}),
    "qwen3_moe-yarn": Qwen3MoeConfig(**SIZES, **QWEN, rope_parameters=YARN),
    "mixtral": MixtralConfig(**SIZES, **MIXTRAL),
    "mixtral-one-expert-each": MixtralConfig(**SIZES, **MIXTRAL | {"num_experts_per_tok": 1}),
    "mixtral-window": MixtralConfig(**SIZES, **MIXTRAL, sliding_window=13),
    "mixtral-tied": MixtralConfig(**SIZES, **MIXTRAL, tie_word_embeddings=True),
    "mixtral-wide-heads": MixtralConfig(**SIZES, **MIXTRAL, head_dim=20),
    "mixtral-many-experts": MixtralConfig(**SIZES, **MIXTRAL | {"num_local_experts": 40}),
    "gpt_oss": GptOssConfig(**SIZES, **GPT),
    "gpt_oss-tight": GptOssConfig(**SIZES, **GPT, swiglu_limit=0.8),
    "gpt_oss-many-experts": GptOssConfig(**SIZES, **GPT | {"num_local_experts": 40}),
    "gpt_oss-windows-alone": GptOssConfig(**SIZES, **GPT, layer_types=["sliding_attention"] * 2),
    "gpt_oss-no-windows": GptOssConfig(**SIZES, **GPT, layer_types=["full_attention"] * 2),
    "gpt_oss-tied-unbiased": GptOssConfig(**SIZES, **GPT, tie_word_embeddings=True, attention_bias=False),
    "gpt_oss-plain-rope": GptOssConfig(**SIZES, **GPT, rope_parameters={"rope_type": "default", "rope_theta": 3e3}),
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
        ("qwen3_moe-normalised", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 2}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral-window", {"sliding_window": None}),
        ("gpt_oss-tight", {"swiglu_limit": 7.0}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_what_the_variants_are_about_matters(name: str, change: dict[str, Any]) -> None:
    """The comparison above would prove nothing if both had ignored the option."""
    config, text = CONFIGS[name], tokens(1, 41)
    module, model = load(config, hf_model(config))
    logits = []
    for raw in (hf_raw(config), hf_raw(config) | change):
        shape = module.Config.from_hf(raw)
        other = module.Model(shape)
        other.load_state_dict(model.state_dict())
        logits.append(Paged(shape, slots=1, span=41).step(other, [Piece(1, text, 41)])[0])
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_sinks_matter() -> None:
    config, text = CONFIGS["gpt_oss"], [Piece(1, tokens(1, 41), 41)]
    module, model = load(config, hf_model(config))
    shape = module.Config.from_hf(hf_raw(config))
    with_sinks = Paged(shape, slots=1, span=41).step(model, text)[0]
    for layer in model.layers:
        layer.attention.sinks.fill_(-100.0)
    assert (with_sinks - Paged(shape, slots=1, span=41).step(model, text)[0]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "names", [("qwen3_moe-biased", "qwen3_moe-dense-layers"), ("mixtral",), ("gpt_oss",)], ids=lambda n: n[0]
)
def test_weight_names_and_the_tensor_parallel_plan_cover_the_model(names: tuple[str, ...]) -> None:
    check_declarations(*(CONFIGS[name] for name in names))


def test_each_architecture_has_its_file() -> None:
    files = {"qwen3_moe": qwen3_moe, "mixtral": mixtral, "gpt_oss": gpt_oss}
    for name, config in CONFIGS.items():
        assert models.find(hf_raw(config)) is files[name.partition("-")[0]]


def test_the_layers_with_experts_are_those_of_transformers() -> None:
    for step, dense in ((1, []), (2, []), (3, []), (1, [0, 3]), (2, [1])):
        config = Qwen3MoeConfig(
            **SIZES | {"num_hidden_layers": 5}, **QWEN, decoder_sparse_step=step, mlp_only_layers=dense
        )
        theirs = tuple(hasattr(layer.mlp, "experts") for layer in hf_model(config).model.layers)
        assert qwen3_moe.Config.from_hf(hf_raw(config)).routed == theirs


def test_a_config_of_before_the_experts_were_renamed_means_the_same() -> None:
    new = hf_raw(CONFIGS["qwen3_moe"])
    old = {key: value for key, value in new.items() if key != "num_local_experts"} | {"num_experts": 6}
    assert qwen3_moe.Config.from_hf(old) == qwen3_moe.Config.from_hf(new)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3_moe", {"use_sliding_window": True}, "a sliding window"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "6 experts, 7 for a token"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": None}, "lacks num_experts"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("mixtral", {"num_experts_per_tok": 5}, "4 experts, 5 for a token"),
        ("mixtral", {"num_local_experts": None}, "lacks num_local_experts"),
        ("mixtral", {"vocab_size": None, "num_local_experts": None}, "lacks vocab_size, num_local_experts"),
        ("gpt_oss", {"vocab_size": None, "num_local_experts": None}, "lacks vocab_size, num_local_experts"),
        ("qwen3_moe", {"vocab_size": None, "moe_intermediate_size": None}, "lacks vocab_size, moe_intermediate_size"),
        ("gpt_oss", {"rope_parameters": None}, "without rope scaling"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha 2.0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit 0.0"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window None"),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_what_would_change_the_computation_unseen_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    raw = hf_raw(CONFIGS[name]) | change
    with pytest.raises(ModelError, match=words):
        models.find(raw).Config.from_hf(raw)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-30b-a3b", 30_532_122_624), ("mixtral-8x7b", 46_702_792_704), ("gpt-oss-20b", 20_914_757_184)],
)
def test_the_shapes_that_bench_ships_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    raw = json.loads((Path(fastgraph.__file__).parent / "bench" / "shapes" / f"{name}.json").read_text())
    module = models.find(raw)
    with torch.device("meta"):
        model = module.Model(module.Config.from_hf(raw))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


# From files


def names_in(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("name", ["qwen3_moe-dense-layers", "mixtral"])
@pytest.mark.parametrize("original", [True, False], ids=["each by itself", "all in one"])
def test_experts_load_from_either_layout(tmp_path: Path, name: str, original: bool) -> None:
    write_checkpoint(tmp_path, CONFIGS[name], save_original_format=original)
    assert any(".experts.0." in each for each in names_in(tmp_path)) == original
    module, want = load(CONFIGS[name], hf_model(CONFIGS[name]))
    model = module.Model(module.Config.from_hf(hf_raw(CONFIGS[name])))
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    load_weights(model, WeightFiles(tmp_path), module.WEIGHTS, progress=lambda *_: None)
    for (key, got), other in zip(model.state_dict().items(), want.state_dict().values(), strict=True):
        assert torch.equal(got, other), key


def test_experts_in_four_bits_are_widened_as_transformers_widens_them(tmp_path: Path) -> None:
    config = GptOssConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 96}, **GPT)
    module, want = load(config, hf_model(config))
    state = {name: tensor.contiguous() for name, tensor in hf_model(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for layer, (name, rows, columns) in product(range(2), (("gate_up_proj", 192, 64), ("down_proj", 64, 96))):
        key = f"model.layers.{layer}.mlp.experts.{name}"
        blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 126, (4, rows, columns // 32), dtype=torch.uint8, generator=generator)
        state[f"{key}_blocks"], state[f"{key}_scales"] = blocks, scales
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, columns, rows]
        ours = want.get_parameter(f"layers.{layer}.experts.{name.removesuffix('_proj')}")
        wide = theirs.transpose(1, 2)
        ours.copy_(torch.cat([wide[:, 0::2], wide[:, 1::2]], 1) if name == "gate_up_proj" else wide)
        del state[key]
    save_file(state, tmp_path / "model.safetensors")
    model = module.Model(module.Config.from_hf(hf_raw(config)))
    load_weights(model, WeightFiles(tmp_path), module.WEIGHTS, progress=lambda *_: None)
    for (key, got), other in zip(model.state_dict().items(), want.state_dict().values(), strict=True):
        assert torch.equal(got, other), key
    state["model.layers.0.mlp.experts.down_proj_blocks"] = state["model.layers.0.mlp.experts.down_proj_blocks"][
        :, :, :2
    ]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj: \[4, 64, 64\], the model needs \[4, 64, 96\]"):
        load_weights(model, WeightFiles(tmp_path), module.WEIGHTS, progress=lambda *_: None)


def test_missing_and_misshapen_experts_are_told_without_listing_all(tmp_path: Path) -> None:
    name = "qwen3_moe-many-experts"
    write_checkpoint(tmp_path, CONFIGS[name])
    shape = qwen3_moe.Config.from_hf(hf_raw(CONFIGS[name]) | {"moe_intermediate_size": 16})
    with pytest.raises(
        ModelError, match=r"experts\.0\.gate_proj\.weight \+ .* … and \d+ more.*needs \[2048, 48\]"
    ) as failed:
        load_weights(qwen3_moe.Model(shape), WeightFiles(tmp_path), qwen3_moe.WEIGHTS, progress=lambda *_: None)
    assert len(str(failed.value)) < 5000
    shape = qwen3_moe.Config.from_hf(hf_raw(CONFIGS[name]) | {"num_local_experts": 65})
    with pytest.raises(ModelError, match=r"6 missing: .*experts\.64\.down_proj"):
        load_weights(qwen3_moe.Model(shape), WeightFiles(tmp_path), qwen3_moe.WEIGHTS, progress=lambda *_: None)


# Through the engine


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        ("qwen3_moe-normalised", "off"),
        ("qwen3_moe-dense-layers", "regional"),  # blocks of two kinds
        ("mixtral-window", "off"),
        ("mixtral", "full"),
        ("gpt_oss", "off"),
    ],
)
def test_a_saved_checkpoint_answers_as_transformers_does(tmp_path: Path, name: str, compile: str) -> None:
    write_checkpoint(tmp_path, CONFIGS[name])
    check_answers(tmp_path, CONFIGS[name], (41, 3, 25), device="cpu", compile=compile)
