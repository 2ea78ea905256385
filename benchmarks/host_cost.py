"""What planning and landing costs the host, without a device: in a loop, and after a wait, as on a GPU.

python benchmarks/host_cost.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

import numpy as np

from fastgraph.config import SamplingParams
from fastgraph.control.plan import Limits, StepResult
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request

T = TypeVar("T")
WARM = 60  # plans that do not count
STEP = 0.004  # seconds that a step is said to take: eight of them go out together


def plans(requests: int, incremental: bool, wait: float, count: int = 100) -> tuple[float, float]:
    """Median seconds of planning and of landing, each after `wait` seconds of doing nothing."""
    scheduler = Scheduler(Limits(256, 256 * 260, 16, 4000, 8192, 150_000, multi_step=32))
    stops = (2,) if incremental else ()
    for number in range(requests):
        prompt = np.arange(number, number + 20, dtype=np.int32)
        sampling = SamplingParams(ignore_eos=not incremental)
        scheduler.submit(Request(number, prompt, sampling, 0, stops, 3900, incremental))
    planned, landed = [], []
    for number in range(WARM + count):
        pause = wait if number >= WARM else 0.0
        seconds, plan = timed(scheduler.plan, pause)
        assert plan is not None
        tokens = np.ones(plan.repeats * len(plan.sampling_slots), np.int32)
        planned.append(seconds)
        landing = partial(scheduler.land, plan, StepResult(tokens, None, STEP * plan.repeats))
        landed.append(timed(landing, pause)[0])
    return median(planned[WARM:]), median(landed[WARM:])


def timed(work: Callable[[], T], wait: float) -> tuple[float, T]:
    """Seconds of the work, begun after the wait, and what it gave."""
    until = perf_counter() + wait
    while perf_counter() < until:
        pass
    began = perf_counter()
    found = work()
    return perf_counter() - began, found


if __name__ == "__main__":
    print("requests  told of every token  after a wait of   plan µs   land µs")
    for requests in (1, 256):
        for incremental in (False, True):
            for wait in (0.0, 0.01):
                plan, land = plans(requests, incremental, wait)
                told = "yes" if incremental else "no"
                print(f"{requests:8}  {told:>19}  {wait * 1e3:12.0f} ms  {plan * 1e6:8.1f}  {land * 1e6:8.1f}")
