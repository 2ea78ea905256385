"""Turning a GGUF file, once, into a Hugging Face style folder in the user's cache.

From there on it is a model like any other: memory-mapped safetensors, `config.json`, `tokenizer.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from fastgraph.errors import ModelError
from fastgraph.loading.files import Progress, cache_folder
from fastgraph.loading.gguf_file import GGUFFile, require_gguf
from fastgraph.loading.gguf_tokenizer import build_tokenizer

_VERSION = 2  # of what convert() writes; a new one makes older cached folders be left alone
_DTYPES = {"float32": (torch.float32, "F32"), "float16": (torch.float16, "F16"), "bfloat16": (torch.bfloat16, "BF16")}


_CONFIG = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_HEAD_NORMS = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one `general.architecture` of GGUF reads as a Hugging Face model."""

    name: str  # for config.json's architectures
    model_type: str
    config: Mapping[str, str]  # metadata key, after "<architecture>." -> config.json key
    tensors: Mapping[str, str]  # tensor name without .weight or .bias -> Hugging Face name; {} is the layer
    # Tensors whose rows llama.cpp reorders for its rotary -> the config key of their heads
    permuted: Mapping[str, str] = field(default_factory=dict)
    norms_less_one: bool = False  # Hugging Face's norms are those of the file less 1
    partial_rotary: bool = False  # a part of each head may stay unrotated
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})  # what the file need not say


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        _CONFIG,
        _TENSORS,
        permuted={"blk.{}.attn_q": "num_attention_heads", "blk.{}.attn_k": "num_key_value_heads"},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _CONFIG, _TENSORS),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _CONFIG, _TENSORS | _HEAD_NORMS),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _CONFIG
        | {
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        _TENSORS
        | _HEAD_NORMS
        | {
            "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
            "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
            "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
        },
        norms_less_one=True,
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        _CONFIG | {"attention.sliding_window": "sliding_window"},
        _TENSORS
        | {
            "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
            "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
        },
        partial_rotary=True,
    ),
}
# Tensors that become rope_scaling in the config.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def convert(path: Path, dtype: str, progress: Progress) -> Path:
    """Convert a GGUF file and return the folder; a file that was converted before is only looked up.

    `dtype` is float32 (bit for bit what dequantising gives), bfloat16 or float16. Tensors pass one by one, so memory
    holds one of them. Raises `ModelError` for a file, an architecture or a kind of scaling that is not known.
    """
    folder = cache_folder() / "gguf" / _key(path, dtype)
    if folder.is_dir():
        return folder
    require_gguf()
    file = GGUFFile(path)
    config = read_config(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as unfinished:
            whole = Path(unfinished) / folder.name
            whole.mkdir()
            _write_folder(whole, file, config, dtype, progress)
            whole.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was there first, with the same result
            raise ModelError(
                f"cannot write the converted model to {folder.parent} ({error}); "
                f"make room there, or set FASTGRAPH_CACHE to another folder"
            ) from error
    return folder


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata as `config.json`. Every key that bears on the model is either understood or an error."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(f"{file.path} is of architecture {name!r}; known are {', '.join(ARCHITECTURES)}")
    if file.metadata.get("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one part of several; join them with `llama-gguf-split --merge` first")
    architecture = ARCHITECTURES[name]
    keys = {k.removeprefix(f"{name}."): v for k, v in file.metadata.items() if k.startswith(f"{name}.")}
    config: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    config |= {ours: keys.pop(theirs) for theirs, ours in architecture.config.items() if theirs in keys}
    if config.get("sliding_window") == 0:  # how Phi-4's files say that there is none
        config["sliding_window"] = None
    try:
        heads = config["num_attention_heads"]
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", config["hidden_size"] // heads)
        config.setdefault("vocab_size", file.tensors["token_embd.weight"].shape[0])
        _settle_rope(file, keys, config)
    except (KeyError, TypeError) as error:
        raise ModelError(f"{file.path} lacks what a {name} model needs, or has it per layer ({error})") from error
    widths = [keys.pop(key, config["head_dim"]) for key in ("attention.value_length", "rope.dimension_count")]
    if architecture.partial_rotary:
        config["partial_rotary_factor"] = widths.pop() / config["head_dim"]
    rest = {key: value for key, value in keys.items() if value or not key.startswith("expert_")}
    if rest or set(widths) != {config["head_dim"]}:
        what = ", ".join(f"{name}.{key} = {value}" for key, value in rest.items()) or f"head widths {widths}"
        raise ModelError(f"{file.path} asks for something that is not supported: {what}")
    tensors = file.tensors
    config |= architecture.fixed
    if name == "gemma3":
        # As in llama.cpp: the largest one alone scales by the hidden size per head, which is not its head_dim.
        largest = config["num_hidden_layers"] == 62
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if largest else config["head_dim"]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    return config | _token_ids(file)


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    ids = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")}
    ends = [i for i in dict.fromkeys((ids["eos"], ids["eot"])) if i is not None]
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else ids["eos"],
        "pad_token_id": ids["padding"],
    }


