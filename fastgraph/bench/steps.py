"""What a step costs on the device and on the host: a batch that decodes at a context, and the prefill of a prompt.

The scheduler and the device are the engine's own, driven by hand, so that nothing but steps is measured. Each arm is a
device of its own, built in its own way; all are loaded at once and measured in turn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch

from fastgraph.bench.measure import spare_collector, spread
from fastgraph.bench.roofline import Roofline, seconds_of
from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.control.plan import PendingStep, StepPlan
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request
from fastgraph.device.builder import build_device, settle_compile, settle_depth, settle_multi_step, settle_step_tokens
from fastgraph.errors import ConfigError
from fastgraph.loading.checkpoint import Checkpoint
from fastgraph.loading.files import Progress

# What differs from the engine's own way, which is the last.
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "eager": {"compile": "off", "max_capture_bs": 0},
        "graphs": {"compile": "off"},
        "full+graphs": {"compile": "full"},
        "compile+graphs": {},
    },
    "cpu": {"eager": {"compile": "off"}, "compile": {}},
}
REST = 1.0  # seconds, in which a GPU's clock comes up again
_STEPS = 24  # of one measurement
_PROFILED = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """Of a step, on average: seconds from one to the next on the device, and of the host's work for it."""

    step: float
    host: float | None  # a CPU's host is the device
    context: float  # tokens that it found in the pages of all requests together


def usual_arms(config: EngineConfig, device: torch.device) -> list[str]:
    """All there are, but for what takes minutes to compile, and without a compiler where nothing is compiled anyhow."""
    if device.type == "cuda":
        return ["eager", "graphs", "compile+graphs"]
    return ["eager", "compile"] if settle_compile(config, device) != "off" else ["eager"]


