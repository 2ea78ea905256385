"""What the Python API makes of prompts, conversations and options, and what it refuses; on a tiny random model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading_helpers import train_sentencepiece, write_llama

import fastgraph
from fastgraph.device import builder
from fastgraph.errors import ConfigError, EngineDied, ModelError, RequestError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GGUF files of a tiny random Llama whose tokenizer puts BOS before a text; one with a template that does so."""
    folder = tmp_path_factory.mktemp("tiny")
    model = train_sentencepiece(folder)
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    add_bos = {"tokenizer.ggml.add_bos_token": True}
    write_llama(folder / "plain.gguf", model, metadata=add_bos)
    write_llama(folder / "chat.gguf", model, metadata={**add_bos, "tokenizer.chat_template": template})
    return {name: folder / f"{name}.gguf" for name in ("plain", "chat")}


@pytest.fixture(scope="module")
def load_tiny(
    tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., fastgraph.LLM]]:
    options = {"dtype": "float32", "compile": "off", "device": "cpu", "max_model_len": 64, "max_decode_bs": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTGRAPH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield lambda name, **more: fastgraph.load_model(str(tiny[name]), **options, **more)


@pytest.fixture(scope="module")
def llm(load_tiny: Callable[..., fastgraph.LLM]) -> Iterator[fastgraph.LLM]:
    with load_tiny("plain") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"temprature": 1}, "unknown sampling parameter temprature; known are: .*temperature"),
        ("x", {"temperature": -1}, "temperature must be a number from 0, not -1"),
        ("x", {"temperature": 10**400}, "temperature must be a number from 0, not 1000"),
        ("x", {"temperature": float("nan")}, "temperature must be a number from 0, not nan"),
        ("x", {"presence_penalty": float("-inf")}, "presence_penalty must be a number, not -inf"),
        ("x", {"max_tokens": 0}, "max_tokens must be a whole number of 1 or more, not 0"),
        ("x", {"max_tokens": 64}, "max_model_len is 64"),
        ("x", {"max_tokens": None, "min_tokens": 2**31}, r"min_tokens 2147483648 is above the \d\d tokens that the"),
        ([5] * 64, {}, "the prompt has 64 tokens; with max_model_len 64 it may have 63 at most"),
        ("kalo " * 100, {}, r"the prompt has \d\d\d tokens; with max_model_len 64"),
        ([5, 600], {}, "prompt token 600 is not in the vocabulary of 600 tokens"),
        ([-1], {}, "prompt token -1 is not in the vocabulary"),
        ("x", {"stop_token_ids": [600]}, "stop_token_ids 600 is not in the vocabulary"),
        ("x", {"logit_bias": {600: 1.0}}, "logit_bias 600 is not in the vocabulary"),
        ("x", {"n": 10**9}, "n must be at most 16384, not 1000000000: ask again for more"),
        ("x", {"stop": ""}, "stop strings must be non-empty text"),
        ("x", {"stop": 5}, "stop must be text or a list of texts, not 5"),
        ("x", {"stop_token_ids": 5}, "stop_token_ids must be a list, not 5"),
        ("x", {"logit_bias": [1]}, "logit_bias maps token ids to numbers"),
        ("x", {"top_logprobs": 2}, "top_logprobs needs logprobs=True"),
        (b"bytes", {}, "a prompt is a text or a list of token ids"),
        ([np.array([1, 2])], {}, "a prompt is a text or a list of token ids"),
        (["a", None], {}, "a prompt is a text or a list of token ids"),
        ([1.5], {}, "a prompt is a text or a list of token ids"),
        ([1, True], {}, "a prompt is a text or a list of token ids"),
        ([[[1]]], {}, "a prompt is a text or a list of token ids"),
        (bytearray(b"bytes"), {}, "a prompt is a text or a list of token ids"),
        (7, {}, "a prompt is a text or a list of token ids"),
        ([{"role": "user", "content": "x"}], {}, "`chat` and `stream` take messages"),
    ],
)
def test_what_cannot_be_served_is_refused_in_plain_words(
    llm: fastgraph.LLM, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, **options)


