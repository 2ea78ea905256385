"""`fastgraph bench throughput`: how fast a whole workload is done when all of it is asked for at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from fastgraph.bench import measure
from fastgraph.bench.measure import Run, percentile, spread
from fastgraph.bench.roofline import Roofline
from fastgraph.bench.workloads import Session, Turn, Workload
from fastgraph.llm import LLM

Tell = Callable[[str, "float | None"], None]


def bench(
    llm: LLM, roofline: Roofline, workload: Workload, *, repeats: int, temperature: float, seed: int, tell: Tell
) -> dict[str, Any]:
    """One row. Sessions of several turns go turn by turn: the next is asked when all have their answer."""
    measure.check_fits(llm, [_longest(session) for session in workload])
    tell("warming up", None)
    measure.warm_up(llm, [session[0] for session in workload[: llm.limits.slots]])
    rows = []
    for repeat in range(repeats):
        tell(f"repeat {repeat + 1} of {repeats}", None)
        seconds, runs = _all_turns(llm, workload, temperature, seed)
        rows.append(_figures(seconds, runs, roofline, llm.limits.slots))
    return {"requests": sum(map(len, workload))} | {name: spread([row[name] for row in rows]) for name in rows[0]}


def _longest(session: Session) -> int:
    return sum(len(turn.ids) + turn.max_tokens for turn in session)


def _all_turns(llm: LLM, workload: Workload, temperature: float, seed: int) -> tuple[list[float], list[list[Run]]]:
    """Seconds and runs of every round of turns."""
    histories: list[list[int]] = [[] for _ in workload]
    seconds, rounds = [], []
    for number in range(max(map(len, workload))):
        going = [place for place, session in enumerate(workload) if number < len(session)]
        for place in going:
            histories[place] = [*histories[place], *workload[place][number].ids]
        turns = [
            Turn(histories[place], workload[place][number].max_tokens, workload[place][number].ignore_eos)
            for place in going
        ]
        took, runs = measure.run_together(llm, turns, temperature=temperature, seed=seed)
        for place, run in zip(going, runs, strict=True):
            histories[place] += run.token_ids
        seconds.append(took)
        rounds.append(runs)
    return seconds, rounds


def _figures(seconds: list[float], rounds: list[list[Run]], roofline: Roofline, slots: int) -> dict[str, float | None]:
    runs = [run for round_ in rounds for run in round_]
    took, output = sum(seconds), sum(len(run.token_ids) for run in runs)
    prompt = sum(run.prompt_tokens for run in runs)
    ttfts, tpots = [run.ttft for run in runs], [run.tpot for run in runs if run.tpot is not None]
    least = sum(
        roofline.decode_seconds([(run.prompt_tokens, len(run.token_ids)) for run in round_], slots) for round_ in rounds
    )
    turns = {f"turn_{number}_end": at for number, at in enumerate(accumulate(seconds), 1)} if len(seconds) > 1 else {}
    return {
        "seconds": took,
        **turns,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_second": output / took,
        "total_tokens_per_second": (prompt + output) / took,
        "ttft_p50": percentile(ttfts, 0.5),
        "ttft_p95": percentile(ttfts, 0.95),
        "tpot_p50": percentile(tpots, 0.5),
        "tpot_p95": percentile(tpots, 0.95),
        "roofline_share": least / took,
    }
