"""Running requests on an engine and noting when their tokens came."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastgraph.bench.workloads import Turn
from fastgraph.config import SamplingParams
from fastgraph.engine import Ask, Completion
from fastgraph.errors import ConfigError
from fastgraph.llm import LLM
from fastgraph.loading.tokenizer import Tokenizer
from fastgraph.text import TextStream

# Of `LLM.stats`: what should be zero, or explains a slow run.
COUNTERS = ("recompiles", "eager_steps", "kernel_builds", "preemptions")

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """What became of one request. Times are in seconds."""

    prompt_tokens: int
    token_ids: list[int]
    ttft: float  # from submission to the first token
    total: float  # from submission to the last
    arrivals: list[float]  # when each token came, on `perf_counter`'s clock; empty if it was not asked for
    queued: float = 0.0  # from submission until it got a slot
    cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @classmethod
    def of(cls, answer: Completion, arrivals: list[float]) -> Run:
        timing = answer.timing
        times = {"ttft": timing.ttft, "total": timing.total, "queued": timing.queued}
        return cls(
            answer.prompt_tokens, answer.token_ids, arrivals=arrivals, cached_tokens=answer.cached_tokens, **times
        )

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        after = len(self.token_ids) - 1
        return (self.total - self.ttft) / after if after > 0 else None


class _Clock(TextStream):
    """Stands where a request's text would be put together, and notes when its tokens come."""

    def __init__(self) -> None:
        self.stopped, self.kept = False, 0
        self.arrivals: list[float] = []

    @property
    def text(self) -> str:
        return ""

    def push(self, ids: Sequence[int]) -> str:
        self.arrivals += [perf_counter()] * len(ids)
        return ""

    def finish(self) -> str:
        return ""


def run_together(
    llm: LLM, turns: Sequence[Turn], *, temperature: float = 0.0, seed: int = 0, clocked: bool = False,
    decode: bool = False, tell: Callable[[float], None] = lambda share: None,
) -> tuple[float, list[Run]]:  # fmt: skip
    """Submit all turns at once and wait for the last answer: (seconds that took, a `Run` for each).

    `clocked` notes every token's arrival, at the cost of the engine telling of each token as it comes, as it does for a
    stream. `decode` makes text of each answer when it is whole, as `LLM.generate` does; without it nothing is. `tell`
    is told the share of the answers that have come.
    """
    clocks = [_Clock() if clocked else None for _ in turns]
    asks = [
        ask(llm, turn, temperature, seed + number, clock)
        for number, (turn, clock) in enumerate(zip(turns, clocks, strict=True))
    ]
    runs = []
    began = perf_counter()
    tickets = llm.engine.submit_all(asks)
    for ticket, clock in zip(tickets, clocks, strict=True):
        answer = ticket.future.result()
        if decode:
            check_tokenizer(llm).decode(answer.token_ids)
        runs.append(Run.of(answer, clock.arrivals if clock is not None else []))
        tell(len(runs) / len(tickets))
    return perf_counter() - began, runs


def ask(llm: LLM, turn: Turn, temperature: float, seed: int, text: TextStream | None = None) -> Ask:
    """A turn as the engine is asked for it. Ids that the vocabulary lacks are made others that it has."""
    vocab = llm.limits.vocab
    ids = turn.ids if max(turn.ids) < vocab or not turn.ignore_eos else [i % vocab for i in turn.ids]
    eos = llm.tokenizer.eos_ids if llm.tokenizer and not turn.ignore_eos else ()
    sampling = SamplingParams(temperature=temperature, max_tokens=turn.max_tokens, ignore_eos=turn.ignore_eos)
    return Ask(ids, sampling, seed, tuple(sorted(eos)), text)


def check_tokenizer(llm: LLM) -> Tokenizer:
    """What makes text of answers. Raises `ConfigError` if there is none."""
    if llm.tokenizer is None:
        raise ConfigError(f"{llm.checkpoint.name} was loaded without a tokenizer: measure without --decode-text")
    return llm.tokenizer


def start_afresh(llm: LLM) -> None:
    """Wait until nothing runs, and empty the prefix cache: no repeat may find what an earlier one has computed."""
    while llm.stats()["running"]:
        pass
    llm.engine.forget_prefixes()


def spare_collector() -> None:
    """Have Python's collector leave out what there is now, until an engine is closed or captures graphs.

    What importing and compiling leave takes it 0.1 s and more to go through, with the GIL held.
    """
    gc.collect()
    gc.freeze()


def warm_up(llm: LLM, turns: Sequence[Turn]) -> None:
    """A short run of the same prompts, not counted."""
    run_together(llm, [Turn(turn.ids, min(turn.max_tokens, _WARM_UP_TOKENS), turn.ignore_eos) for turn in turns])


def check_fits(llm: LLM, lengths: Sequence[int]) -> None:
    """Refuse a workload with requests, of so many tokens each, that the engine would refuse."""
    limits = llm.limits
    longest = min(limits.max_model_len, limits.pool_tokens + 1)
    too_long = [length for length in lengths if length > longest]
    if too_long:
        raise ConfigError(
            f"{len(too_long)} of {len(lengths)} requests span more than the {longest} tokens that this engine can "
            f"hold (the longest has {max(too_long)}): raise --max-model-len or --kv-pages if the model was made for "
            f"more, or take a shorter workload"
        )


def counters(llm: LLM) -> dict[str, int]:
    stats = llm.stats()
    return {name: stats[name] for name in COUNTERS}


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Median, least and most of the repeats, and all of them. Values that do not exist leave it empty."""
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "min": None, "max": None, "all": []}
    return {"median": statistics.median(known), "min": min(known), "max": max(known), "all": known}


def percentile(values: Sequence[float] | NDArray[np.float64], share: float) -> float | None:
    """The value that this share (0..1) of the values does not exceed, interpolated; None without values."""
    return float(np.percentile(values, 100 * share)) if len(values) else None
