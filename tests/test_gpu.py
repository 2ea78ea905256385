"""The engine on a GPU: what is captured equals what runs eagerly, on every rung and above the ladder."""

from __future__ import annotations

import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from driver import Careless

from fastgraph.bench.steplog import StepLog, Steps
from fastgraph.config import SamplingParams
from fastgraph.device.ladder import rungs
from fastgraph.engine import Ask
from fastgraph.llm import LLM, Completion, load_model

pytestmark = pytest.mark.gpu

ROWS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama whose logits lie far apart."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    place = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(place)
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0")
    tokenizers.Tokenizer(words).save(str(place / "tokenizer.json"))
    return place


def load(folder: Path, **options: Any) -> LLM:
    # Without a prefix cache: `forced` would find the pages that decode has written.
    fixed = {"max_decode_bs": ROWS, "kv_pages": 2000, "dtype": "float32", "prefix_cache": False}
    return load_model(str(folder), **{**fixed, **options})


LENGTHS = (1, 2, 16, 17, 100, 333) * 2
PROMPTS = [[7 + (i * 31 + j * 17) % 500 for j in range(length)] for i, length in enumerate(LENGTHS)]


def answers(llm: LLM, count: int, **sampling: Any) -> list[Completion]:
    options = {"max_tokens": 24, "ignore_eos": True, "progress": False, "logprobs": True, **sampling}
    return llm.generate(PROMPTS[:count], **options)


def forced(llm: LLM, completions: list[Completion]) -> tuple[int, int]:
    """How many tokens, computed again as the end of a longer prompt, come out the same; and how many there are.

    Prefill has kernels and a path of its own: it knows nothing of graphs, padding or splits.
    """
    prompts, wanted = [], []
    for prompt, completion in zip(PROMPTS, completions, strict=False):
        for i, token in enumerate(completion.token_ids):
            prompts.append(prompt + completion.token_ids[:i])
            wanted.append(token)
    again = llm.generate(prompts, max_tokens=1, ignore_eos=True, progress=False)
    return sum(a.token_ids == [w] for a, w in zip(again, wanted, strict=True)), len(wanted)


@pytest.fixture(scope="module")
def captured(folder: Path) -> Any:
    """In float32, where kernels of different shapes agree to the last token: batches form as requests come in."""
    with load(folder) as llm:
        yield llm


@pytest.mark.parametrize("rows", range(1, ROWS + 1))
def test_decode_on_every_rung_gives_what_prefill_gives(captured: LLM, rows: int) -> None:
    same, total = forced(captured, answers(captured, rows))
    assert same == total
    assert captured.stats()["recompiles"] == captured.stats()["eager_steps"] == 0


def test_a_captured_step_equals_an_eager_one_token_by_token(folder: Path, captured: LLM) -> None:
    want = [completion.token_ids for completion in answers(captured, ROWS)]
    with load(folder, compile="off", in_flight_depth=0) as eager:
        assert [completion.token_ids for completion in answers(eager, ROWS)] == want


def test_above_the_ladder_the_same_tokens_come_and_it_is_counted(folder: Path, captured: LLM) -> None:
    want = [completion.token_ids for completion in answers(captured, ROWS)]
    with warnings.catch_warnings(record=True), load(folder, max_capture_bs=4) as small:
        warnings.simplefilter("always")
        assert [completion.token_ids for completion in answers(small, ROWS)] == want
        stats = small.stats()
        assert stats["recompiles"] == 0
        assert stats["eager_steps"] > 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_steps_in_flight_change_no_token(folder: Path, captured: LLM, depth: int) -> None:
    sampling = {"temperature": 0.9, "seed": 5}
    want = [completion.token_ids for completion in answers(captured, ROWS, **sampling)]
    with load(folder, in_flight_depth=depth) as llm:
        assert [completion.token_ids for completion in answers(llm, ROWS, **sampling)] == want