def test_a_refused_prompt_leaves_nothing_behind_and_a_stream_is_one_answer(llm: fastgraph.LLM) -> None:
    with pytest.raises(RequestError, match="the prompt has 64 tokens"):
        llm.generate(["fine", [5] * 64], max_tokens=40)
    with pytest.raises(RequestError, match="n must be 1"):
        llm.stream("x", n=2)
    stats = llm.stats()
    while stats["running"] or stats["waiting"]:
        stats = llm.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


@pytest.mark.parametrize("wrong", [b"bytes", [1.5], [True], [[1]], ["a"], None, 5])
def test_what_is_neither_prompt_nor_conversation_is_no_stream(llm: fastgraph.LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids; `chat` and `stream` take mess"):
        llm.stream(wrong)


def test_what_is_no_request_cannot_be_aborted(llm: fastgraph.LLM) -> None:
    for wrong in ([1], "1", 1.5):
        with pytest.raises(RequestError, match="abort takes a Stream or its request_id"):
            llm.abort(wrong)  # type: ignore[arg-type]
    llm.abort(np.int64(10**9))  # type: ignore[arg-type]


def test_unknown_and_impossible_options_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"unknown option max_len; known are: .*max_model_len"):
        fastgraph.load_model(max_len=5)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        fastgraph.load_model(dtype="int3")
    with pytest.raises(ConfigError, match="kv_pages must be a whole number from 1 up"):
        fastgraph.load_model(kv_pages=0)
    with pytest.raises(ConfigError, match="max_model_len must be a whole number from 2 up, not 1"):
        fastgraph.load_model(max_model_len=1)
    for name in ("page_size", "max_step_tokens", "multi_step"):
        with pytest.raises(ConfigError, match=rf"{name} must be below 2\*\*31, not 2147483648"):
            fastgraph.load_model(**{name: 2**31})
    with pytest.raises(ConfigError, match="in_flight_depth must be 64 at most, not 65"):
        fastgraph.load_model(in_flight_depth=65)
    with pytest.raises(ConfigError, match="model is empty: name a folder"):
        fastgraph.load_model("")
    with pytest.raises(ConfigError, match="chat_template must be text, not PosixPath"):
        fastgraph.load_model(chat_template=Path("template.jinja"))
    with pytest.raises(ConfigError, match="a policy is a function of a request, and not 3"):
        fastgraph.load_model(policy=3)
    with pytest.raises(ConfigError, match="the model is the first argument"):
        fastgraph.load_model(model="somewhere")
    for nowhere in ("/", "x" * 300):
        with pytest.raises(ConfigError, match=f"the trace {nowhere} cannot be written: "):
            fastgraph.load_model(trace=nowhere)
    with pytest.raises(ConfigError, match=r"kv_pages take .* more than this machine has"):
        fastgraph.load_model(kv_pages=10**9)
    with pytest.raises(ConfigError, match=r"max_model_len 99 does not fit: .* 65 tokens at most.* or for 7 kv_pages"):
        fastgraph.load_model(kv_pages=4, page_size=16, max_model_len=99)
    with pytest.raises(ModelError, match="it has no revision nowhere"):
        fastgraph.load_model(revision="nowhere")
    with pytest.raises(ConfigError, match="prefix_cache must be True or False, not 'no'"):
        fastgraph.load_model(prefix_cache="no")
    for nowhere in ("./nowhere.gguf", Path("nowhere.gguf"), "~nobody-here/model", "x" * 300 + ".gguf"):
        with pytest.raises(ModelError, match="there is no folder or file"):
            fastgraph.load_model(nowhere)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_models_file_that_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        fastgraph.load_model(tmp_path)


def test_a_chat_templates_bos_is_the_only_one(load_tiny: Callable[..., fastgraph.LLM]) -> None:
    with load_tiny("chat") as llm:
        bos = llm.tokenizer.bos_id
        assert llm.tokenizer.encode("kalo").count(bos) == 1  # which a text without a template does need
        rendered = llm.render([{"role": "user", "content": "kalo"}])
        assert rendered[0] == bos
        assert rendered.count(bos) == 1
        assert llm.chat([{"role": "user", "content": "kalo"}], max_tokens=2).prompt_tokens == len(rendered)


