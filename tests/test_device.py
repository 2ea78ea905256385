"""The execution plane against transformers, on a tiny model: modes, batch sizes, chunks; and the paths into a step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from driver import Careless
from hypothesis import given
from hypothesis import strategies as st

from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.control.plan import NULL_SLOT, Admission, Limits, PrefillSpan, StepPlan
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request
from fastgraph.device import builder
from fastgraph.device.builder import build_device
from fastgraph.device.handle import DeviceHandle
from fastgraph.device.ladder import CaptureLadder, rungs, token_rungs
from fastgraph.device.metadata import StepInputs, StepMetadata, rows_of
from fastgraph.device.slots import Slots
from fastgraph.errors import ConfigError, FastgraphWarning
from fastgraph.kernels.sampling import SamplerOutput
from fastgraph.kernels.slots import FROM_SLOT
from fastgraph.loading.checkpoint import open_checkpoint

CPU = torch.device("cpu")
PROMPTS = [[5], [7, 8, 9], list(range(3, 40)), [11] * 20, list(range(90, 60, -1)), [50, 51]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny random Llama of transformers, and the folder it was saved to."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    return model, folder


def silent(phase: str, fraction: float | None) -> None:
    pass


def build(folder: Path, progress: Any = silent, **options: Any) -> DeviceHandle:
    defaults: dict[str, Any] = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_decode_bs": 6}
    config = EngineConfig(model=str(folder), **{"kv_pages": 200, **defaults, **options})
    checkpoint = open_checkpoint(EngineConfig(str(folder)), "float32", silent)
    return build_device(config, checkpoint, CPU, None, progress)


def serve(
    device: DeviceHandle, prompts: list[list[int]], tokens: int, careless: bool = False, **sampling: Any
) -> list[list[int]]:
    """Drive a device with a scheduler, a step at a time."""
    scheduler = Scheduler(device.limits)
    if careless:
        scheduler.forecast = Careless()
    for number, prompt in enumerate(prompts, start=1):
        scheduler.submit(request_of(number, prompt, tokens, **sampling))
    answers = {}
    while plan := scheduler.plan():
        for output in scheduler.land(plan, device.execute(plan).result()):
            answers[output.request_id] = output.token_ids.tolist()
    assert not careless or scheduler.preemptions
    return [answers[number] for number in range(1, len(prompts) + 1)]


def request_of(number: int, prompt: list[int], tokens: int, incremental: bool = False, **sampling: Any) -> Request:
    params = SamplingParams(max_tokens=tokens, **sampling)
    return Request(number, np.array(prompt, np.int32), params, 77, (), len(prompt) + tokens, incremental)


def expected(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("mode", ["off", "regional", "full"])
def test_greedy_tokens_equal_transformers_in_every_compile_mode(reference: tuple[Any, Path], mode: str) -> None:
    model, folder = reference
    device = build(folder, compile=mode)
    assert serve(device, PROMPTS, 12) == expected(model, PROMPTS, 12)
    # One at a time, and in batches of every size from 1 to the top: nothing compiles.
    for count in (1, 2, 3, 5, 6):
        assert serve(device, PROMPTS[:count], 5) == expected(model, PROMPTS[:count], 5)
    assert device.counters() == {"recompiles": 0, "eager_steps": 0, "kernel_builds": 0, "padding_tokens": 0}


def test_with_the_options_of_a_fast_start_nothing_is_compiled_measured_or_captured(
    reference: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/python-api.md lists them. On a CPU they leave nothing to capture either way."""

    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("it was to be left out")

    for name in ("torch.compile", "fastgraph.device.builder.tune", "fastgraph.device.executor.Recorder"):
        monkeypatch.setattr(name, fail)
    told: list[str] = []
    device = build(
        reference[1],
        lambda phase, fraction: told.append(phase),
        **{"compile": "off", "max_capture_bs": 0, "max_capture_tokens": 0, "autotune": False},
    )
    assert list(dict.fromkeys(told)) == ["loading weights", "warming up", "reserving memory for keys and values"]
    assert serve(device, PROMPTS[:1], 3) == expected(reference[0], PROMPTS[:1], 3)