def staggered(llm: LLM, asking: str, stops: dict[int, tuple[int, ...]]) -> list[tuple[list[int], str]]:
    """Answers of all lengths, all submitted at once; `asking` says who wants log-probabilities: none, some or all."""
    asks = []
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(
            max_tokens=10 + 7 * number,
            temperature=(0.0, 0.9)[number % 2],
            min_tokens=(0, 5)[number % 4 < 2],
            logprobs=asking == "all" or (asking == "some" and number % 3 == 0),
        )
        asks.append(Ask(prompt, sampling, 5 + number, stops.get(number, ())))
    found = [ticket.future.result() for ticket in llm.engine.submit_all(asks)]
    for ask, answer in zip(asks, found, strict=True):
        told = None if answer.logprobs is None else [entry.token_id for entry in answer.logprobs]
        assert told == (answer.token_ids if ask.sampling.logprobs else None)
    return [(answer.token_ids, answer.finish_reason) for answer in found]


def test_steps_in_flight_and_together_change_no_token_whoever_asks_for_logprobs(folder: Path, captured: LLM) -> None:
    """Without log-probabilities, a plan's tokens come to the host by another way."""
    with load(folder, in_flight_depth=0, multi_step=1) as one_by_one:
        free = staggered(one_by_one, "all", {})
        # A token from the midst of the answer, or its first, which `min_tokens` may forbid.
        stops: dict[int, tuple[int, ...]] = {number: (free[number][0][number % 8],) for number in range(0, ROWS, 2)}
        want = staggered(one_by_one, "all", stops)
    assert {reason for _, reason in want} == {"stop", "length"}
    for asking in ("none", "some", "all"):
        log = StepLog()
        captured.engine.observe(log)  # two steps in flight, and up to eight together
        assert staggered(captured, asking, stops) == want
        captured.engine.ignore(log)
        assert max(plan.repeats for _, plan, _ in log.steps) > 1


@pytest.mark.parametrize("host_kv_gb", [0, 1])
def test_requests_that_make_room_go_on_where_they_were(
    folder: Path, captured: LLM, monkeypatch: pytest.MonkeyPatch, host_kv_gb: float
) -> None:
    """With pages for a third of them, and nothing that keeps the rest out; their pages are saved, or computed again."""
    sampling = {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5, "max_tokens": 60}
    want = [completion.token_ids for completion in answers(captured, ROWS, **sampling)]
    monkeypatch.setattr("fastgraph.control.scheduler.Forecast", Careless)
    with load(folder, kv_pages=26, host_kv_gb=host_kv_gb) as llm:
        assert [completion.token_ids for completion in answers(llm, ROWS, **sampling)] == want
        assert llm.stats()["preemptions"] > 3


def test_answers_that_share_their_prompt_are_those_that_do_not(folder: Path, captured: LLM) -> None:
    sampling = {"temperature": 0.9, "seed": 5, "n": 6, "max_tokens": 24, "ignore_eos": True}
    want = [completion.token_ids for completion in captured.generate(PROMPTS[5], **sampling)]
    with load(folder, prefix_cache=True) as llm:
        for _ in range(2):
            assert [completion.token_ids for completion in llm.generate(PROMPTS[5], **sampling)] == want
        assert llm.stats()["prefix_hit_tokens"] == 11 * 320


def test_the_device_says_how_long_each_step_took_and_how_much_of_it_was_padding(folder: Path) -> None:
    with load(folder, max_capture_tokens=0) as llm:  # only decode steps are padded
        log, before = StepLog(), llm.stats()["padding_tokens"]
        llm.engine.observe(log)
        began = perf_counter()
        answers(llm, 5)
        llm.engine.ignore(log)
        steps = Steps.of(log)
        assert (steps.busy > 0).all()
        assert steps.busy.sum() <= steps.at[-1] - began  # one follows the other
        decodes = [plan for _, plan, _ in log.steps if not plan.spans]
        graphs = [len(plan.decode_slots) for plan in decodes for _ in range(plan.repeats)]
        assert graphs.count(5) > 10
        padding = sum(next(size for size in rungs(ROWS) if size >= rows) - rows for rows in graphs)
        assert llm.stats()["padding_tokens"] - before == padding
