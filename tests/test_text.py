"""Streamed text is the decoded text, cut at the first stop string, however the tokens arrive."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading_helpers import default_gguf, train_sentencepiece, write_llama

from fastgraph.loading import gguf
from fastgraph.loading.tokenizer import Tokenizer
from fastgraph.text import TextStream


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    folder = gguf.convert(default_gguf(), "bfloat16", lambda phase, share: None)
    return Tokenizer(folder, json.loads((folder / "config.json").read_text()), {})


@pytest.fixture(scope="module")
def spm(tmp_path_factory: Any) -> Tokenizer:
    folder = tmp_path_factory.mktemp("spm")
    write_llama(folder / "m.gguf", train_sentencepiece(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGRAPH_CACHE", str(folder / "cache"))
        return Tokenizer(gguf.convert(folder / "m.gguf", "float32", lambda phase, share: None), {}, {})


@pytest.fixture(params=["smollm", "spm"])
def tokenizer(request: Any) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def run(stream: TextStream, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Push ids in chunks of these sizes, over and over, then finish."""
    pieces, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, stream.finish()]


def expected(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], skip: bool = True) -> tuple[str, bool, int]:
    """By brute force: text, whether it was stopped, tokens needed for that."""
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            start = end - max(map(len, ending))
            needed = next(
                n
                for n in range(1, len(ids) + 1)
                if any(s in tokenizer.decode(ids[:n], skip_special_tokens=skip) for s in ending)
            )
            return text[:start], True, needed
    return text, False, len(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_ids_stream_to_what_they_decode_to(smollm: Tokenizer, spm: Tokenizer, data: Any) -> None:
    tokenizer = data.draw(st.sampled_from([smollm, spm]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    pieces = run(stream, ids, data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    assert "".join(pieces) == stream.text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert (stream.stopped, stream.kept) == (False, len(ids))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_where_a_search_through_the_whole_text_would(
    smollm: Tokenizer, spm: Tokenizer, data: Any
) -> None:
    tokenizer = data.draw(st.sampled_from([smollm, spm]))
    letters = st.text(alphabet="aab \n😀한é", min_size=0, max_size=60)
    text = data.draw(letters)
    inside = data.draw(st.lists(st.tuples(st.integers(0, 59), st.integers(1, 12)), max_size=3))
    stop = [text[at : at + size] for at, size in inside] + data.draw(
        st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=2)
    )
    stop = [s for s in stop if s]
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stop)
    pieces = run(stream, ids, data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    assert ("".join(pieces), stream.stopped, stream.kept) == expected(tokenizer, ids, stop)
    assert stream.text == "".join(pieces)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stop_strings_among_random_ids(smollm: Tokenizer, spm: Tokenizer, data: Any) -> None:
    tokenizer = data.draw(st.sampled_from([smollm, spm]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=30))
    text = tokenizer.decode(ids)
    at, size = data.draw(st.integers(0, len(text))), data.draw(st.integers(1, 10))
    stop = [s for s in [text[at : at + size], "e"] if s and "\ufffd" not in s]
    stream = TextStream(tokenizer, stop)
    pieces = run(stream, ids, [data.draw(st.integers(1, 6))])
    assert ("".join(pieces), stream.stopped, stream.kept) == expected(tokenizer, ids, stop)


def test_a_character_of_several_tokens_is_held_until_it_is_whole(tokenizer: Tokenizer) -> None:
    for text in ["👨‍👩‍👧‍👦!", "한글 텍스트", "日本", "🤷🏽‍♀️ ok"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = TextStream(tokenizer)
        pieces = run(stream, ids, [1])
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert len(ids) > len(text) / 2


def test_an_unfinished_character_is_shown_as_decode_shows_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦜", add_special_tokens=False)[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.text == tokenizer.decode(ids) == "a\ufffd"


def test_only_what_may_become_a_stop_string_is_held_back(smollm: Tokenizer) -> None:
    stream = TextStream(smollm, ["###END"])
    assert stream.push(smollm.encode("hello ##")) == "hello "
    assert stream.push(smollm.encode("x")) == "##x"
    assert stream.push(smollm.encode("####")) == "#"
    assert stream.push(smollm.encode("END more")) == ""
    assert stream.stopped
    assert stream.text == "hello ##x#"
    assert stream.finish() == ""


def test_a_stop_string_of_many_tokens_is_found(smollm: Tokenizer) -> None:
    stop = "\n\nQuestion: What is the capital of France? 12345"
    ids = smollm.encode(f"Answer{stop} and more")
    assert len(smollm.encode(stop)) > 10
    stream = TextStream(smollm, [stop])
    assert "".join(run(stream, ids, [1])) == "Answer"
    assert stream.kept == len(smollm.encode(f"Answer{stop}"))


def test_a_stop_string_within_the_first_token(smollm: Tokenizer) -> None:
    ids = smollm.encode(" international law")
    assert len(ids) == 2
    stream = TextStream(smollm, ["tern"])
    assert stream.push(ids) == " in"
    assert (stream.stopped, stream.kept) == (True, 1)
    assert stream.push(ids) == ""
    assert stream.kept == 1


def test_overlapping_beginnings_of_a_stop_string(smollm: Tokenizer) -> None:
    letters = [smollm.encode(letter)[0] for letter in "aaabab"]
    for stop, text in (("aab", "a"), ("abab", "aa"), ("ba", "aaa"), ("bb", "aaabab")):
        stream = TextStream(smollm, [stop])
        assert "".join(run(stream, letters, [1])) == text
    stream = TextStream(smollm, ["ab", "aab", "b"])  # all three end at the same letter
    assert "".join(run(stream, letters, [1])) == "a"


def test_special_tokens_are_left_out_unless_asked_for(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nhi<|im_end|>")
    assert "".join(run(TextStream(smollm), ids, [1])) == "user\nhi"
    assert "".join(run(TextStream(smollm, skip_special_tokens=False), ids, [1])) == "<|im_start|>user\nhi<|im_end|>"
    stream = TextStream(smollm, ["<|im_end|>"], skip_special_tokens=False)
    assert "".join(run(stream, ids, [1])) == "<|im_start|>user\nhi"


def test_the_front_of_the_engine_needs_no_torch_for_text() -> None:
    program = "import sys, fastgraph.text; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_first_space_goes_where_decode_drops_it(spm: Tokenizer) -> None:
    ids = spm.encode(" ka lo")
    stream = TextStream(spm)
    assert "".join(run(stream, ids, [1])) == spm.decode(ids) == " ka lo"


def test_work_for_a_token_does_not_grow_with_the_text(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    ids = [chance.randrange(17, smollm.vocab_size) for _ in range(5000)]
    calls = []
    spell = smollm.token_bytes
    monkeypatch.setattr(smollm, "token_bytes", lambda number: calls.append(number) or spell(number))
    monkeypatch.setattr(smollm, "decode", lambda *args, **kwargs: pytest.fail("decodes from the start"))
    stop = "never to be found in there"
    stream = TextStream(smollm, [stop])
    for number in ids:
        stream.push([number])
        assert len(stream._held) < len(stop)
    assert calls == ids
