"""The engine's loop over a real device: the same tokens, however many steps are in flight or submitted together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_device import build, reference

from fastgraph.config import SamplingParams
from fastgraph.control.loop import EngineLoop, Observer
from fastgraph.control.plan import StepPlan
from fastgraph.control.scheduler import Output, Scheduler
from fastgraph.control.states import FinishReason, Request
from fastgraph.device.handle import DeviceHandle

__all__ = ["reference"]  # a fixture

COUNT = 10  # requests, of which 6 run at once
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other take many times longer than one alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def plenty_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps are submitted together as may be, however long they take here."""
    monkeypatch.setattr("fastgraph.control.pace.SHORTEST", 60.0)
    monkeypatch.setattr("fastgraph.control.pace.LONGEST", 60.0)


def build_both(folder: Path, **options: Any) -> dict[int, DeviceHandle]:
    """By the most steps that are submitted together. Prompts above 17 tokens are cut."""
    options = {"compile": "off", "max_step_tokens": 17, "in_flight_depth": 2, **options}
    return {multi_step: build(folder, multi_step=multi_step, **options) for multi_step in (1, 8)}


@pytest.fixture(scope="module")
def devices(reference: tuple[Any, Path]) -> dict[int, DeviceHandle]:
    return build_both(reference[1])


@pytest.fixture(scope="module")
def saving_devices(reference: tuple[Any, Path]) -> dict[int, DeviceHandle]:
    """What is pushed out is copied to the host, and nothing is shared."""
    return build_both(reference[1], host_kv_gb=0.001, prefix_cache=False)


def requests(asking: str, stops: dict[int, tuple[int, ...]], **options: Any) -> list[Request]:
    """Of all lengths; `asking` says who wants log-probabilities: none, some or all."""
    made = []
    for number in range(COUNT):
        prompt = [(7 * number + 3 * place) % 96 for place in range(1 + number * 11 % 31)]
        answer = 6 + number * 17 % 37
        sampling = SamplingParams(
            max_tokens=answer,
            temperature=(0.0, 0.9)[number % 2],
            min_tokens=(0, 5)[number % 4 < 2],
            logprobs=asking == "all" or (asking == "some" and number % 3 == 0),
            **options,
        )
        incremental, length = sampling.logprobs or number % 5 == 0, len(prompt) + answer
        ids = np.array(prompt, np.int32)
        made.append(Request(number, ids, sampling, 77 + number, stops.get(number, ()), length, incremental))
    return made


class Served(Observer):
    """What came of requests that a loop has served."""

    def __init__(self, device: DeviceHandle, requests: list[Request], depth: int, **options: Any) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.reasons: dict[int, FinishReason] = {}
        self.repeats: set[int] = set()
        self.together = 0  # plans in flight, at most
        self.restored = False  # whether pages came back from the host
        self._count = len(requests)
        self.scheduler = Scheduler(device.limits)
        self._loop = EngineLoop(self.scheduler, device, depth, self._deliver, **options)
        self._loop.observers.append(self)
        for request in requests:
            self._loop.submit(request)
        self._loop.call(lambda: None)  # it waits for one when nothing moves
        self._loop.run()

    def planned(self, plan: StepPlan | None) -> None:
        if plan:
            self.repeats.add(plan.repeats)
            self.restored |= len(plan.restores) > 0
            self.together = max(self.together, len(self._loop._in_flight) + 1)

    def _deliver(self, outputs: list[Output]) -> list[int]:
        for output in outputs:
            self.tokens[output.request_id] += output.token_ids.tolist()
            if output.logprobs is not None:
                self.logprobs[output.request_id] += output.logprobs.chosen.tolist()
            if output.finish_reason:
                self.reasons[output.request_id] = output.finish_reason
        if len(self.reasons) == self._count:
            self._loop.stop()
        return []


def same_logprobs(found: Served, wanted: Served, asked: list[Request]) -> None:
    assert set(found.logprobs) == {request.id for request in asked if request.sampling.logprobs}
    for number, logprobs in found.logprobs.items():
        assert logprobs == pytest.approx(wanted.logprobs[number], abs=1e-4)


@pytest.fixture(scope="module")
def stops(devices: dict[int, DeviceHandle]) -> dict[int, tuple[int, ...]]:
    """For every other request, a token from the midst of its answer, or its first, which `min_tokens` may forbid."""
    free = Served(devices[1], requests("all", {}), 0)
    return {number: (free.tokens[number][number % 8],) for number in range(0, COUNT, 2)}


@pytest.fixture(scope="module")
def one_by_one(devices: dict[int, DeviceHandle], stops: dict[int, tuple[int, ...]]) -> Served:
    """Each step is read before the next is submitted, with all its log-probabilities."""
    served = Served(devices[1], requests("all", stops), 0)
    assert served.repeats == {served.together} == {1}
    assert set(served.reasons.values()) == {"stop", "length"}
    return served


@pytest.mark.parametrize("asking", ["none", "some", "all"])
@pytest.mark.parametrize("multi_step", [1, 8])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_same_tokens_come_at_every_depth(
    devices: dict[int, DeviceHandle],
    stops: dict[int, tuple[int, ...]],
    one_by_one: Served,
    depth: int,
    multi_step: int,
    asking: str,
) -> None:
    """Without log-probabilities, a plan's tokens come to the host by another way."""
    asked = requests(asking, stops)
    served = Served(devices[multi_step], asked, depth)
    assert (max(served.repeats), served.together) == (multi_step, depth + 1)
    assert (served.tokens, served.reasons) == (one_by_one.tokens, one_by_one.reasons)
    same_logprobs(served, one_by_one, asked)


@pytest.fixture(scope="module")
def penalised(devices: dict[int, DeviceHandle], stops: dict[int, tuple[int, ...]]) -> Served:
    """Of penalties, so that what was generated before counts."""
    served = Served(devices[1], requests("all", stops, **PENALTIES), 0)
    assert served.scheduler.preemptions == 0
    return served


@pytest.mark.parametrize("asking", ["none", "some", "all"])
@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("multi_step", [1, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_whoever_is_pushed_out_at_intervals_goes_on_as_if_nothing_had_happened(
    devices: dict[int, DeviceHandle],
    saving_devices: dict[int, DeviceHandle],
    stops: dict[int, tuple[int, ...]],
    penalised: Served,
    depth: int,
    multi_step: int,
    saving: bool,
    asking: str,
) -> None:
    asked = requests(asking, stops, **PENALTIES)
    device = (saving_devices if saving else devices)[multi_step]
    served = Served(device, asked, depth, retract_every=3)
    assert served.scheduler.preemptions > 5
    assert (max(served.repeats), served.together) == (multi_step, depth + 1)
    assert served.restored == saving
    assert (served.tokens, served.reasons) == (penalised.tokens, penalised.reasons)
    same_logprobs(served, penalised, asked)
