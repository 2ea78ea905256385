"""`fastgraph bench throughput`: how fast a whole workload is done when all of it is asked for at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from fastgraph.bench import limit, load, measure
from fastgraph.bench.limit import Cost
from fastgraph.bench.load import Figures, Played
from fastgraph.bench.measure import Run
from fastgraph.bench.roofline import Roofline
from fastgraph.bench.workloads import Turn, Workload
from fastgraph.llm import LLM
from fastgraph.loading.files import Progress


def bench(
    llm: LLM, roofline: Roofline, workload: Workload, *, repeats: int, temperature: float, seed: int,
    decode_text: bool, tell: Progress,
) -> dict[str, Any]:  # fmt: skip
    """One row. Sessions of several turns go turn by turn: the next is asked when all have their answer."""

    def play(done: Callable[[float], None]) -> Played:
        rounds = all_turns(llm, workload, temperature, seed, decode_text, done)
        took = sum(round_.seconds for round_ in rounds)
        least, lasting = (
            sum(limit.seconds(peak, round_.costs, llm.limits.slots) for round_ in rounds)
            for peak in (roofline, replace(roofline, matmul=roofline.lasting))
        )
        figures: Figures = {"limit_seconds": least, "limit_share": least / took, "lasting_share": lasting / took}
        return Played(took, [run for round_ in rounds for run in round_.runs], figures | _ends(rounds))

    return load.repeat(llm, workload, play, repeats, tell)


@dataclass(frozen=True, slots=True)
class Round:
    """A turn of every session that has one more."""

    seconds: float
    runs: list[Run]
    costs: list[Cost]


def all_turns(
    llm: LLM, workload: Workload, temperature: float, seed: int, decode_text: bool, tell: Callable[[float], None]
) -> list[Round]:
    """Ask everything. A later turn's prompt is all that was said in its session, answers included."""
    histories: list[Sequence[int]] = [[] for _ in workload]
    rounds: list[Round] = []
    longest = max(map(len, workload))
    for number in range(longest):
        going = [place for place, session in enumerate(workload) if number < len(session)]
        said = [len(histories[place]) for place in going]
        turns = []
        for place in going:
            turn = workload[place][number]
            # What sessions begin with stays one list, if they share it: so do the answers to one prompt elsewhere.
            histories[place] = [*histories[place], *turn.ids] if histories[place] else turn.ids
            turns.append(Turn(histories[place], turn.max_tokens, turn.ignore_eos))
        seconds, runs = measure.run_together(
            llm, turns, temperature=temperature, seed=seed, decode=decode_text,
            tell=lambda share: tell((len(rounds) + share) / longest),
        )  # fmt: skip
        asked = zip(turns, said, runs, strict=True)
        costs = limit.costs((turn.ids, before, len(run.token_ids)) for turn, before, run in asked)
        rounds.append(Round(seconds, runs, costs))
        for place, run in zip(going, runs, strict=True):
            histories[place] = [*histories[place], *run.token_ids]
    return rounds


def _ends(rounds: Sequence[Round]) -> Figures:
    """When each round of turns was done, if there are several."""
    ends = accumulate(round_.seconds for round_ in rounds)
    return {f"turn_{number}_end": at for number, at in enumerate(ends, 1)} if len(rounds) > 1 else {}
