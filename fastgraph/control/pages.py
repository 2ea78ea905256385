"""The page pool. A `Lease` is the only way to hold pages, and it dies when it is moved or released."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastgraph.control.plan import NULL_PAGE, Int32
from fastgraph.errors import DeadLease


class Lease:
    """The right to use some pages. Held by exactly one request state; a transition moves it to the next."""

    __slots__ = ("_pages", "_pool")

    def __init__(self, pool: PagePool, pages: Int32) -> None:
        self._pool = pool
        self._pages: Int32 | None = pages

    @property
    def pages(self) -> Int32:
        """[pages], in the order of the tokens they hold."""
        if self._pages is None:
            raise DeadLease("these pages were moved or released before")
        return self._pages

    def __len__(self) -> int:
        return len(self.pages)

    def move(self) -> Lease:
        """The same pages under a new lease; this one is dead."""
        pages, self._pages = self.pages, None
        return Lease(self._pool, pages)

    def release(self) -> None:
        """Give the pages back; this lease is dead."""
        pages, self._pages = self.pages, None
        self._pool._give(pages)


class PagePool:
    """`total` pages, numbered from 1: page 0 is the null page. Always free + leased == total."""

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack whose top is its end; filled so that the lowest pages are taken first.
        self._stack: Int32 = np.arange(total, NULL_PAGE, -1, dtype=np.int32)
        self._free = total
        self._leased = 0

    @property
    def free(self) -> int:
        return self._free

    @property
    def leased(self) -> int:
        return self._leased

    def lease(self, count: int = 0) -> Lease:
        return Lease(self, self._take(count))

    def grow(self, leases: Sequence[Lease], counts: Int32) -> Int32:
        """Put `counts[i]` free pages behind those of `leases[i]`; returns them all, in that order.

        Many at once, because a thousand decoding slots may need a page in the same step.
        """
        held = [lease.pages for lease in leases]
        taken = self._take(int(counts.sum()))
        start = 0
        for lease, pages, count in zip(leases, held, counts.tolist(), strict=True):
            lease._pages = np.concatenate([pages, taken[start : start + count]])
            start += count
        return taken

    def _take(self, count: int) -> Int32:
        if not 0 <= count <= self._free:
            raise ValueError(f"{count} pages asked for, {self._free} free: the scheduler must look before it takes")
        self._free -= count
        self._leased += count
        taken: Int32 = self._stack[self._free : self._free + count][::-1].copy()
        return taken

    def _give(self, pages: Int32) -> None:
        self._stack[self._free : self._free + len(pages)] = pages[::-1]
        self._free += len(pages)
        self._leased -= len(pages)
