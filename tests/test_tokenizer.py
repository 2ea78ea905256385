"""Tokens are what transformers and SentencePiece make of the same vocabulary, and decode to the same text."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from loading_helpers import corpus, default_gguf, train_sentencepiece, write_llama
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from fastgraph.errors import ModelError, RequestError
from fastgraph.loading import gguf
from fastgraph.loading.gguf_tokenizer import _merges_of_scores, build_tokenizer
from fastgraph.loading.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello world!",
    "The capital of France is",
    "def f(x):\n    return x ** 2  # square\n\n\nprint(f(12))\t\t",
    "It's what we'll say; I'd've THEY'RE",
    "😀 👨‍👩‍👧‍👦 🇫🇷 ❤️",
    "안녕하세요 중국어 中文字符 日本語テキスト ไทย العربية हिन्दी",
    "x2y 3.14159 1,000,000 2024-01-31",
    "  multiple   spaces and trailing   ",
    "naïve café Ǆ ﬁ ½ x² \u00a0nbsp\u2028ls\r\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<repo_name>a/b<file_sep> <|endoftext|>  <|im_end|>x",
    "<|im_start <|im_sta <|",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return gguf.convert(default_gguf(), "bfloat16", lambda phase, share: None)


@pytest.fixture(scope="module")
def smollm(folder: Path) -> Tokenizer:
    return Tokenizer(folder, json.loads((folder / "config.json").read_text()), {})


@pytest.fixture(scope="module")
def reference() -> Any:
    path = default_gguf()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers reads a GGUF of this pre-tokenizer as if it were GPT-2's; this is what the model was trained with.
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return loaded


@pytest.mark.parametrize("text", TEXTS)
def test_default_model_encodes_and_decodes_as_transformers_does(smollm: Tokenizer, reference: Any, text: str) -> None:
    ids = smollm.encode(text)
    assert ids == reference(text)["input_ids"]
    assert smollm.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False)["input_ids"]
    assert smollm.decode(ids, skip_special_tokens=False) == text == reference.decode(ids)
    # The file marks more tokens as special than transformers knows by name.
    plain = [i for i in ids if i not in smollm.special_ids]
    assert smollm.decode(ids) == reference.decode(plain)


def test_default_model_gives_the_ids_that_its_authors_tokenizer_gives(smollm: Tokenizer) -> None:
    # From the tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct.
    assert smollm.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smollm.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert smollm.encode("  multiple   spaces") == [216, 2701, 256, 5600]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_is_treated_as_in_transformers(smollm: Tokenizer, reference: Any, text: str) -> None:
    ids = smollm.encode(text)
    assert ids == reference(text)["input_ids"]
    # Not always the text again: this vocabulary lacks a few control characters and some bytes of Unicode's far planes.
    assert smollm.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_ids_decode_as_in_transformers_broken_characters_too(
    smollm: Tokenizer, reference: Any, ids: list[int]
) -> None:
    assert smollm.decode(ids, skip_special_tokens=False) == reference.decode(ids)


def test_special_tokens_and_ends_of_the_default_model(smollm: Tokenizer, folder: Path) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.bos_id == 1
    assert smollm.eos_ids == {2}  # <|im_end|>
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.special_ids == set(range(17))
    assert smollm.decode(smollm.encode("<|im_start|>a<|im_end|>")) == "a"


def test_batch_equals_one_by_one(smollm: Tokenizer) -> None:
    assert smollm.encode_batch(TEXTS) == [smollm.encode(text) for text in TEXTS]


def test_unknown_ids_decode_to_nothing(smollm: Tokenizer) -> None:
    # A model's padded vocabulary has more ids than its tokenizer.
    hello = smollm.encode("Hello")
    assert smollm.decode([*hello, 49152, 10**9]) == "Hello"


@pytest.mark.parametrize("text", ["a\ud800b", b"bytes", None])
def test_what_is_not_text_is_refused(smollm: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match="whole characters"):
        smollm.encode(text)


def test_ends_are_the_union_of_config_generation_config_and_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(folder, {"eos_token_id": 5}, {"eos_token_id": [6, 7]})
    assert tokenizer.eos_ids == {2, 5, 6, 7}
    assert Tokenizer(folder, {"eos_token_id": None}, {"eos_token_id": 0}).eos_ids == {0, 2}


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    return tmp_path


def test_special_tokens_are_read_from_every_place_that_folders_have_them(copy: Path) -> None:
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>", "special": True}, "bos_token": None}))
    tokenizer = Tokenizer(copy, {"bos_token_id": 1}, {})
    assert tokenizer.special_tokens == {"eos_token": "<|endoftext|>"}
    assert tokenizer.eos_ids == {0}
    assert tokenizer.bos_id is None  # said to have none, whatever config.json holds

    config.unlink()
    assert Tokenizer(copy, {"bos_token_id": 1}, {}).bos_id == 1
    (copy / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}))
    tokenizer = Tokenizer(copy, {}, {})
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})


def test_a_named_special_token_is_special_even_where_tokenizer_json_does_not_say_so(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": "Hello"}))
    tokenizer = Tokenizer(copy, {}, {})
    (number,) = tokenizer.eos_ids
    assert number in tokenizer.special_ids
    assert tokenizer.decode([number]) == ""


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_whether_bos_is_added_is_settled_by_tokenizer_json_as_in_transformers(
    copy: Path, add_bos: bool | None, in_file: bool
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    if in_file:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    backend.save(str(copy / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(copy, {}, {}), AutoTokenizer.from_pretrained(copy)
    assert ours.encode("Hello") == theirs("Hello")["input_ids"]
    assert ours.encode("Hello", add_special_tokens=False) == theirs("Hello", add_special_tokens=False)["input_ids"]


def test_a_folder_without_tokenizer_json_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer(tmp_path, {}, {})
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ModelError, match=r"only tokenizer\.model.*save_pretrained"):
        Tokenizer(tmp_path, {}, {})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(tmp_path, {}, {})


def test_a_decoder_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(tmp_path, {}, {})


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def pair(request: Any, tmp_path_factory: Any) -> tuple[Tokenizer, Any, Path]:
    """A tokenizer made from a GGUF file, the SentencePiece model that went into the file, and the converted folder."""
    folder = tmp_path_factory.mktemp("spm")
    original = train_sentencepiece(folder, add_dummy_prefix=request.param)
    write_llama(folder / "m.gguf", original, metadata={"tokenizer.ggml.add_space_prefix": request.param})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGRAPH_CACHE", str(folder / "cache"))
        converted = gguf.convert(folder / "m.gguf", "float32", lambda phase, share: None)
    return Tokenizer(converted, {}, {}), original, converted


@functools.cache
def open_in_transformers(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


class TestSentencePiece:
    def test_encodes_as_sentencepiece_does(self, pair: tuple[Tokenizer, Any, Path]) -> None:
        tokenizer, original, _ = pair
        tails = ["", " ", "  x", "\n\n", "😀", "日本語", " 1234", "ß…", "\u0000"]
        for number, sentence in enumerate(corpus()[:200]):
            text = sentence[number % 20 :] + tails[number % len(tails)] + ("  " if number % 3 else "") + sentence[:7]
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == original.encode(text), text
            assert tokenizer.decode(ids) == text
            assert tokenizer.encode(text) == [original.bos_id(), *ids]

    def test_decodes_as_transformers_does(self, pair: tuple[Tokenizer, Any, Path]) -> None:
        tokenizer, _, converted = pair
        theirs = open_in_transformers(converted)
        for text in [*corpus()[:50], "😀é日本 x", "  a", ""]:
            ids = theirs(text)["input_ids"]
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids)

    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_any_ids_decode_as_in_transformers(self, pair: tuple[Tokenizer, Any, Path], data: Any) -> None:
        tokenizer, original, converted = pair
        theirs = open_in_transformers(converted)
        whole = [number for number in range(original.vocab_size()) if not original.is_byte(number)]
        ids = data.draw(st.lists(st.sampled_from(whole), max_size=20))
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected

    def test_an_unfinished_character_leaves_the_whole_ones_before_it(self, pair: tuple[Tokenizer, Any, Path]) -> None:
        tokenizer, _, _ = pair
        ids = tokenizer.encode("ka😀😀", add_special_tokens=False)
        assert tokenizer.decode(ids[:-1]) == "ka😀\ufffd"

    def test_control_tokens_are_matched_whole(self, pair: tuple[Tokenizer, Any, Path]) -> None:
        tokenizer, original, _ = pair
        ids = tokenizer.encode("<s>ka</s>", add_special_tokens=False)
        assert (ids[0], ids[-1]) == (original.bos_id(), original.eos_id())
        assert tokenizer.special_ids >= {original.bos_id(), original.eos_id()}


@pytest.fixture(scope="module", params=["LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer"])
def family(request: Any, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    """A small tokenizer of transformers' class for a family with tokens added to it, and ours of what it saves."""
    folder = tmp_path_factory.mktemp(request.param)
    kind = getattr(transformers, request.param)
    if request.param == "Qwen2Tokenizer":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pairs = [("k", "a"), ("l", "o"), ("ka", "lo"), ("Ġ", "ka"), ("Ċ", "Ċ")]
        theirs = kind(vocab={t: i for i, t in enumerate([*alphabet, *map("".join, pairs)])}, merges=pairs)
    else:
        trained = train_sentencepiece(folder)
        tokens = [trained.id_to_piece(i) for i in range(trained.vocab_size())]
        scores = [trained.get_score(i) for i in range(len(tokens))]
        pairs = _merges_of_scores(tokens, scores, [1] * len(tokens))
        theirs = kind(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    theirs.add_tokens(["<tool>"])
    theirs.add_tokens([tokenizers.AddedToken("<|end|>", rstrip=True)], special_tokens=True)  # as Phi-3's
    theirs.save_pretrained(folder)
    return Tokenizer(folder, {}, {}), theirs


@pytest.mark.parametrize(
    "text",
    ["kalo <tool> x<tool>y", "<|end|>  \n kalo<|end|> ", "", "  a\n\n\tb ", "é😀 日本語", "<s>kalo</s>", "12 345"],
)
def test_each_familys_tokenizer_is_read_from_what_transformers_saves(family: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = family
    for special in (True, False):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


SPLIT_TEXT = (
    "It's WE'LL 'tis x='s 12345 ٣٤٥ a1b22c333 foo_bar--baz!!! (ok)\r\n\r\n\tdef  f( x ):\n    pass   \n"
    "naïve Ünïcödé aBcDEf HTTPServer's a//b/\\n 日本語123 ½² $100,000.00 <=>^~| 😀😀 \u00a0  end  "
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the published expressions, each of which splits what the one before left.
EXPRESSIONS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "dbrx": [LLAMA3],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}


class TestPreTokenizers:
    """Where a text is split, by the name that a GGUF file gives."""

    @staticmethod
    def metadata(**more: Any) -> dict[str, Any]:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        values = {
            "model": "gpt2",
            "tokens": [*alphabet, "ab", "abc", "<|end|>", "<tool>"],
            "token_type": [1] * len(alphabet) + [1, 1, 3, 4],
            "merges": ["a b"],
            "eos_token_id": len(alphabet) + 2,
            "bos_token_id": len(alphabet) + 2,
        }
        return {f"tokenizer.ggml.{key}": value for key, value in (values | more).items()}

    @pytest.mark.parametrize("name", EXPRESSIONS)
    def test_splits_as_the_published_expressions_do(self, name: str) -> None:
        text, _ = build_tokenizer(self.metadata(pre=name))
        split = [span for _, span in tokenizers.Tokenizer.from_str(text).pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)]
        expected = [(0, len(SPLIT_TEXT))]
        for expression in EXPRESSIONS[name]:
            cuts = {0, len(SPLIT_TEXT)}
            for start, stop in expected:
                found = [m.span() for m in regex.finditer(expression, SPLIT_TEXT[start:stop])]
                cuts |= {start, stop} | {start + place for span in found for place in span}
            ordered = sorted(cuts)
            expected = list(itertools.pairwise(ordered))
        assert split == expected

    def test_a_name_that_is_not_known_is_an_error_that_lists_those_that_are(self) -> None:
        with pytest.raises(ModelError, match=r"'deepseek-llm'.*smollm.*qwen2"):
            build_tokenizer(self.metadata(pre="deepseek-llm"))

    def test_a_kind_of_vocabulary_that_is_not_known_is_an_error(self) -> None:
        with pytest.raises(ModelError, match="'t5'"):
            build_tokenizer(self.metadata(model="t5"))
        with pytest.raises(ModelError, match="no tokenizer"):
            build_tokenizer({})

    def test_llama3_takes_a_word_that_is_a_token_whole(self) -> None:
        # No merge leads to "abc".
        llama3 = tokenizers.Tokenizer.from_str(build_tokenizer(self.metadata(pre="llama-bpe", add_bos_token=False))[0])
        gpt2 = tokenizers.Tokenizer.from_str(build_tokenizer(self.metadata(pre="gpt-2"))[0])
        assert llama3.encode("abc").tokens == ["abc"]
        assert gpt2.encode("abc").tokens == ["ab", "c"]

    def test_a_user_defined_token_is_whole_but_not_special(self) -> None:
        loaded = tokenizers.Tokenizer.from_str(build_tokenizer(self.metadata(pre="gpt-2"))[0])
        assert loaded.encode("a<tool>b<|end|>").tokens == ["a", "<tool>", "b", "<|end|>"]
        special = {token.content: token.special for token in loaded.get_added_tokens_decoder().values()}
        assert special == {"<tool>": False, "<|end|>": True}

    @pytest.mark.parametrize(
        ("more", "expected"),
        [
            ({"pre": "gpt-2"}, ["a"]),
            ({"pre": "gpt-2", "add_bos_token": True}, ["<|end|>", "a"]),
            ({"pre": "gpt-2", "add_eos_token": True}, ["a", "<|end|>"]),
            ({"pre": "llama-bpe"}, ["<|end|>", "a"]),
            ({"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
        ],
    )
    def test_bos_and_eos_are_added_as_the_file_says(self, more: dict[str, Any], expected: list[str]) -> None:
        text, config = build_tokenizer(self.metadata(**more))
        assert tokenizers.Tokenizer.from_str(text).encode("a").tokens == expected
        assert config["add_bos_token"] == (expected[0] == "<|end|>")