class Arm:
    """One way to run the model, and the batch that decodes on it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, device: torch.device, tell: Progress) -> None:
        self.handle = build_device(config, checkpoint, device, None, tell)
        self._scheduler = Scheduler(self.handle.limits)
        self._depth = settle_depth(config, device)
        self._device = device
        self._random = np.random.default_rng(0)
        self._ids = count(1)
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()

    def fill(self, batch: int, context: int, room: int) -> None:
        """Take in `batch` requests and compute their prompts of `context` tokens; each may get `room` more.

        Those that came first have begun to decode by then.
        """
        self._submit(batch, context, context + room)
        while self._scheduler.queue.head is not None:
            self._advance(1)

    def approach(self, context: int, measurements: int) -> None:
        """Decode until so many measurements lie about the context, half before it and half after. One is made now."""
        before = self._written()
        self.decode()
        half = (self._written() - before) * measurements / 2
        while self._written() + half < context * len(self._scheduler.states):
            self._advance(1)

    def empty(self) -> None:
        while self._in_flight:
            self._land()
        for request_id in list(self._scheduler.states):
            self._scheduler.abort(request_id)

    def decode(self) -> Timing:
        """Run steps of the batch as fast as they go."""
        self._advance(self._depth + 1)
        worked: list[tuple[float, int]] = []
        found = self._written()
        took = seconds_of(lambda: worked.append(self._advance(_STEPS)), self._device)
        ((host, steps),) = worked
        added = (self._written() - found) / steps
        context = found + added * (steps - 1) / 2
        return Timing(took / steps, host / steps if self._device.type == "cuda" else None, context)

    def _written(self) -> int:
        """Tokens in the pages of all requests, once the steps in flight have run."""
        table = self._scheduler.table
        return int(table.scheduled[table.decoding].sum())

    def prefill(self, tokens: int) -> float:
        """Seconds from asking for the first token of a prompt to having it. No prompt is asked for twice."""
        self._submit(1, tokens, tokens + 1)
        began = perf_counter()
        while self._scheduler.states:
            self._advance(1)
            while self._in_flight:
                self._land()
        return perf_counter() - began

    def kernels(self) -> list[tuple[str, float, float]]:
        """(name, times a step, seconds a step) of every kernel, the longest first. A decode step of the batch."""
        activity = torch.profiler.ProfilerActivity
        self._advance(self._depth + 1)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
            _, steps = self._advance(_PROFILED)
            torch.cuda.synchronize()
        times: Counter[str] = Counter()
        seconds: Counter[str] = Counter()
        for event in profile.events() or ():
            if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset")):
                times[event.name] += 1
                seconds[event.name] += event.device_time / 1e6
        return [(name, times[name] / steps, took / steps) for name, took in seconds.most_common()]

    def _submit(self, batch: int, prompt: int, max_length: int) -> None:
        sampling = SamplingParams(ignore_eos=True)
        for _ in range(batch):
            ids = self._random.integers(self.handle.limits.vocab, size=prompt, dtype=np.int32)
            self._scheduler.submit(Request(next(self._ids), ids, sampling, 0, (), max_length, incremental=False))

    def _advance(self, least: int) -> tuple[float, int]:
        """Submit so many steps, or a few more, and land those that are too many to be in flight.

        Returns the host's seconds for it, to which waiting for a result does not belong, and how many steps it were.
        """
        began, waited, steps = perf_counter(), 0.0, 0
        while steps < least:
            plan = self._scheduler.plan()
            steps += plan.repeats if plan else 1
            if plan is not None:
                self._in_flight.append((plan, self.handle.execute(plan)))
            if len(self._in_flight) > self._depth or plan is None:
                waited += self._land()
        return perf_counter() - began - waited, steps

    def _land(self) -> float:
        plan, pending = self._in_flight.popleft()
        began = perf_counter()
        while not pending.ready():
            pass  # `result` would wait as well, and then gather the tokens, which is the host's work
        waited = perf_counter() - began
        self._scheduler.land(plan, pending.result())
        return waited


def bench(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, roofline: Roofline, *, arms: Sequence[str],
    batches: Sequence[int], contexts: Sequence[int], prefills: Sequence[int], repeats: int, tell: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Rows of decode steps, one an arm, batch and context, and rows of prefill, one a length: of the last arm.

    Call `check` before.
    """
    room = _rooms(config, device, batches, contexts, repeats)
    sized = replace(
        config,
        max_decode_bs=max(batches),
        max_model_len=max(_spans(room, contexts, prefills).values()),
        kv_pages=_pages(config.page_size, room, contexts, prefills),
    )
    with _built(sized, arms, checkpoint, device, tell) as built:
        rows = []
        for context in contexts:
            for batch in batches:
                tell(f"decoding: batch {batch}, context {context}", None)
                rows += _decode_rows(built, batch, context, room[batch], repeats, roofline)
        name, arm = list(built.items())[-1]
        prefilled = []
        for tokens in prefills:
            tell(f"prefilling {tokens} tokens", None)
            prefilled.append({"arm": name} | _prefill_row(arm, tokens, repeats, roofline, device))
        counters = {name: arm.handle.counters() for name, arm in built.items()}
        if device.type == "cuda":  # only now: once it has run, a profiler slows whatever the host launches
            tell("profiling", None)
            for row in rows:
                row |= _kernels(built[row["arm"]], row["batch"], row["context"], room[row["batch"]])
    return {"decode": rows, "prefill": prefilled, "counters": counters}


def check(
    config: EngineConfig, positions: int, device: torch.device, *, arms: Sequence[str], batches: Sequence[int],
    contexts: Sequence[int], prefills: Sequence[int], repeats: int,
) -> None:  # fmt: skip
    """Refuse what `bench` could not measure of a model made for so many positions. Raises `ConfigError`."""
    if unknown := sorted(set(arms) - set(ARMS[device.type])):
        here = f"take of {', '.join(ARMS[device.type])}"
        raise ConfigError(f"there is no arm {', '.join(unknown)} on a {device.type}: {here}")
    for what, span in _spans(_rooms(config, device, batches, contexts, repeats), contexts, prefills).items():
        if span > positions:
            raise ConfigError(f"{what} takes {span} tokens to measure, and the model was made for {positions}")