@pytest.mark.parametrize("budget", [10, 11, 17, 64])
def test_chunked_prompts_ride_with_decode_and_change_no_token(reference: tuple[Any, Path], budget: int) -> None:
    model, folder = reference
    device = build(folder, compile="off", max_step_tokens=budget)
    assert serve(device, PROMPTS, 12) == expected(model, PROMPTS, 12)


def test_preempted_requests_end_as_if_nothing_had_happened(reference: tuple[Any, Path]) -> None:
    model, folder = reference
    device = build(folder, compile="off", kv_pages=16)
    assert serve(device, PROMPTS, 20, careless=True) == expected(model, PROMPTS, 20)


def test_one_slot_is_enough(reference: tuple[Any, Path]) -> None:
    model, folder = reference
    assert serve(build(folder, compile="off", max_decode_bs=1), PROMPTS, 5) == expected(model, PROMPTS, 5)


def test_a_seeded_answer_is_the_same_alone_beside_others_and_after_preemption(reference: tuple[Any, Path]) -> None:
    _, folder = reference
    sampling = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.7, "repetition_penalty": 1.2}
    roomy, tight = build(folder, compile="off"), build(folder, compile="off", kv_pages=16)
    together = serve(roomy, PROMPTS, 20, **sampling)
    assert [serve(roomy, [prompt], 20, **sampling)[0] for prompt in PROMPTS] == together
    assert serve(tight, PROMPTS, 20, careless=True, **sampling) == together


def test_a_step_that_would_compile_runs_eagerly_is_counted_and_said_once(reference: tuple[Any, Path]) -> None:
    _, folder = reference
    device = build(folder, compile="regional")
    before = serve(device, PROMPTS[:2], 6)
    device._executor._step._model.layers[0].mlp.norm.eps += 1e-12  # there is no graph for this
    with pytest.warns(FastgraphWarning, match="would have compiled"):
        assert serve(device, PROMPTS[:2], 6) == before
    counters = device.counters()
    assert counters["recompiles"] == counters["eager_steps"] > 1


