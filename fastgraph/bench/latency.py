"""`fastgraph bench latency`: how fast requests of one length are answered, alone and in growing batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from fastgraph.bench import measure, workloads
from fastgraph.bench.measure import Run, percentile, spread
from fastgraph.bench.roofline import Roofline
from fastgraph.errors import ConfigError
from fastgraph.llm import LLM
from fastgraph.loading.files import Progress


def bench(
    llm: LLM, roofline: Roofline, *, batches: Sequence[int], n_in: int, n_out: int, repeats: int,
    temperature: float, seed: int, tell: Progress,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each batch size. Repeats go round all sizes in turn, so that a slow spell of the machine hits all."""
    if max(batches) > llm.limits.slots:
        raise ConfigError(
            f"a batch of {max(batches)} does not decode at once with max_decode_bs {llm.limits.slots}: "
            f"pass --max-decode-bs {max(batches)}"
        )
    measure.check_fits(llm, [n_in + n_out])
    ladder = {
        batch: [session[0] for session in workloads.latency(n_in, n_out, seed, batch)] for batch in sorted(set(batches))
    }
    for batch, turns in ladder.items():
        tell(f"warming up batch {batch}", None)
        measure.warm_up(llm, turns)
    rows: dict[int, list[dict[str, float | None]]] = {batch: [] for batch in ladder}
    for repeat in range(repeats):
        for batch, turns in ladder.items():
            tell(f"batch {batch}, repeat {repeat + 1} of {repeats}", None)
            took, runs = measure.run_together(llm, turns, temperature=temperature, seed=seed, clocked=True)
            rows[batch].append(_figures(took, runs, roofline))
    return [
        {"batch": batch, "n_in": n_in, "n_out": n_out}
        | {name: spread([figures[name] for figures in all_figures]) for name in all_figures[0]}
        for batch, all_figures in rows.items()
    ]


def _figures(took: float, runs: Sequence[Run], roofline: Roofline) -> dict[str, float | None]:
    gaps = [b - a for run in runs for a, b in pairwise(run.arrivals)]
    tpots = [run.tpot for run in runs if run.tpot is not None]
    step, context = _decode_step(runs)
    return {
        "ttft": median(run.ttft for run in runs),
        "tpot": median(tpots) if tpots else None,
        "itl_p50": percentile(gaps, 0.5),
        "itl_p95": percentile(gaps, 0.95),
        "output_tokens_per_second": sum(len(run.token_ids) for run in runs) / took,
        "decode_step": step,
        "roofline_share": roofline.step_seconds(len(runs), context) / step if step else None,
    }


def _decode_step(runs: Sequence[Run]) -> tuple[float | None, float]:
    """Mean time of a step while all requests decode, and the tokens of context that they have then in all."""
    arrivals = max((run.arrivals for run in runs), key=lambda arrivals: arrivals[0])  # of the request that began last
    gaps = [b - a for a, b in pairwise(arrivals)]
    if not gaps:
        return None, 0.0
    # Requests are told of one step's tokens one after the other, well within half a step.
    slack = median(gaps) / 2
    end = min(run.arrivals[-1] for run in runs) + slack
    steps = sum(at <= end for at in arrivals) - 1
    if steps < 1:
        return None, 0.0
    before = sum(sum(at < arrivals[0] - slack for at in run.arrivals) for run in runs)
    context = sum(run.prompt_tokens for run in runs) + before + len(runs) * (steps + 1) / 2
    return (arrivals[steps] - arrivals[0]) / steps, context
