"""The default model by its Python API, in float32: transformers' text, however the requests are mixed, cut and stopped.

Requests are asked together wherever that changes nothing, since a batch takes little longer than one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from driver import Careless
from loading_helpers import default_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastgraph
from fastgraph import Completion

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village at the foot of the mountains, there lived an old clockmaker who had never "
    "been late in his life. One winter's morning every clock in his shop stopped at once, and he",
    "1, 2, 3, 4,",
    "Water",
]
SHORT = 20  # tokens, where 64 would show no more
SMALL = {"dtype": "float32", "compile": "off", "device": "cpu", "max_model_len": 256}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other take many times longer than one alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(one_thread: None) -> Iterator[fastgraph.LLM]:
    with fastgraph.load_model(**SMALL, max_decode_bs=16) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own loading of the same file."""
    path = default_gguf()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.fixture(scope="module")
def answers(llm: fastgraph.LLM) -> list[Completion]:
    """Greedy, all prompts in one batch, with log-probabilities."""
    return llm.generate(PROMPTS, max_tokens=64, logprobs=True, top_logprobs=3)


@torch.inference_mode()
def raw_logits(reference: Any, llm: fastgraph.LLM, prompt: str, answer: Completion) -> torch.Tensor:
    """transformers' logits from which each token of an answer was chosen. [tokens, vocab]"""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(prompt)
    logits: torch.Tensor = reference(torch.tensor([ids + answer.token_ids])).logits[0]
    return logits[len(ids) - 1 : -1]


