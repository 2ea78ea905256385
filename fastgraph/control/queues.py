"""Token-level queues: what waits is not a request but a span of its tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a request, waiting to be prefilled."""

    request_id: int
    start: int
    stop: int


class SpanQueue:
    """Spans, one for a request, by the number that the policy gave it; of equals the older request comes first.

    A bite off the head leaves the rest of it in front until it is eaten: no two prompts are half prefilled at once.
    """

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}  # by request id
        self._heap: list[tuple[float, int]] = []  # (number, request id); some of them have gone meanwhile
        self._bitten: Span | None = None  # the head, once it was bitten

    def __len__(self) -> int:
        return len(self._spans) + (self._bitten is not None)

    def __iter__(self) -> Iterator[Span]:
        if self._bitten:
            yield self._bitten
        yield from (self._spans[i] for _, i in sorted(set(self._heap)) if i in self._spans)

    @property
    def head(self) -> Span | None:
        if self._bitten:
            return self._bitten
        while self._heap and self._heap[0][1] not in self._spans:
            heapq.heappop(self._heap)
        return self._spans[self._heap[0][1]] if self._heap else None

    def push(self, span: Span, number: float) -> None:
        self._spans[span.request_id] = span
        heapq.heappush(self._heap, (number, span.request_id))

    def bite(self, tokens: int) -> Span:
        """Take the first `tokens` tokens of the head, which must be there."""
        head = self.head
        assert head is not None
        self._spans.pop(head.request_id, None)
        cut = min(head.start + tokens, head.stop)
        self._bitten = Span(head.request_id, cut, head.stop) if cut < head.stop else None
        return Span(head.request_id, head.start, cut)

    def remove(self, request_id: int) -> None:
        """Nothing happens if the request has no span here."""
        self._spans.pop(request_id, None)
        if self._bitten and self._bitten.request_id == request_id:
            self._bitten = None
