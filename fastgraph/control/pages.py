"""The page pool. A `Lease` is the only way to hold pages, and it dies when it is moved or released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fastgraph.control.plan import NULL_PAGE, Int32
from fastgraph.control.prefix import PrefixTree
from fastgraph.errors import DeadLease


class Lease:
    """The right to use some pages. Held by exactly one request state; a transition moves it to the next.

    The first `published` pages are in the prefix tree: other leases may share them, and nobody writes them again. Of
    the first `dropped` pages only the places are left, with the null page in them.
    """

    __slots__ = ("_parts", "_pool", "dropped", "published")

    def __init__(self, pool: PagePool, pages: Int32, published: int, dropped: int = 0) -> None:
        self._pool = pool
        self._parts: list[Int32] | None = [pages]  # joined when they are asked for, which is seldom
        self.published, self.dropped = published, dropped

    @property
    def parts(self) -> list[Int32]:
        if self._parts is None:
            raise DeadLease("these pages were moved or released before")
        return self._parts

    @property
    def pages(self) -> Int32:
        """[pages], in the order of the tokens they hold."""
        parts = self.parts
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0]

    def __len__(self) -> int:
        return len(self.pages)

    def move(self) -> Lease:
        """The same pages under a new lease; this one is dead."""
        pages, self._parts = self.pages, None
        return Lease(self._pool, pages, self.published, self.dropped)

    def release(self) -> None:
        """Give the pages back; this lease is dead."""
        pages, self._parts = self.pages, None
        self._pool._give(pages[self.dropped :])


class PagePool:
    """`total` pages, numbered from 1: page 0 is the null page. Always free + leased + cached == total.

    A page is leased while any lease has it, cached while only the prefix tree knows it, and otherwise free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.tree = PrefixTree()
        # A stack whose top is its end; filled so that the lowest pages are taken first.
        self._stack: Int32 = np.arange(total, NULL_PAGE, -1, dtype=np.int32)
        self._free = total
        self._leased = 0
        self._holders = np.zeros(total + 1, np.int32)  # leases that have the page

    @property
    def free(self) -> int:
        return self._free

    @property
    def leased(self) -> int:
        return self._leased

    @property
    def cached(self) -> int:
        return self.tree.unused

    @property
    def available(self) -> int:
        """Pages that can be taken: the free ones, and then the cached ones, which are forgotten."""
        return self._free + self.tree.unused

    def lease(self, count: int = 0) -> Lease:
        return Lease(self, self._take(count), published=0)

    def unheld(self, pages: Int32) -> Int32:
        """Those of these pages of the tree that no lease has: to share them leaves so many fewer available."""
        unheld: Int32 = pages[self._holders[pages] == 0]
        return unheld

    def share(self, pages: Int32) -> Lease:
        """A lease of pages that the tree has found."""
        unheld = self.unheld(pages)
        self.tree.hold(unheld.tolist())
        self._leased += len(unheld)
        self._holders[pages] += 1
        return Lease(self, pages, published=len(pages))

    def extend(self, lease: Lease, count: int) -> Int32:
        """Put `count` more pages behind those of a lease; returns them."""
        parts, taken = lease.parts, self._take(count)
        parts.append(taken)
        return taken

    def grow(self, leases: Sequence[Lease], counts: Int32) -> Int32:
        """`extend` of `leases[i]` by `counts[i]`; returns all the pages, in that order.

        Many at once, because a thousand decoding slots may need a page in the same step.
        """
        parts = [lease.parts for lease in leases]
        taken = self._take(int(counts.sum()))
        start = 0
        for part, stop in zip(parts, np.cumsum(counts).tolist(), strict=True):
            part.append(taken[start:stop])
            start = stop
        return taken

    def drop(self, lease: Lease, count: int) -> bool:
        """Give back the first `count` pages of a lease, which nobody reads through it any more. False: none yet.

        The published ones go all at once: the tree wants that a page outlives those that follow it.
        """
        if count <= max(lease.dropped, lease.published):
            return False
        pages = lease.pages.copy()
        self._give(pages[lease.dropped : count])
        pages[:count] = NULL_PAGE
        lease._parts, lease.dropped = [pages], count
        return True

    def publish(self, lease: Lease, keys: Iterable[bytes], step: int) -> None:
        """Let others find the pages after the lease's published ones, which `step` or an earlier one writes.

        It ends at a page whose twin is known already: what follows would be found after the twin, which this lease
        does not hold.
        """
        pages = lease.pages[lease.published :].tolist()
        before = int(lease.pages[lease.published - 1]) if lease.published else NULL_PAGE
        lease.published += self.tree.add(before, keys, pages, step)

    def forget(self) -> None:
        """Free the cached pages: what comes now finds nothing of what was before."""
        self._put(self.tree.evict(self.tree.unused))

    def _take(self, count: int) -> Int32:
        if not 0 <= count <= self.available:
            raise ValueError(
                f"{count} pages asked for, {self.available} available: the scheduler must look before it takes"
            )
        if count > self._free:
            self._put(self.tree.evict(count - self._free))
        self._free -= count
        self._leased += count
        taken: Int32 = self._stack[self._free : self._free + count][::-1].copy()
        self._holders[taken] = 1
        return taken

    def _give(self, pages: Int32) -> None:
        self._holders[pages] -= 1
        unheld = pages[self._holders[pages] == 0][::-1].tolist()  # the last page first, as the tree wants it
        self._leased -= len(unheld)
        self._put(self.tree.let_go(unheld))

    def _put(self, pages: Sequence[int]) -> None:
        self._stack[self._free : self._free + len(pages)] = pages
        self._free += len(pages)
