"""The least time that a whole workload can take, by counting what must be read and multiplied."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastgraph.bench.roofline import Roofline

FORMULA = (
    "limit = FLOPs of the prompts' new tokens / rate of a large product + sum over decode steps of the longer of "
    "(weights + context tokens * KV of one) / bandwidth and FLOPs / rate"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """A request, as far as its cost goes. All counts are tokens."""

    cached: int  # of the prompt, that a perfect prefix cache has
    new: int  # of the prompt, besides
    answer: int


def costs(prompts: Iterable[tuple[Sequence[int], int, int]]) -> list[Cost]:
    """Of (prompt, tokens of it that were said before in the same session, answer's tokens).

    A prompt that was asked before is cached whole. What two different prompts begin with alike is not counted.
    """
    asked: set[tuple[int, ...]] = set()
    found = []
    for prompt, said, answer in prompts:
        key = tuple(prompt)
        cached = len(prompt) if key in asked else said
        asked.add(key)
        found.append(Cost(cached, len(prompt) - cached, answer))
    return found


def seconds(roofline: Roofline, requests: Sequence[Cost], slots: int) -> float:
    """The least time for all of them, asked for at once: `slots` at a time, first come first.

    Launching kernels, drawing tokens and all that the host does take no time here. Every token of an answer is a
    decode step of its request, the first one too.
    """
    flops = sum(
        cost.new * (roofline.token_flops + roofline.context_flops * (cost.cached + cost.new / 2)) for cost in requests
    )
    return flops / roofline.matmul + _decode_seconds(roofline, requests, slots)


def _decode_seconds(roofline: Roofline, requests: Sequence[Cost], slots: int) -> float:
    waiting = deque((cost.cached + cost.new, cost.answer) for cost in requests if cost.answer)
    ends: dict[int, list[int]] = defaultdict(list)  # step -> contexts of the requests that have ended before it
    rows = context = step = 0
    total = 0.0
    while waiting or rows:
        while waiting and rows < slots:
            length, answer = waiting.popleft()
            rows, context = rows + 1, context + length
            ends[step + answer].append(length + answer)
        total += max(roofline.step_seconds(rows, context), roofline.step_flops(rows, context) / roofline.matmul)
        step, context = step + 1, context + rows
        for length in ends.pop(step, ()):
            rows, context = rows - 1, context - length
    return total
