"""How requests that run get their pages: a prompt as it is computed, a decoding slot some ahead."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastgraph.control.draft import Draft
from fastgraph.control.pages import Lease, PagePool
from fastgraph.control.plan import Int32, Limits
from fastgraph.control.states import Decoding, Prefilling, State
from fastgraph.control.table import SlotTable

# Pages a decoding slot is given at once, so that most steps change no page table: the more if nobody waits for them,
# and if so many times as many are free. With 2 times, requests that came in bursts pushed a third more others out.
PAGES_AHEAD, MOST_AHEAD, PLENTY = 4, 16, 8


class Growth:
    """Takes pages from the pool, puts them behind those of a lease, and says so to the slot table and the plan."""

    def __init__(self, limits: Limits, table: SlotTable, pool: PagePool, states: Mapping[int, State]) -> None:
        self._limits, self._table, self._pool, self._states = limits, table, pool, states

    def extend(self, state: Prefilling, tokens: int, draft: Draft) -> None:
        """Have the request's pages hold so many tokens, at least."""
        slot, lease, size = state.resources.slot, state.resources.lease, self._limits.page_size
        held, wanted = len(lease), -(-tokens // size)
        if held < wanted:
            draft.write_pages(slot, held, self._pool.extend(lease, wanted - held))
            self._table.capacity[slot] = wanted * size

    def extend_decoding(self, slots: Int32, running: int, waiting: bool, draft: Draft) -> None:
        """Give pages to those decoding slots that will soon need some. There are enough for who cannot do without.

        running: requests that have a slot. waiting: whether others want one.
        """
        share = self._share(running, waiting)
        cramped = self._soon_cramped(slots, share)
        if cramped.size:
            size = self._limits.page_size
            ask = -(-(self._table.limit[cramped] - 1) // size) - self._table.capacity[cramped] // size
            draft.page_writes.append(self._grow(cramped, np.minimum(ask, max(share, 1))))

    def drop_behind(self, slots: Int32) -> None:
        """Give back pages that no layer looks back to any more. Who gets them writes in a step after those that did."""
        if window := self._limits.window:
            behind = (self._table.scheduled[slots] + 1 - window) // self._limits.page_size
            for slot, lease, count in zip(slots.tolist(), self._leases(slots), behind.tolist(), strict=True):
                if self._pool.drop(lease, count):
                    self._table.shared[slot] = count * self._limits.page_size

    def _share(self, running: int, waiting: bool) -> int:
        """Pages to give a decoding slot at once. What one has ahead, another may lack, and be pushed out for it."""
        most = PAGES_AHEAD
        if not waiting and not self._limits.window:
            most = max(most, min(self._pool.free // (PLENTY * running), MOST_AHEAD))
        return min(self._pool.available // running, most)

    def _soon_cramped(self, slots: Int32, share: int) -> Int32:
        """Those of `slots` to give pages to. While there are plenty, many at once, so that most plans need none."""
        plenty = not self._limits.window and self._pool.available >= 2 * share * len(slots)
        ahead = share * self._limits.page_size // 2 if plenty else 0
        cramped = self._table.cramped(slots, self._limits.multi_step + ahead)
        return cramped if len(cramped) <= self._pool.available else self._table.cramped(slots)  # who cannot do without

    def _grow(self, slots: Int32, counts: Int32) -> Int32:
        """Give running slots more pages. Returns the writes to their page tables: [pages, 3]."""
        pages = self._pool.grow(self._leases(slots), counts)
        held = self._table.capacity[slots] // self._limits.page_size
        first = np.cumsum(counts) - counts  # where in `pages` each slot's begin
        index = np.arange(len(pages)) + np.repeat(held - first, counts)
        self._table.grow(slots, counts * self._limits.page_size)
        return np.stack([np.repeat(slots, counts), index, pages], axis=1).astype(np.int32)

    def _leases(self, slots: Int32) -> list[Lease]:
        """Those of running requests, by their slots."""
        states = map(self._states.__getitem__, self._table.request_id[slots].tolist())
        return [state.resources.lease for state in states if isinstance(state, (Prefilling, Decoding))]
