"""The figures of a load: what many requests got, what the engine's steps did meanwhile, and what it had to do twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastgraph.bench import measure
from fastgraph.bench.measure import COUNTERS, Run, percentile, spread
from fastgraph.bench.steplog import Float64, StepLog, Steps
from fastgraph.bench.workloads import Workload
from fastgraph.llm import LLM
from fastgraph.loading.files import Progress

PERCENTILES = (50, 90, 99)
TIMES = ("queued", "ttft", "tpot", "itl", "e2e")  # of each of which there are those percentiles

_COUNTED = (*COUNTERS, "padding_tokens")

Figures = dict[str, "float | None"]


@dataclass(frozen=True, slots=True)
class Played:
    """A workload that has been run once."""

    seconds: float
    runs: list[Run]
    figures: Figures  # besides those that every load has


def repeat(
    llm: LLM, workload: Workload, play: Callable[[Callable[[float], None]], Played], repeats: int, tell: Progress
) -> dict[str, Any]:
    """One row: each figure of `repeats` runs, with its spread. `play` is given whom to tell of its progress."""
    measure.check_fits(llm, [sum(len(turn.ids) + turn.max_tokens for turn in session) for session in workload])
    tell("warming up", None)
    measure.warm_up(llm, [session[0] for session in workload[: llm.limits.slots]])
    rows = []
    for number in range(1, repeats + 1):
        measure.start_afresh(llm)
        log, before = StepLog(), llm.stats()
        llm.engine.observe(log)
        try:
            played = play(partial(tell, f"repeat {number} of {repeats}"))
        finally:
            llm.engine.ignore(log)
        after = llm.stats()
        counts = {name: after[name] - before[name] for name in _COUNTED}
        rows.append(figures(played.seconds, played.runs, Steps.of(log), counts) | played.figures)
    return {"requests": sum(map(len, workload))} | {name: spread([row[name] for row in rows]) for name in rows[0]}


def figures(took: float, runs: Sequence[Run], steps: Steps, counts: dict[str, int]) -> Figures:
    """docs/benchmarking.md says what each of them is."""
    output, prompt = sum(len(run.token_ids) for run in runs), sum(run.prompt_tokens for run in runs)
    part = steps.steady()
    steady = steps.seconds(part)
    computed = int(steps.computed.sum())
    found: Figures = {
        "seconds": took,
        "requests_per_second": len(runs) / took,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_second": output / took,
        "total_tokens_per_second": (prompt + output) / took,
        "steady_seconds": steady,
        "steady_tokens_per_second": float(steps.sampled[part].sum()) / steady if steady else None,
        "hit_rate": sum(run.cached_tokens for run in runs) / prompt,
        "idle_share": max(1 - float(steps.busy.sum()) / took, 0.0),
        "steady_idle_share": max(1 - float(steps.busy[part].sum()) / steady, 0.0) if steady else None,
        "steps": int(steps.repeats.sum()),
        "step_tokens": computed / int(steps.repeats.sum()),
        "largest_batch": int(steps.decoding.max()),
        "padding_share": counts["padding_tokens"] / (counts["padding_tokens"] + computed),
    }
    times: dict[str, Sequence[float] | Float64] = {
        "queued": [run.queued for run in runs],
        "ttft": [run.ttft for run in runs],
        "tpot": [run.tpot for run in runs if run.tpot is not None],
        "itl": steps.gaps,
        "e2e": [run.total for run in runs],
    }
    for name in TIMES:
        found |= {f"{name}_p{share}": percentile(times[name], share / 100) for share in PERCENTILES}
    return found | {name: counts[name] for name in COUNTERS}