def together(llm: fastgraph.LLM, requests: Sequence[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """Each request in a thread of its own, all at once."""
    results: list[Any] = [None] * len(requests)

    def ask(number: int) -> None:
        prompt, options = requests[number]
        results[number] = llm.generate(prompt, **{"max_tokens": SHORT, **options})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


# --- the same tokens, whatever happens ---


def test_greedy_tokens_equal_transformers_generate(
    llm: fastgraph.LLM, reference: Any, answers: list[Completion]
) -> None:
    path = default_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    made = reference.generate(**batch, max_new_tokens=64, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert len(answers) == len(PROMPTS)
    for answer, row, prompt in zip(answers, made[:, batch["input_ids"].shape[1] :].tolist(), PROMPTS, strict=True):
        expected = row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row
        assert answer.token_ids == expected
        assert answer.text == tokenizer.decode(expected, skip_special_tokens=True) == str(answer)
        assert answer.finish_reason == ("length" if len(expected) == 64 else "stop")
        assert answer.prompt_tokens == len(tokenizer(prompt)["input_ids"])
        assert answer.cached_tokens == 0
        assert 0 < answer.timing.queued <= answer.timing.ttft < answer.timing.total


def test_log_probabilities_equal_transformers(llm: fastgraph.LLM, reference: Any, answers: list[Completion]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = raw_logits(reference, llm, prompt, answer).log_softmax(-1)
        assert answer.logprobs is not None
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        chosen = torch.tensor([entry.logprob for entry in answer.logprobs])
        torch.testing.assert_close(
            chosen, expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0], atol=1e-3, rtol=0
        )
        values, likeliest = expected.topk(3)
        listed = torch.tensor([list(entry.top) for entry in answer.logprobs])
        ties = (values[:, :-1] - values[:, 1:]).amin(1) < 1e-3
        assert torch.equal(listed[~ties], likeliest[~ties])
        tops = torch.tensor([list(entry.top.values()) for entry in answer.logprobs])
        torch.testing.assert_close(tops, values, atol=1e-3, rtol=0)


def test_one_by_one_and_by_threads_give_what_the_batch_gave(llm: fastgraph.LLM, answers: list[Completion]) -> None:
    expected = [answer.token_ids[:SHORT] for answer in answers]
    alone = [llm.generate(prompt, max_tokens=SHORT).token_ids for prompt in PROMPTS[:2]]
    assert alone == expected[:2]
    assert ids(together(llm, [(prompt, {}) for prompt in PROMPTS])) == expected


def test_chunked_preempted_and_several_steps_in_flight_give_what_the_batch_gave(
    answers: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgraph.control.scheduler.Forecast", Careless)
    tight = {"max_decode_bs": 4, "page_size": 4, "max_step_tokens": 12, "kv_pages": 26, "in_flight_depth": 2}
    with fastgraph.load_model(**{**SMALL, **tight, "max_model_len": None}) as llm:  # it is what the pages hold
        assert len(llm.tokenizer.encode(PROMPTS[2])) > 3 * 12  # type: ignore[union-attr]
        assert ids(llm.generate(PROMPTS, max_tokens=32)) == [answer.token_ids[:32] for answer in answers]
        stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["pages_free"] + stats["pages_cached"] == 26
    assert (stats["recompiles"], stats["eager_steps"]) == (0, 0)


def test_several_decode_steps_at_once_give_what_single_ones_gave(
    llm: fastgraph.LLM, answers: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgraph.control.pace.LONGEST", 1e9)
    monkeypatch.setattr("fastgraph.control.pace.SHORTEST", 1e9)
    penalised = {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": True}
    stop = answers[1].text[10:14]
    asks: list[tuple[str, dict[str, Any]]] = [
        (PROMPTS[0], penalised | {"top_logprobs": 2}),
        (PROMPTS[1], {"stop": stop}),
        (PROMPTS[2], {"max_tokens": 3}),
    ]
    single = together(llm, asks)
    with fastgraph.load_model(**SMALL, multi_step=8, in_flight_depth=1) as multi:
        assert ids(multi.generate(PROMPTS, max_tokens=64)) == ids(answers)
        several = together(multi, asks)
        assert "".join(multi.stream(PROMPTS[1], stop=stop, max_tokens=SHORT)) == single[1].text
    for one, other in zip(single, several, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    assert [entry.token_id for entry in several[0].logprobs] == several[0].token_ids
    assert [entry.logprob for entry in several[0].logprobs] == pytest.approx(
        [entry.logprob for entry in single[0].logprobs], abs=1e-3
    )


def test_a_seed_gives_the_same_text_alone_and_beside_others(llm: fastgraph.LLM, answers: list[Completion]) -> None:
    seeded = {"temperature": 0.9, "seed": 7}
    filters = {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    mixed: list[tuple[str, dict[str, Any]]] = [
        (PROMPTS[0], seeded),
        (PROMPTS[0], {}),
        (PROMPTS[0], {**seeded, "seed": 8}),
        (PROMPTS[2], {"temperature": 1.3}),
        (PROMPTS[1], {**seeded, **filters}),
        (PROMPTS[0], seeded),
        (PROMPTS[4], {"temperature": 0.7, "logit_bias": {5: 3.0}}),
    ]
    first, greedy, other, _, filtered, again, _ = together(llm, mixed)
    assert llm.generate(PROMPTS[0], max_tokens=SHORT, **seeded).token_ids == first.token_ids == again.token_ids
    assert llm.generate(PROMPTS[1], max_tokens=SHORT, **seeded, **filters).token_ids == filtered.token_ids
    assert greedy.token_ids == answers[0].token_ids[:SHORT]  # and its neighbours leave a greedy one greedy
    assert other.token_ids != first.token_ids


def test_seeds_are_random_where_none_is_given(llm: fastgraph.LLM) -> None:
    drawn = llm.generate([PROMPTS[4]] * 4, max_tokens=12, temperature=1.5)
    assert len({tuple(tokens) for tokens in ids(drawn)}) == 4


def test_n_gives_as_many_answers_that_follow_from_the_seed(llm: fastgraph.LLM) -> None:
    options = {"temperature": 1.0, "seed": 3}
    three, two_prompts, one = together(
        llm, [(PROMPTS[0], {**options, "n": 3}), (PROMPTS[:2], {**options, "n": 2}), (PROMPTS[0], options)]
    )
    assert isinstance(three, list)
    assert len(three) == 3
    assert three[0].token_ids == one.token_ids
    assert len({tuple(tokens) for tokens in ids(three)}) == 3
    assert [len(group) for group in two_prompts] == [2, 2]
    assert ids(two_prompts[0]) == ids(three[:2])


# --- where an answer ends ---


def test_stop_strings_cut_the_text_streamed_or_not(llm: fastgraph.LLM, answers: list[Completion]) -> None:
    text = answers[0].text
    half = len(text) // 2
    long, short = text[half : half + 25], text[half - 3 : half]  # the long one spans several tokens
    assert text.index(long) == half
    (at_long, at_short) = together(
        llm, [(PROMPTS[0], {"stop": long, "max_tokens": 64}), (PROMPTS[0], {"stop": [long, short], "max_tokens": 64})]
    )
    for answer, cut in ((at_long, half), (at_short, min(text.index(short), half))):
        assert (answer.text, answer.finish_reason) == (text[:cut], "stop")
        assert answer.token_ids == answers[0].token_ids[: len(answer.token_ids)]
    pieces = list(llm.stream(PROMPTS[0], stop=long, max_tokens=64))
    assert "".join(pieces) == at_long.text
    whole = llm.generate(PROMPTS[0], stop="\N{SNOWMAN}", max_tokens=SHORT)
    assert whole.text == llm.tokenizer.decode(answers[0].token_ids[:SHORT])  # type: ignore[union-attr]
    assert whole.finish_reason == "length"


def test_stop_ids_end_of_text_and_min_tokens(llm: fastgraph.LLM, answers: list[Completion]) -> None:
    greedy = answers[0].token_ids
    at = next(i for i in range(5, SHORT) if greedy.index(greedy[i]) == i)
    end = next(iter(llm.tokenizer.eos_ids))  # type: ignore[union-attr]
    force_end = {"logit_bias": {end: 100.0}}
    stopped, several, delayed, late, exactly, first, ignored, kept = together(
        llm,
        [
            (PROMPTS[0], {"stop_token_ids": [greedy[at]]}),
            (PROMPTS[0], {"stop_token_ids": [greedy[at + 1], greedy[at], 77]}),
            (PROMPTS[0], {"stop_token_ids": [greedy[at]], "min_tokens": at}),
            (PROMPTS[0], {"stop_token_ids": [greedy[at]], "min_tokens": at + 1}),
            (PROMPTS[0], {**force_end, "min_tokens": 6}),
            (PROMPTS[0], force_end),
            (PROMPTS[0], {**force_end, "ignore_eos": True, "max_tokens": 4}),
            (PROMPTS[0], {"stop_token_ids": [greedy[at]], "ignore_eos": True}),
        ],
    )
    for answer in (stopped, several, delayed, kept):
        assert (answer.token_ids, answer.finish_reason) == (greedy[:at], "stop")
    assert late.token_ids[:at] == greedy[:at]
    assert len(late.token_ids) > at
    assert late.token_ids[at] != greedy[at]
    assert (exactly.token_ids, exactly.finish_reason) == (greedy[:6], "stop")
    assert (first.token_ids, first.text, first.finish_reason) == ([], "", "stop")
    assert (ignored.token_ids, ignored.finish_reason) == ([end] * 4, "length")


def test_the_context_ends_an_answer_that_names_no_max_tokens(llm: fastgraph.LLM) -> None:
    prompt = [5] * 250
    unlimited, default = together(
        llm, [(prompt, {"max_tokens": None, "ignore_eos": True}), (prompt, {"max_tokens": 6, "ignore_eos": True})]
    )
    assert len(unlimited.token_ids) == len(default.token_ids) == 256 - 250
    assert unlimited.finish_reason == "length"
    assert len(llm.generate(prompt, ignore_eos=True).token_ids) == 6


def test_bias_and_penalties_by_transformers_logits(llm: fastgraph.LLM, reference: Any) -> None:
    repetition = {"repetition_penalty": 1.3}
    counted = {"presence_penalty": 0.7, "frequency_penalty": 0.9}
    prompt = PROMPTS[3]
    biased, banned, repeated, penalised = together(
        llm,
        [
            (prompt, {"logit_bias": {1000: 100.0}, "max_tokens": 3}),
            (prompt, {"logit_bias": {llm.tokenizer.encode(" ")[0]: -100.0}}),  # type: ignore[union-attr]
            (prompt, repetition),
            (prompt, counted),
        ],
    )
    assert biased.token_ids == [1000] * 3
    assert llm.tokenizer.encode(" ")[0] not in banned.token_ids  # type: ignore[union-attr]
    prompt_ids = llm.tokenizer.encode(prompt)  # type: ignore[union-attr]
    for answer, options in ((repeated, repetition), (penalised, counted)):
        for index, raw in enumerate(raw_logits(reference, llm, prompt, answer)):
            expected = penalise(raw, prompt_ids, answer.token_ids[:index], **options)
            assert expected.argmax() == answer.token_ids[index]


def penalise(
    raw: torch.Tensor,
    prompt: Sequence[int],
    said: Sequence[int],
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> torch.Tensor:
    """One row of logits, token by token. [vocab]"""
    logits = raw.clone()
    for token in {*prompt, *said}:
        value = logits[token]
        logits[token] = value / repetition_penalty if value > 0 else value * repetition_penalty
    for token in set(said):
        logits[token] -= presence_penalty + frequency_penalty * said.count(token)
    return logits


# --- as it comes ---


def test_streams_of_text_and_of_messages_join_to_the_answer(llm: fastgraph.LLM, answers: list[Completion]) -> None:
    stream = llm.stream(PROMPTS[1], max_tokens=SHORT)
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == stream.completion.text
    assert stream.completion.token_ids == answers[1].token_ids[:SHORT]
    messages = [{"role": "user", "content": "Say hello."}]
    spoken = llm.stream(messages, max_tokens=SHORT)
    answer = llm.chat(messages, max_tokens=SHORT)
    assert "".join(spoken) == answer.text
    assert answer.prompt_tokens == len(llm.render(messages))
    assert answer.text.startswith("Hello")


def test_characters_of_several_tokens_are_streamed_whole(llm: fastgraph.LLM) -> None:
    emoji = llm.tokenizer.encode("\N{ROLLING ON THE FLOOR LAUGHING}")  # type: ignore[union-attr]
    assert len(emoji) > 1
    forced = {"logit_bias": dict.fromkeys(emoji, 200.0), "frequency_penalty": 2.0, "max_tokens": 12}
    stream = llm.stream("x", **forced)
    pieces = list(stream)
    assert "".join(pieces) == stream.completion.text == llm.generate("x", **forced).text


def test_coroutines_give_what_threads_give(llm: fastgraph.LLM, answers: list[Completion]) -> None:
    async def read(prompt: str) -> str:
        return "".join([piece async for piece in llm.astream(prompt, max_tokens=SHORT)])

    async def all_of_it() -> tuple[list[Any], list[str]]:
        whole = asyncio.gather(*(llm.agenerate(prompt, max_tokens=SHORT) for prompt in PROMPTS[:2]))
        streamed = asyncio.gather(*(read(prompt) for prompt in PROMPTS[3:]))
        return await whole, await streamed

    whole, streamed = asyncio.run(all_of_it())
    assert ids(whole) == [answer.token_ids[:SHORT] for answer in answers[:2]]
    decode = llm.tokenizer.decode  # type: ignore[union-attr]
    assert streamed == [decode(answer.token_ids[:SHORT]) for answer in answers[3:]]


def test_lists_of_prompts_keep_their_order_and_a_bar_may_be_shown(
    llm: fastgraph.LLM, answers: list[Completion], capsys: pytest.CaptureFixture[str]
) -> None:
    assert llm.generate([]) == []
    token_ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]  # type: ignore[union-attr]
    mixed = [PROMPTS[4], token_ids[3], PROMPTS[0], token_ids[1]]
    got = llm.generate(mixed, max_tokens=4, progress=True)
    assert ids(got) == [answers[i].token_ids[:4] for i in (4, 3, 0, 1)]
    assert [answer.prompt_tokens for answer in got] == [len(token_ids[i]) for i in (4, 3, 0, 1)]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "generating" in captured.err
    one = llm.generate(token_ids[4], max_tokens=4)
    assert (one.token_ids, one.logprobs) == (answers[4].token_ids[:4], None)
    assert capsys.readouterr().err == ""


def test_an_empty_prompt_starts_from_bos(llm: fastgraph.LLM) -> None:
    bos = llm.tokenizer.bos_id  # type: ignore[union-attr]
    assert bos is not None
    text, listed, plain = together(
        llm, [("", {"max_tokens": 4}), ([[]], {"max_tokens": 4}), ([bos], {"max_tokens": 4})]
    )
    assert text.token_ids == listed[0].token_ids == plain.token_ids
    assert text.prompt_tokens == 1
