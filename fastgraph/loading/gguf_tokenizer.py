"""Building `tokenizer.json` from the vocabulary that a GGUF file carries in its metadata.

The names of the pre-tokenizers and what they split on are llama.cpp's (src/llama-vocab.cpp), since a GGUF file holds
only the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastgraph.errors import ModelError

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# Llama 3's, with the most digits that one piece may have. Qwen 2 has the same with one.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-4o's, in which a word may begin with capitals but not go on with them; with its contractions and its digits.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# tokenizer.ggml.pre -> the expressions that split a text, one after the other.
SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "smollm": (_DIGIT, _GPT2),
    "llama-bpe": (_LLAMA3 % "{1,3}",),
    "llama3": (_LLAMA3 % "{1,3}",),
    "llama-v3": (_LLAMA3 % "{1,3}",),
    "smaug-bpe": (_LLAMA3 % "{1,3}",),
    "dbrx": (_LLAMA3 % "{1,3}",),  # Phi-4's
    "qwen2": (_LLAMA3 % "",),
    "deepseek-r1-qwen": (_LLAMA3 % "",),
    "gpt-4o": (_GPT4O % (_CONTRACTION, _CONTRACTION, "{1,3}"),),  # Phi-4-mini's
    "tekken": (_GPT4O % ("", "", ""),),  # Mistral's since Nemo
}
# A word that is a token is taken whole, whatever the merges would make of it; and a text begins with BOS unless the
# file says otherwise.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NORMALIZED = frozenset({"qwen2"})  # texts are composed (NFC) first


def build_tokenizer(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """`tokenizer.json` as text, and `tokenizer_config.json`. Raises `ModelError` for a kind of vocabulary not known."""
    kind = _get(metadata, "model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
        add_bos = _get(metadata, "pre", "default") in _WHOLE_WORDS
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
        add_bos = True
    else:
        raise ModelError(f"the GGUF file has a tokenizer of kind {kind!r}; known are gpt2 and llama")
    tokens, types = _get(metadata, "tokens"), _token_types(metadata)
    tokenizer.add_tokens([_whole(t, special=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED])
    tokenizer.add_special_tokens([_whole(t, special=True) for t, k in zip(tokens, types, strict=True) if k == _CONTROL])

    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = _get(metadata, f"{key}_token_id", None)
        if number is not None and number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    for name, default in (("bos", add_bos), ("eos", False)):
        config[f"add_{name}_token"] = f"{name}_token" in config and bool(_get(metadata, f"add_{name}_token", default))
    before = [config["bos_token"]] if config["add_bos_token"] else []
    after = [config["eos_token"]] if config["add_eos_token"] else []
    if before or after:
        post = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in before + after],
        )
        byte_level = processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = processors.Sequence([byte_level, post]) if kind == "gpt2" else post
    return tokenizer.to_str(), config


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    """GPT-2's: bytes spelled as letters, words split by expressions, merges in the file."""
    name = _get(metadata, "pre", "default")
    if name not in SPLITS:
        raise ModelError(
            f"the GGUF file splits words the way {name!r} does, which is not known; known are {', '.join(SPLITS)}. "
            f"Use the model's Hugging Face folder instead"
        )
    vocabulary = {token: number for number, token in enumerate(_get(metadata, "tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE (arXiv:1808.06226): spaces are ▁, and letters it does not know are spelled in bytes."""
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if _get(metadata, key, None):
            raise ModelError(
                f"the GGUF file's tokenizer needs {key}, which is not supported; use the model's folder instead"
            )
    tokens, types = _get(metadata, "tokens"), _token_types(metadata)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_of_scores(tokens, _get(metadata, "scores"), types)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(_get(metadata, "add_space_prefix", True))
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decode, decoders.Strip(" ", 1, 0)] if prefix else decode)
    return tokenizer


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges that joining the best-scored pair first amounts to, best first.

    Every way to cut a token in two tokens is a merge with the rank of the token it makes; SentencePiece looks at the
    result only.
    """
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    ranked = sorted(
        (-score, number) for number, (score, token) in enumerate(zip(scores, tokens, strict=True)) if token in normal
    )
    return [
        (token[:cut], token[cut:])
        for _, number in ranked
        for token in (tokens[number],)
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def _token_types(metadata: Mapping[str, Any]) -> list[int]:
    types: list[int] = _get(metadata, "token_type", None) or [_NORMAL] * len(_get(metadata, "tokens"))
    return types


def _whole(token: str, special: bool) -> AddedToken:
    """A token found in a text before anything else splits it."""
    return AddedToken(token, special=special, normalized=False)


_REQUIRED = object()


def _get(metadata: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is _REQUIRED:
        raise ModelError(f"the GGUF file carries no tokenizer (tokenizer.ggml.{key} is absent)")
    return value
