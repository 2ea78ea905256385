"""Weights land where they belong, without a second copy, and what does not fit is one error that lists it all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastgraph.errors import ModelError
from fastgraph.loading.weights import WeightFiles, fill_dummy, load_weights

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.{}.norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.qkv.weight": tuple(f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkv"),
    "layers.{}.qkv.bias": tuple(f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkv"),
    "layers.{}.out.weight": "model.layers.{}.self_attn.o_proj.weight",
    "head.weight": "lm_head.weight",
}
WIDTH, QUERY, KEY, VOCABULARY, LAYERS = 8, 8, 4, 20, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, QUERY + 2 * KEY)
        self.out = nn.Linear(QUERY, WIDTH, bias=False)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def make_model(tied: bool = False, dtype: torch.dtype = torch.float32) -> Model:
    model = Model(tied).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def make_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (WIDTH,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (WIDTH, QUERY)
        for name, rows in (("q", QUERY), ("k", KEY), ("v", KEY)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, WIDTH)
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def save(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def load(model: nn.Module, folder: Path, **options: Any) -> list[tuple[str, float | None]]:
    steps: list[tuple[str, float | None]] = []
    load_weights(model, WeightFiles(folder), NAMES, progress=lambda *step: steps.append(step), **options)
    return steps


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_every_parameter_is_filled_fused_ones_row_by_row(
    tmp_path: Path, shards: int, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = make_tensors(stored)
    save(tmp_path, tensors, shards)
    model = make_model(dtype=wanted)
    steps = load(model, tmp_path)
    for layer in range(LAYERS):  # with two digits too
        attention = f"model.layers.{layer}.self_attn"
        fused = torch.cat([tensors[f"{attention}.{x}_proj.weight"] for x in "qkv"]).to(wanted)
        biases = torch.cat([tensors[f"{attention}.{x}_proj.bias"] for x in "qkv"]).to(wanted)
        assert torch.equal(model.layers[layer].qkv.weight, fused)
        assert torch.equal(model.layers[layer].qkv.bias, biases)
        assert torch.equal(model.layers[layer].out.weight, tensors[f"{attention}.o_proj.weight"].to(wanted))
    assert torch.equal(model.embed.weight, tensors["model.embed_tokens.weight"].to(wanted))
    assert torch.equal(model.head.weight, tensors["lm_head.weight"].to(wanted))
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_what_is_stored_less_one_has_one_added_in_the_parameters_dtype(tmp_path: Path) -> None:
    tensors = make_tensors(torch.bfloat16)
    save(tmp_path, tensors)
    model = make_model(dtype=torch.bfloat16)
    model.embed.weight = nn.Parameter(torch.full((VOCABULARY, WIDTH), torch.nan, dtype=torch.float32))
    names = NAMES | {"embed.weight": "1 + model.embed_tokens.weight"}
    load_weights(model, WeightFiles(tmp_path), names, progress=lambda *step: None)
    assert torch.equal(model.embed.weight, tensors["model.embed_tokens.weight"].float() + 1)
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])


def test_weights_go_into_the_parameters_that_are_there(tmp_path: Path) -> None:
    save(tmp_path, make_tensors())
    model = make_model()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load(model, tmp_path)
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_tensors_are_mapped_not_copied(tmp_path: Path) -> None:
    save(tmp_path, make_tensors())
    files = WeightFiles(tmp_path)
    name = "model.embed_tokens.weight"
    assert files.read(name).data_ptr() == files.read(name).data_ptr()
    assert files.shape(name) == (VOCABULARY, WIDTH)


def test_a_tied_head_needs_no_tensor_and_a_redundant_one_is_no_error(tmp_path: Path) -> None:
    tensors = make_tensors()
    save(tmp_path, tensors)
    model = make_model(tied=True)
    load(model, tmp_path, ignore=["lm_head.weight"])
    assert torch.equal(model.head.weight, tensors["model.embed_tokens.weight"])
    del tensors["lm_head.weight"]
    save(tmp_path, tensors)
    model = make_model(tied=True)
    load(model, tmp_path)
    assert torch.equal(model.head.weight, tensors["model.embed_tokens.weight"])


def test_harmless_names_are_ignored_by_pattern(tmp_path: Path) -> None:
    tensors = make_tensors() | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(LAYERS)}
    save(tmp_path, tensors)
    with pytest.raises(ModelError, match="12 unexpected"):
        load(make_model(), tmp_path)
    load(make_model(), tmp_path, ignore=["*.rotary_emb.inv_freq"])


def test_all_that_does_not_fit_is_listed_in_one_error_before_anything_is_read(tmp_path: Path) -> None:
    tensors = make_tensors()
    for layer in range(10):
        del tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
    tensors["model.layers.11.self_attn.v_proj.weight"] = torch.zeros(KEY + 1, WIDTH)
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCABULARY, WIDTH + 1)
    tensors["model.layers.0.mlp.weight"] = torch.zeros(1)
    save(tmp_path, tensors)
    model = make_model()
    with pytest.raises(ModelError) as caught:
        load(model, tmp_path)
    message = str(caught.value)
    assert "10 missing" in message
    assert "model.layers.0.self_attn.k_proj.weight" in message
    assert "… and 2 more" in message
    assert "1 unexpected: model.layers.0.mlp.weight" in message
    assert "2 of the wrong shape" in message
    assert f"model.embed_tokens.weight: [{VOCABULARY}, {WIDTH + 1}], the model needs [{VOCABULARY}, {WIDTH}]" in message
    assert re.search(r"q_proj.weight \+ .*: \[8, 8\] \+ \[4, 8\] \+ \[5, 8\], the model needs \[16, 8\]", message)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_missing_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    save(tmp_path, make_tensors(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of the weight files.*model-00002-of-00003\.safetensors"):
        WeightFiles(tmp_path)


def test_an_index_is_the_authority_over_stray_files(tmp_path: Path) -> None:
    tensors = make_tensors()
    save(tmp_path, tensors, shards=2)
    save_file({name: torch.zeros_like(t) for name, t in tensors.items()}, tmp_path / "model.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    model = make_model()
    load(model, tmp_path)
    assert torch.equal(model.embed.weight, tensors["model.embed_tokens.weight"])


def test_a_tensor_that_the_index_puts_in_the_wrong_file_is_missing(tmp_path: Path) -> None:
    save(tmp_path, make_tensors(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    other = {name: file for name, file in names.items() if name != "lm_head.weight"}
    wrong = next(file for file in names.values() if file != names["lm_head.weight"])
    index.write_text(json.dumps({"weight_map": other | {"lm_head.weight": wrong}}))
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        load(make_model(), tmp_path)


def test_one_safetensors_file_of_another_name_is_read(tmp_path: Path) -> None:
    save_file(make_tensors(), tmp_path / "weights.safetensors")
    load(make_model(), tmp_path)


def test_folders_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no safetensors weights$"):
        WeightFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, which would have to be converted"):
        WeightFiles(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="2 safetensors files but no model"):
        WeightFiles(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        WeightFiles(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="not an index"):
        WeightFiles(tmp_path)


def test_a_parameter_that_the_model_file_does_not_name_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, make_tensors())
    model = make_model()
    model.layers[3].extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"lack its parameter layers\.\{\}\.extra\.weight"):
        load(model, tmp_path)


def test_dummy_weights_are_random_repeatable_and_never_zero() -> None:
    models = [make_model(), make_model(), make_model()]
    for model, seed in zip(models, [0, 0, 1], strict=True):
        fill_dummy(model, seed)
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first != 0).all()
    matrices = torch.cat([p.flatten() for p in models[0].parameters() if p.ndim > 1])
    assert abs(matrices.mean()) < 0.002
    assert abs(matrices.std() - 0.02) < 0.002
    assert abs(models[0].layers[0].norm.weight - 1).max() < 0.2
    assert not torch.equal(models[0].layers[0].qkv.weight, models[0].layers[1].qkv.weight)
