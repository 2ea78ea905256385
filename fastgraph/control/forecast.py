"""How long answers get, learnt from those that have ended, and how many pages they will need at once."""

from __future__ import annotations

import numpy as np

from fastgraph.control.plan import Int32

MEMORY = 100  # answers over which the mean is taken


class Forecast:
    """Most answers end long before `max_tokens`: to keep room for all of it would leave most of the pool unused.

    The mean share of `max_tokens` that answers come to, the recent ones weighing most. It begins at a half.
    """

    def __init__(self) -> None:
        self.share = 0.5
        self._answers = 1

    def ended(self, tokens: int, most: int) -> None:
        """An answer has ended after `tokens` of the `most` it could have."""
        self._answers = min(self._answers + 1, MEMORY)
        self.share += (tokens / most - self.share) / self._answers

    def missed(self) -> None:
        """There was no room for all: answers are longer than was thought."""
        self.share += (1 - self.share) / 4

    def left(self, generated: Int32, most: Int32, page_size: int) -> Int32:
        """Tokens that answers are still expected to get, when they have `generated` of `most`: [answers].

        One that is past what was expected of it may go on for another page.
        """
        expected = np.maximum(np.ceil(most * self.share), generated + page_size)
        left: Int32 = (np.minimum(expected, most) - generated).astype(np.int32)
        return left


def peak(tokens: Int32, left: Int32, page_size: int, largest: int = 0) -> float:
    """Pages that requests need at the worst moment, if each holds `tokens` now and ends after `left` more: [requests].

    It comes when one of them is about to end: those with more left are still there, each grown by as much. After
    "Past-Future Scheduler for LLM Serving under SLA Guarantees" (arXiv:2507.10150), which shows that this sees far
    more room than the sum of the final lengths. `largest` > 0 is what a request holds at most, since it gives back what
    it has no more use for: then they never need more than the sum of what they grow to.
    """
    order = np.argsort(-left, kind="stable")
    still_there = np.arange(1, len(order) + 1)
    needed = (np.cumsum(tokens[order]) + still_there * left[order]) / page_size + still_there  # a last page each
    together = np.minimum(tokens + left, largest).sum() / page_size + len(tokens) if largest else np.inf
    return float(min(needed.max(), together))
