"""Token-level queues: what waits is not a request but a span of its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a request, waiting to be prefilled."""

    request_id: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class SpanQueue:
    """First in, first out, over spans. A step takes a bite off the head; the rest of the head stays in front."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    @property
    def head(self) -> Span | None:
        return self._spans[0] if self._spans else None

    @property
    def tokens(self) -> int:
        return sum(span.tokens for span in self._spans)

    def push(self, span: Span) -> None:
        self._spans.append(span)

    def push_front(self, span: Span) -> None:
        """For a request that was retracted: it came before everything that still waits."""
        self._spans.appendleft(span)

    def bite(self, tokens: int) -> Span:
        """Take the first `tokens` tokens of the head."""
        head = self._spans.popleft()
        cut = head.start + tokens
        if cut < head.stop:
            self._spans.appendleft(replace(head, start=cut))
        return replace(head, stop=min(cut, head.stop))

    def remove(self, request_id: int) -> None:
        self._spans = deque(span for span in self._spans if span.request_id != request_id)
