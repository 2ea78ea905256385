"""Running requests on an engine and noting when their tokens came."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from fastgraph.bench.workloads import Turn
from fastgraph.config import SamplingParams
from fastgraph.engine import Ticket
from fastgraph.errors import ConfigError
from fastgraph.llm import LLM
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
    llm: LLM, turns: Sequence[Turn], *, temperature: float = 0.0, seed: int = 0, clocked: bool = False
) -> tuple[float, list[Run]]:
    """Submit all turns at once and wait for the last answer: (seconds that took, a `Run` for each).

    Tokens are not turned into text. `clocked` notes every token's arrival, at the cost of the engine telling of each
    token as it comes, as it does for a stream.
    """
    clocks = [_Clock() if clocked else None for _ in turns]
    began = perf_counter()
    tickets = [
        _submit(llm, turn, temperature, seed + number, clock)
        for number, (turn, clock) in enumerate(zip(turns, clocks, strict=True))
    ]
    answers = [ticket.future.result() for ticket in tickets]
    took = perf_counter() - began
    runs = [
        Run(answer.prompt_tokens, answer.token_ids, answer.timing.ttft, answer.timing.total, _arrivals(clock))
        for answer, clock in zip(answers, clocks, strict=True)
    ]
    return took, runs


def _submit(llm: LLM, turn: Turn, temperature: float, seed: int, clock: _Clock | None) -> Ticket:
    vocab = llm.limits.vocab
    ids = turn.ids if max(turn.ids) < vocab or not turn.ignore_eos else [i % vocab for i in turn.ids]
    eos = llm.tokenizer.eos_ids if llm.tokenizer and not turn.ignore_eos else ()
    sampling = SamplingParams(temperature=temperature, max_tokens=turn.max_tokens, ignore_eos=turn.ignore_eos)
    return llm.engine.submit(list(ids), sampling, seed=seed, stop_ids=tuple(sorted(eos)), text=clock)


def _arrivals(clock: _Clock | None) -> list[float]:
    return clock.arrivals if clock is not None else []


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
            f"hold (the longest has {max(too_long)}): raise --max-model-len or --kv-pages, or take a shorter workload"
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


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that this share (0..1) of the values does not exceed, interpolated; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