def _settle_rope(file: GGUFFile, keys: dict[str, Any], config: dict[str, Any]) -> None:
    """Take the rotary scaling out of `keys` and put it in `config`, in Hugging Face's terms.

    llama.cpp's names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and gguf-py's constants.
    """
    config.setdefault("rope_theta", 10000.0)
    keys.pop("rope.scaling.finetuned", None)  # says how the model came to be, not how it is run
    kind = keys.pop("rope.scaling.type", "none")
    factor = keys.pop("rope.scaling.factor", keys.pop("rope.scale_linear", 1.0))
    trained = keys.pop("rope.scaling.original_context_length", None)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none" and factor != 1.0:
            raise ModelError(f"{file.path} scales its rotary twice: {kind}, and by rope_freqs.weight")
        config["rope_scaling"] = _llama3_scaling(file, config)
    elif "rope_factors_long.weight" in file.tensors:
        both = {name: file.read(f"rope_factors_{name}.weight").tolist() for name in ("short", "long")}
        config["rope_scaling"] = {"rope_type": "longrope"} | {f"{name}_factor": both[name] for name in both}
        config["original_max_position_embeddings"] = trained
        if (attention := keys.pop("rope.scaling.attn_factor", None)) is not None:
            config["rope_scaling"]["attention_factor"] = attention
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := keys.pop(f"rope.scaling.{theirs}", None)) is not None:
                scaling[ours] = value
        attention = keys.pop("rope.scaling.attn_factor", 1.0)
        if attention != 1.0:  # llama.cpp multiplies YaRN's own factor with it, Hugging Face's replaces the whole
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
        config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    elif kind == "linear" or (kind == "none" and factor != 1.0):
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise ModelError(f"{file.path} scales its rotary by {kind!r}; known are none, linear, yarn and Llama 3's")


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of Llama 3's rotary scaling, of which the file holds only the outcome: a divisor for each frequency.

    All of Meta's models share every parameter but the factor, which is the largest divisor. The formula is that of
    transformers' modeling_rope_utils.py; other divisors than it gives are refused.
    """
    divisors = file.read("rope_freqs.weight").astype(np.float64)  # [head_dim / 2]
    factor, low, high, trained = float(divisors.max()), 1.0, 4.0, 8192
    frequency = config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    wavelength = 2 * np.pi / frequency
    smooth = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(f"{file.path} scales its rotary (rope_freqs.weight) in a way that is not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def _write_folder(folder: Path, file: GGUFFile, config: dict[str, Any], dtype: str, progress: Progress) -> None:
    tokenizer, tokenizer_config = build_tokenizer(file.metadata)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    ids = {key: value for key, value in _token_ids(file).items() if value is not None}
    for name, content in (
        ("tokenizer_config.json", tokenizer_config),
        ("config.json", config | {"dtype": dtype}),
        ("generation_config.json", ids),
    ):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as out:
        _write_tensors(out, file, config, dtype, progress)


def _write_tensors(out: BinaryIO, file: GGUFFile, config: Mapping[str, Any], dtype: str, progress: Progress) -> None:
    """Write safetensors (https://huggingface.co/docs/safetensors): a length, a JSON header, then the bytes."""
    torch_dtype, label = _DTYPES[dtype]
    architecture = ARCHITECTURES[file.metadata["general.architecture"]]
    placed: dict[str, tuple[str, str | None]] = {}  # GGUF name -> Hugging Face name, config key of the heads
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in file.tensors.items():
        if name in _ROPE_TENSORS:
            continue
        placed[name] = _place(name, architecture, file.path)
        size = math.prod(info.shape) * torch_dtype.itemsize
        header[placed[name][0]] = {"dtype": label, "shape": list(info.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for name, (_, heads) in placed.items():
        values = file.read(name)
        if heads is not None:
            values = unpermute(values, config[heads])
        if architecture.norms_less_one and name.endswith("_norm.weight"):
            values = values - 1
        tensor = torch.from_numpy(np.require(values, requirements=["C", "W"])).to(torch_dtype)
        out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        progress("converting GGUF", header[placed[name][0]]["data_offsets"][1] / end)


def _place(name: str, architecture: Architecture, path: Path) -> tuple[str, str | None]:
    stem, _, kind = name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.", stem)
    pattern = re.sub(r"^blk\.\d+\.", "blk.{}.", stem)
    if pattern not in architecture.tensors or kind not in ("weight", "bias"):
        raise ModelError(f"{path} holds the tensor {name}, which a {architecture.name} has no place for")
    target = architecture.tensors[pattern].replace("{}", layer[1] if layer else "")
    return f"{target}.{kind}", architecture.permuted.get(pattern)


def unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of rows, in which the two halves of a rotary pair lie side by side.

    values: [heads * head_dim, ...]; Hugging Face has all first halves of a head before all second ones.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    halves: npt.NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(values.shape)
    return halves


def _key(path: Path, dtype: str) -> str:
    """A folder name that changes with the file, with the dtype and with this converter."""
    with path.open("rb") as file:
        start = file.read(1 << 20)
    state = path.stat()
    identity = f"{_VERSION} {dtype} {path.name} {state.st_size} {state.st_mtime_ns} ".encode()
    return f"{path.stem}-{dtype}-{hashlib.sha256(identity + start).hexdigest()[:16]}"
