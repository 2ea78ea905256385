"""Token-level queues: what waits is not a request but a span of its tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a request, waiting to be prefilled."""

    request_id: int
    start: int
    stop: int


class SpanQueue:
    """First in, first out, over spans, one for a request. A bite off the head leaves the rest of it in front.

    No operation takes longer the more there is in the queue.
    """

    def __init__(self) -> None:
        self._spans: OrderedDict[int, Span] = OrderedDict()  # by request id

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans.values())

    @property
    def head(self) -> Span | None:
        return next(iter(self._spans.values()), None)

    def push(self, span: Span) -> None:
        self._spans[span.request_id] = span

    def push_front(self, span: Span) -> None:
        """For a request that was retracted: it came before everything that still waits."""
        self._spans[span.request_id] = span
        self._spans.move_to_end(span.request_id, last=False)

    def bite(self, tokens: int) -> Span:
        """Take the first `tokens` tokens of the head."""
        head = next(iter(self._spans.values()))
        cut = head.start + tokens
        if cut < head.stop:
            self._spans[head.request_id] = replace(head, start=cut)
        else:
            del self._spans[head.request_id]
        return replace(head, stop=min(cut, head.stop))

    def remove(self, request_id: int) -> None:
        """Nothing happens if the request has no span here."""
        self._spans.pop(request_id, None)