def test_old_thoughts_leave_the_history_as_the_models_own_template_has_it(
    load_tiny: Callable[..., fastgraph.LLM],
) -> None:
    template = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] if not loop.last else m.content }}{% endfor %}"
    )
    with load_tiny("plain", chat_template=template) as llm:
        history = [
            {"role": "user", "content": "kalo"},
            {"role": "assistant", "content": "<think>miren</think>staver"},
            {"role": "user", "content": "</think>un"},
        ]
        assert llm.tokenizer is not None
        assert llm.render(history) == llm.tokenizer.encode("kalostaver</think>un", add_special_tokens=False)


def test_what_a_chat_template_does_not_read_is_an_error(load_tiny: Callable[..., fastgraph.LLM]) -> None:
    with load_tiny("plain", chat_template="{{ mood }}{{ messages[0].content }}") as llm:
        ask = [{"role": "user", "content": "kalo"}]
        assert llm.render(ask, template_variables={"mood": "staver"}) != llm.render(ask)
        with pytest.raises(RequestError, match="knows no tools, enable_thinking"):
            llm.render(ask, tools=[{"type": "function"}], template_variables={"enable_thinking": True})
        with pytest.raises(RequestError, match="messages cannot be among the template_variables"):
            llm.chat(ask, template_variables={"messages": 1})
        for wrong in (5, {5: 1}, ["mood"]):
            with pytest.raises(RequestError, match="template_variables maps names to values, and is not "):
                llm.render(ask, template_variables=wrong)  # type: ignore[arg-type]
        for messages in ([], {"role": "user", "content": "kalo"}):
            with pytest.raises(RequestError, match="a chat needs a list of messages"):
                llm.stream(messages)  # type: ignore[arg-type]


def test_without_a_chat_template_the_error_names_the_option(load_tiny: Callable[..., fastgraph.LLM]) -> None:
    with load_tiny("plain") as llm:
        with pytest.raises(RequestError, match=r"has no chat template.*--chat-template"):
            llm.chat([{"role": "user", "content": "kalo"}])
        assert len(llm.generate("kalo", max_tokens=2).token_ids) <= 2
    with load_tiny("plain", chat_template="{{ messages[0].content }}") as llm:
        assert llm.render([{"role": "user", "content": "kalo"}]) == llm.tokenizer.encode("kalo")[1:]


def test_an_empty_prompt_without_a_bos_is_refused(
    load_tiny: Callable[..., fastgraph.LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_tiny("plain") as llm:
        monkeypatch.setattr(llm.tokenizer, "bos_id", None)
        with pytest.raises(RequestError, match=r"the prompt \(number 1\) is empty, and the model has no BOS token"):
            llm.generate(["kalo", []])
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.generate([[]])


def test_after_close_every_call_says_so(load_tiny: Callable[..., fastgraph.LLM]) -> None:
    llm = load_tiny("plain")
    stream = llm.stream("kalo", max_tokens=2)
    assert stream.completion.finish_reason in ("length", "stop")
    llm.close()
    llm.close()
    for call in (llm.stats, lambda: llm.generate("kalo"), lambda: llm.stream("kalo")):
        with pytest.raises(EngineDied, match="the engine was closed"):
            call()
    llm.abort()
    stream.abort()


def test_close_frees_the_pages_at_once(
    load_tiny: Callable[..., fastgraph.LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine needs the memory, and the garbage collector may not come by before it."""
    pages: list[weakref.ref[torch.Tensor]] = []

    def allocate(*sizes: Any, real: Callable[..., Any] = builder._caches) -> Any:
        caches = real(*sizes)
        pages.extend(weakref.ref(cache.k) for cache in caches)
        return caches

    monkeypatch.setattr(builder, "_caches", allocate)
    llm = load_tiny("plain")
    assert any(page() is not None for page in pages)
    gc.disable()
    try:
        llm.close()
        assert all(page() is None for page in pages)
    finally:
        gc.enable()