def test_vocabulary_padding_is_never_sampled(reference: tuple[Any, Path]) -> None:
    _, folder = reference
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", compile="off", kv_pages=50)
    checkpoint = open_checkpoint(EngineConfig(str(folder)), "float32", lambda phase, fraction: None)
    device = build_device(config, checkpoint, CPU, 40, lambda phase, fraction: None)
    answers = serve(device, [[1, 2, 3]] * 8, 30, temperature=5.0)
    assert max(token for answer in answers for token in answer) < 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4096}, "above what the model was made for, 128"),
        ({"max_step_tokens": 9}, "at least max_decode_bs \\+ page_size = 10"),
        ({"host_kv_gb": 1e10}, "host_kv_gb 1e\\+10 is more than this machine has"),
        ({"max_capture_bs": 7}, "CUDA graphs, and this is a CPU"),
        ({"max_capture_tokens": 7}, "CUDA graphs, and this is a CPU"),
    ],
)
def test_options_that_cannot_work_are_refused(
    reference: tuple[Any, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(reference[1], compile="off", **options)


def test_page_tables_have_no_more_numbers_than_an_int32_counts(
    reference: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_host_memory", lambda: 2**60)
    with pytest.raises(ConfigError, match="max_decode_bs 16777216 times max_model_len 128 is more than page tables"):
        build(reference[1], compile="off", page_size=1, max_decode_bs=2**24)


def test_cuda_without_a_gpu_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgraph.device.builder import settle_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        settle_device(EngineConfig(device="cuda"))
    assert settle_device(EngineConfig()) == CPU


LIMITS = Limits(slots=4, pages=20, page_size=4, max_model_len=32, max_step_tokens=16, vocab=96)


def test_padding_tokens_of_a_decode_step_point_at_the_null_slot() -> None:
    metadata = StepMetadata(LIMITS, CPU)
    metadata.refresh_decode_metadata(4, 4, np.array([4, 3, 2, 1], np.int32), for_graph_replay=True)
    inputs = metadata.refresh_decode_metadata(4, 2, np.array([3, 1], np.int32), for_graph_replay=True)
    for rows in (inputs.slots, inputs.sampling_slots, inputs.token_slots):
        assert rows.tolist() == [3, 1, NULL_SLOT, NULL_SLOT]
    assert inputs.ids.tolist() == [FROM_SLOT] * 4
    assert inputs.query_start.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError):
        metadata.refresh_decode_metadata(4, 2, np.array([3, 1], np.int32), for_graph_replay=False)


def test_replays_read_the_buffers_that_capture_saw() -> None:
    metadata = StepMetadata(LIMITS, CPU)
    captured = metadata.refresh_decode_metadata(2, 0, np.empty(0, np.int32), for_graph_replay=True)
    assert captured.slots.tolist() == [NULL_SLOT, NULL_SLOT]
    metadata.refresh_decode_metadata(2, 2, np.array([2, 4], np.int32), for_graph_replay=True)
    assert captured.slots.tolist() == [2, 4]


def test_a_mixed_step_lists_decode_rows_first_and_samples_only_where_a_prompt_ends() -> None:
    spans = (
        PrefillSpan(slot=2, start=4, ids=np.array([21, 22, 23], np.int32), samples=False),
        PrefillSpan(slot=4, start=0, ids=np.array([31], np.int32), samples=True),
    )
    plan = StepPlan(1, (), np.empty((0, 3), np.int32), np.array([1, 3], np.int32), spans)
    inputs = StepMetadata(LIMITS, CPU).refresh_mixed_metadata(plan)
    assert inputs.ids.tolist() == [FROM_SLOT, FROM_SLOT, 21, 22, 23, 31]
    assert inputs.offsets.tolist() == [0, 0, 0, 1, 2, 0]
    assert inputs.token_slots.tolist() == [1, 3, 2, 2, 2, 4]
    assert inputs.slots.tolist() == [1, 3, 2, 4]
    assert inputs.sampling_slots.tolist() == [1, 3, NULL_SLOT, 4]
    assert inputs.query_start.tolist() == [0, 1, 2, 5, 6]
    assert inputs.last.tolist() == [0, 1, 4, 5]
    assert inputs.query_lengths.tolist() == [1, 1, 3, 1]
    assert plan.sampling_slots.tolist() == [1, 3, 4]


def test_a_slots_new_tenant_finds_nothing_of_the_last_one() -> None:
    slots = Slots(LIMITS, 100, CPU)
    first = SamplingParams(
        temperature=0.5, top_k=9, logit_bias={3: 4.0, 5: -1.0}, frequency_penalty=0.5, logprobs=True, top_logprobs=3
    )
    second = SamplingParams(frequency_penalty=0.25, min_tokens=2)
    seed = (7 << 32) + (1 << 31) + 5
    prompt, answer = np.array([8, 9, 8], np.int32), np.array([30, 31, 30], np.int32)
    writes = np.array([[2, 0, 11], [2, 1, 12]], np.int32)
    slots.apply(StepPlan(1, (Admission(2, first, seed, (1, 2), prompt, answer, 4),), writes, *_nothing()))
    sampler = slots.state.sampler
    assert sampler.temperature[2] == 0.5
    assert sampler.top_k[2] == 9
    assert sampler.seed[2].tolist() == [-(1 << 31) + 5, 7]
    assert sampler.generated[2] == 3
    assert slots.state.lengths[2] == 4
    assert sampler.stop_ids[2, :3].tolist() == [1, 2, -1]
    assert sampler.bias_ids[2, :3].tolist() == [3, 5, -1]
    assert sampler.bias_values[2, :2].tolist() == [4.0, -1.0]
    assert sampler.output_counts[2].nonzero()[:, 0].tolist() == [30, 31]
    assert sampler.output_counts[2, 30] == 2
    assert sampler.prompt_tokens[2].nonzero()[:, 0].tolist() == [8, 9]
    assert slots.state.page_table[2, :3].tolist() == [11, 12, 0]
    assert slots.wants_logprobs[2]

    slots.apply(StepPlan(2, (Admission(2, second, 1, (), answer, answer[:0], 0),), writes[:0], *_nothing()))
    assert sampler.temperature[2] == 0
    assert sampler.stop_ids[2].unique().tolist() == [-1]
    assert sampler.bias_ids[2].unique().tolist() == [-1]
    assert not sampler.output_counts[2].any()
    assert sampler.prompt_tokens[2].nonzero()[:, 0].tolist() == [30, 31]
    assert sampler.min_tokens[2] == 2
    assert slots.state.lengths[2] == 0
    assert not slots.wants_logprobs[2]
    # And the null slot stays as it was made.
    assert slots.state.lengths[NULL_SLOT] == 0
    assert not slots.state.page_table[NULL_SLOT].any()


def test_numbers_that_no_column_holds_mean_the_nearest_that_it_does(reference: tuple[Any, Path]) -> None:
    device = build(reference[1], compile="off")
    alone = serve(device, [[1, 2, 3]], 4, temperature=1.0, top_k=1)
    assert serve(device, [[1, 2, 3]], 4, temperature=1.0, top_p=1e-60) == alone  # 0 in float32
    slots = Slots(LIMITS, 100, CPU)
    admission = Admission(2, SamplingParams(min_tokens=2**40), 1, (), np.ones(1, np.int32), np.empty(0, np.int32), 0)
    slots.apply(StepPlan(1, (admission,), np.empty((0, 3), np.int32), *_nothing()))
    assert slots.state.sampler.min_tokens[2] == 2**31 - 1


def _nothing() -> tuple[np.ndarray, tuple[()]]:
    return np.empty(0, np.int32), ()


def test_padding_tokens_write_nothing_that_a_request_reads(reference: tuple[Any, Path]) -> None:
    device = build(reference[1], compile="off")
    serve(device, PROMPTS, 5, temperature=0.5, presence_penalty=0.5)
    executor = device._executor
    state = executor._slots.state
    tables = [*state[:-1], *state.sampler]
    parts = [part for cache in executor._step.caches for part in cache]
    before = [table.clone() for table in tables], [part.clone() for part in parts]
    with torch.inference_mode():
        executor._step(executor._padding(6))
        executor.warm_up()
    for table, was in zip(tables, before[0], strict=True):
        live = [row for row in range(len(was)) if row != NULL_SLOT]
        assert torch.equal(table[live], was[live])
    for part, was in zip(parts, before[1], strict=True):
        assert torch.equal(part[1:].nan_to_num(), was[1:].nan_to_num())
    assert state.lengths[NULL_SLOT] == 0


@pytest.mark.parametrize("budget", [10, 17, 64])
def test_steps_with_prompts_that_are_padded_for_a_graph_give_the_same_tokens(
    reference: tuple[Any, Path], budget: int
) -> None:
    """In a pool full of NaN, where whatever padding reads or writes by mistake would show."""
    model, folder = reference
    device = build(folder, compile="off", max_step_tokens=budget)
    executor, padded = device._executor, []

    class Ladder(CaptureLadder):
        """Runs what a graph would replay: the inputs as they were recorded, with what their buffers hold now."""

        def replay(self, size: int) -> SamplerOutput:
            padded.append(size)
            return executor._step(recorded[size])

    sizes = token_rungs(budget, device.limits.slots)
    recorded = {size: executor._mixed_padding(size) for size in sizes}
    executor._mixed_ladder = Ladder(sizes, executor._mixed_padding)
    for part in (part for cache in executor._step.caches for part in cache):
        part[1:] = torch.nan
    assert serve(device, PROMPTS, 5) == expected(model, PROMPTS, 5)
    assert set(padded) <= set(sizes)
    assert bool(padded) == bool(sizes)
    assert (device.counters()["padding_tokens"] > 0) == bool(sizes)


def test_rungs_of_tokens_leave_out_what_would_look_like_a_decode_step() -> None:
    assert token_rungs(100, 256) == [16, 24, 32, 48, 64, 96]
    assert token_rungs(64, 47) == [16, 24, 32, 64]
    assert token_rungs(15, 4) == []
    for slots in range(1, 70):
        assert all(rows_of(size, slots) != size for size in token_rungs(4096, slots))


def test_capturing_says_what_it_is_about_to_do(reference: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Recorder:
        """Records nothing; a CPU cannot."""

        def __init__(self, step: Any) -> None:
            pass

        def record(self, inputs: StepInputs) -> None:
            told.append(len(inputs.slots))

    device = build(reference[1], compile="off")
    executor = device._executor
    monkeypatch.setattr("fastgraph.device.executor.Recorder", Recorder)
    executor._decode_ladder = CaptureLadder([1, 2, 4], executor._padding)
    executor._mixed_ladder = CaptureLadder([16, 24], executor._mixed_padding)
    executor.capture(lambda *phase: told.append(phase))
    mixed, decode = "capturing CUDA graphs of steps with prompts", "capturing CUDA graphs of decode steps"
    phases = [entry for entry in told if isinstance(entry, tuple)]
    assert phases == [(mixed, 0), (mixed, 1 / 2), (decode, 0), (decode, 1 / 3), (decode, 2 / 3)]
    assert [isinstance(entry, tuple) for entry in told] == [True, False] * 5
    assert told[5::2] == [4, 2, 1]


def test_above_the_ladder_steps_run_eagerly_are_counted_and_said_once(reference: tuple[Any, Path]) -> None:
    model, folder = reference
    device = build(folder, compile="off")
    executor, refresh = device._executor, device._executor._metadata.refresh_decode_metadata
    refreshed, replayed = [], []

    def record(*args: Any, **kwargs: Any) -> StepInputs:
        refreshed.append(refresh(*args, **kwargs))
        return refreshed[-1]

    class Ladder(CaptureLadder):
        """Runs what a graph would replay."""

        def replay(self, size: int) -> SamplerOutput:
            assert len(refreshed[-1].slots) == size
            replayed.append(size)
            return executor._step(refreshed[-1])

    executor._metadata.refresh_decode_metadata = record  # type: ignore[method-assign]
    executor._decode_ladder = Ladder(rungs(4), executor._padding)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert serve(device, PROMPTS, 5) == expected(model, PROMPTS, 5)
        eager = device.counters()["eager_steps"]
        assert eager > 1
        assert serve(device, PROMPTS[:3], 5) == expected(model, PROMPTS[:3], 5)
    assert set(replayed) == {4}
    assert device.counters()["padding_tokens"] == len(replayed)
    assert device.counters()["eager_steps"] == eager
    assert [str(w.message) for w in said if w.category is FastgraphWarning] == [
        "6 requests decode at once, above the 4 that CUDA graphs were captured for: such steps are slower. "
        "max_capture_bs raises the limit"
    ]


@given(st.data())
def test_a_plans_tokens_are_looked_for_where_its_steps_put_them(data: st.DataObject) -> None:
    """Against the rule itself: number i of an answer stands in row i % multi_step of the slot's column."""
    slots, ring = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    tables = Slots(Limits(slots, 9, 4, 32, 64, 50, multi_step=ring), 50, CPU)
    generated: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 12))):
        rows = sorted(data.draw(st.sets(st.sampled_from(range(1, slots + 1)), min_size=1)))
        for slot in rows:
            if slot not in generated or data.draw(st.booleans()):  # a new tenant, who may have answered in part before
                generated[slot] = data.draw(st.integers(0, 20))
                answer = np.zeros(generated[slot], np.int32)
                nothing = np.empty(0, np.int32)
                admission = Admission(slot, SamplingParams(), 0, (), np.zeros(3, np.int32), answer, 0)
                tables.apply(StepPlan(number, (admission,), np.empty((0, 3), np.int32), nothing, ()))
        repeats = data.draw(st.integers(1, ring))
        plan = StepPlan(number, (), np.empty((0, 3), np.int32), np.array(rows, np.int32), (), repeats=repeats)
        places = tables.advance(plan)
        where = [((generated[slot] + step) % ring, slot) for step in range(repeats) for slot in rows]
        recent = tables.state.recent
        marked = np.arange(recent.numel())
        assert places.max() < 2 * recent.numel()  # numpy wraps by subtracting, over and over
        assert marked.take(places, mode="wrap").tolist() == [row * recent.shape[1] + slot for row, slot in where]
        for slot in rows:
            generated[slot] += repeats
