"""`fastgraph bench serve`: what users see while requests come as they please, or while so many users ask on and on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from fastgraph.bench import load, measure
from fastgraph.bench.load import Played
from fastgraph.bench.measure import Run
from fastgraph.bench.workloads import Turn, Workload
from fastgraph.engine import Completion
from fastgraph.llm import LLM
from fastgraph.loading.files import Progress


def bench(
    llm: LLM, workload: Workload, *, rate: float | None, concurrency: int | None, repeats: int, temperature: float,
    seed: int, decode_text: bool, tell: Progress,
) -> dict[str, Any]:  # fmt: skip
    """One row. Either sessions begin at random, `rate` a second, or `concurrency` of them are under way at any time."""
    begins = [0.0] * len(workload) if rate is None else poisson(rate, len(workload), seed)
    at_once = concurrency or len(workload)
    played = partial(play, llm, workload, begins, at_once, temperature, seed, decode_text)
    return load.repeat(llm, workload, played, repeats, tell)


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which `count` sessions begin that come independently of each other, `rate` a second on average."""
    chance = random.Random(seed)
    return list(accumulate(chance.expovariate(rate) for _ in range(count)))


def play(
    llm: LLM, workload: Workload, begins: Sequence[float], at_once: int, temperature: float, seed: int,
    decode_text: bool, tell: Callable[[float], None],
) -> Played:  # fmt: skip
    """Sessions begin at these seconds, but never more than `at_once` are under way; a turn follows the answer before.

    The runs are in the order in which they ended.
    """
    ended: SimpleQueue[tuple[int, Future[Completion]]] = SimpleQueue()
    histories: list[list[int]] = [[] for _ in workload]
    turns = [iter(session) for session in workload]
    total, runs, begun, under_way = sum(map(len, workload)), [], 0, 0

    def go_on(place: int) -> bool:
        """Ask the session's next turn, if there is one."""
        turn = next(turns[place], None)
        if turn is None:
            return False
        histories[place] += turn.ids
        whole = Turn(histories[place], turn.max_tokens, turn.ignore_eos)
        (ticket,) = llm.engine.submit_all([measure.ask(llm, whole, temperature, seed + place)])
        ticket.future.add_done_callback(lambda future: ended.put((place, future)))
        return True

    start = perf_counter()
    while begun < len(workload) or under_way:
        free = begun < len(workload) and under_way < at_once
        wait = begins[begun] - (perf_counter() - start) if free else None
        if wait is not None and wait <= 0:
            under_way += go_on(begun)
            begun += 1
            continue
        try:
            place, future = ended.get(timeout=wait)
        except Empty:
            continue
        answer = future.result()
        if decode_text:
            measure.check_tokenizer(llm).decode(answer.token_ids)
        runs.append(Run.of(answer, []))
        histories[place] += answer.token_ids
        under_way -= not go_on(place)
        tell(len(runs) / total)
    return Played(perf_counter() - start, runs, {})