def _decode_rows(
    built: Mapping[str, Arm],
    batch: int,
    context: int,
    room: int,
    repeats: int,
    roofline: Roofline,
) -> list[dict[str, Any]]:
    for arm in built.values():
        arm.fill(batch, max(context - room // 2, 1), room)
        arm.approach(context, repeats)
    taken: dict[str, list[Timing]] = {name: [] for name in built}
    for _ in range(repeats):
        for name, arm in built.items():
            taken[name].append(arm.decode())
    rows = []
    for name, arm in built.items():
        arm.empty()
        steps = [timing.step for timing in taken[name]]
        read = [roofline.step_bytes(batch, timing.context) for timing in taken[name]]
        flops = [roofline.step_flops(batch, timing.context) for timing in taken[name]]
        rows.append({
            "arm": name, "batch": batch, "context": context,
            "mean_context": spread([timing.context / batch for timing in taken[name]]),
            "bytes": median(read), "flops": median(flops),
            "step": spread(steps),
            "host": spread([timing.host for timing in taken[name]]),
            "tokens_per_second": spread([batch / step for step in steps]),
            "roofline_share": spread([r / roofline.bandwidth / step for r, step in zip(read, steps, strict=True)]),
            "matmul_share": spread([f / roofline.matmul / step for f, step in zip(flops, steps, strict=True)]),
            "kernels_per_step": None, "kernels": [],
        })  # fmt: skip
    return rows


def _prefill_row(arm: Arm, tokens: int, repeats: int, roofline: Roofline, device: torch.device) -> dict[str, Any]:
    """One prompt after another; and, where the clock comes down under load, each after a rest."""
    arm.prefill(tokens)
    taken = [arm.prefill(tokens) for _ in range(repeats)]
    rested = []
    for _ in range(repeats if device.type == "cuda" else 0):
        sleep(REST)
        rested.append(arm.prefill(tokens))
    flops = roofline.prefill_flops(tokens)
    return {
        "tokens": tokens, "flops": flops, "seconds": spread(taken), "rested_seconds": spread(rested),
        "matmul_share": spread([flops / seconds / roofline.matmul for seconds in taken]),
        "lasting_share": spread([flops / seconds / roofline.lasting for seconds in taken]),
        "rested_share": spread([flops / seconds / roofline.matmul for seconds in rested]),
    }  # fmt: skip


def _kernels(arm: Arm, batch: int, context: int, room: int) -> dict[str, Any]:
    arm.fill(batch, context, room)
    found = arm.kernels()
    arm.empty()
    kernels = [{"name": name, "times": times, "seconds": took} for name, times, took in found]
    return {"kernels_per_step": sum(times for _, times, _ in found), "kernels": kernels}


def _rooms(
    config: EngineConfig, device: torch.device, batches: Sequence[int], contexts: Sequence[int], repeats: int
) -> dict[int, int]:
    """Tokens that a request may grow by while its batch is filled, and then measured or profiled, of each batch.

    A measurement may be longer by the steps that are submitted together, twice. Those of a large batch are too long for
    many of them, and its room is dear: every arm has pages for it.
    """
    together = settle_multi_step(config, device)
    measuring = {n: (repeats + 3) * (_STEPS + 2 * (together if n <= 64 else min(together, 4))) for n in batches}
    size, tokens = config.page_size, settle_step_tokens(config, device, max(batches))

    def ahead(batch: int) -> int:
        """Tokens that the first request may have decoded when the last one's prompt is computed."""
        at_once = max((tokens - batch) // size, 1)  # pages of prompts that a step computes beside the batch, at least
        return -(-batch * -(-max(contexts) // size) // at_once) - 1

    return {n: more + ahead(n) for n, more in measuring.items()}


def _spans(room: Mapping[int, int], contexts: Sequence[int], prefills: Sequence[int]) -> dict[str, int]:
    """Tokens that the requests of each measurement span, by what asks for it."""
    spans = {
        f"a context of {context} (--context, or else of --n-in and --n-out)": context + max(room.values())
        for context in contexts
    }
    return spans | {f"a prompt of {tokens} (--prefill, or else --n-in)": tokens + 2 for tokens in prefills}


def _pages(page: int, room: Mapping[int, int], contexts: Sequence[int], prefills: Sequence[int]) -> int:
    """Pages for the largest batch of any context, and for any prompt. room: tokens, of each batch."""
    decoding = [batch * -(-(context + more) // page) for context in contexts for batch, more in room.items()]
    return max(decoding + [-(-(tokens + 2) // page) for tokens in prefills]) + max(room)


def _tell_of(tell: Progress, arm: str, phase: str, fraction: float | None) -> None:
    tell(f"{arm}: {phase}", fraction)


@contextmanager
def _built(
    config: EngineConfig, arms: Sequence[str], checkpoint: Checkpoint, device: torch.device, tell: Progress
) -> Iterator[dict[str, Arm]]:
    built: dict[str, Arm] = {}
    try:
        for name in dict.fromkeys(arms):  # one that is named twice is one arm, or the first would never be shut down
            built[name] = Arm(
                replace(config, **ARMS[device.type][name]), checkpoint, device, partial(_tell_of, tell, name)
            )
        spare_collector()
        yield built
    finally:
        for arm in built.values():
            arm.handle.shutdown()
