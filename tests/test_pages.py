"""Pages are held through a lease or not at all, and none is ever lost, doubled or used after it was given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgraph.config import SamplingParams
from fastgraph.control import states
from fastgraph.control.pages import Lease, PagePool
from fastgraph.control.plan import NULL_PAGE, Int32
from fastgraph.control.states import Past, Request, Resources
from fastgraph.errors import DeadLease


def grow(pool: PagePool, lease: Lease, count: int) -> Int32:
    return pool.grow([lease], np.array([count], np.int32))


def test_a_new_pool_is_free_and_never_hands_out_the_null_page() -> None:
    pool = PagePool(5)
    assert (pool.free, pool.leased, pool.total) == (5, 0, 5)
    lease = pool.lease(5)
    assert sorted(lease.pages.tolist()) == [1, 2, 3, 4, 5]
    assert NULL_PAGE not in lease.pages
    assert lease.pages.dtype == np.int32


def test_a_moved_lease_is_dead_and_its_pages_live_on() -> None:
    pool = PagePool(4)
    old = pool.lease(2)
    pages = old.pages.tolist()
    new = old.move()
    assert new.pages.tolist() == pages
    assert (pool.free, pool.leased) == (2, 2)
    for use in (lambda: old.pages, lambda: len(old), old.move, old.release, lambda: grow(pool, old, 1)):
        with pytest.raises(DeadLease, match="moved or released"):
            use()
    assert (pool.free, pool.leased) == (2, 2)


def test_a_released_lease_is_dead_and_cannot_give_its_pages_back_twice() -> None:
    pool = PagePool(4)
    lease = pool.lease(3)
    lease.release()
    assert (pool.free, pool.leased) == (4, 0)
    for use in (lambda: lease.pages, lambda: len(lease), lease.move, lease.release, lambda: grow(pool, lease, 1)):
        with pytest.raises(DeadLease, match="moved or released"):
            use()
    assert (pool.free, pool.leased) == (4, 0)


def test_growing_keeps_the_order_of_the_pages_a_lease_has() -> None:
    pool = PagePool(9)
    first, second = pool.lease(2), pool.lease()
    before = first.pages.tolist()
    taken = pool.grow([first, second], np.array([3, 2], np.int32)).tolist()
    assert first.pages.tolist() == before + taken[:3]
    assert second.pages.tolist() == taken[3:]
    assert (pool.free, pool.leased) == (2, 7)


def test_asking_for_more_than_is_free_is_refused_and_changes_nothing() -> None:
    pool = PagePool(4)
    lease = pool.lease(2)
    pages = lease.pages.tolist()
    with pytest.raises(ValueError, match="3 pages asked for, 2 available"):
        pool.lease(3)
    with pytest.raises(ValueError, match="5 pages asked for"):
        pool.grow([lease, pool.lease()], np.array([2, 3], np.int32))
    with pytest.raises(ValueError, match="-1 pages"):
        pool.lease(-1)
    assert lease.pages.tolist() == pages
    assert (pool.free, pool.leased) == (2, 2)


def test_pages_given_back_are_the_next_to_be_taken() -> None:
    pool = PagePool(6)
    lease, _kept = pool.lease(3), pool.lease(2)
    pages = lease.pages.tolist()
    lease.release()
    assert pool.lease(3).pages.tolist() == pages


def test_a_transition_consumes_its_state() -> None:
    pool = PagePool(4)
    request = Request(1, np.zeros(3, np.int32), SamplingParams(), 0, (), 5, False)
    waiting = states.Waiting(request, np.empty(0, np.int32), Past(0.0, 0.0, 0))
    lease = pool.lease(2)
    prefilling = states.admit(waiting, 1, lease)
    decoding = states.decode(prefilling)
    finishing = states.finish(decoding, last_step=3)
    for used in (Resources(1, lease), prefilling.resources, decoding.resources):
        with pytest.raises(DeadLease):
            used.move()
    for again in (
        lambda: states.admit(waiting, 1, lease),
        lambda: states.decode(prefilling),
        lambda: states.finish(prefilling, 3),
        lambda: states.finish(decoding, 3),
        lambda: states.retract(decoding, waiting.answer, waiting.past),
    ):
        with pytest.raises(DeadLease):
            again()
    assert (finishing.last_step, pool.leased) == (3, 2)
    finished = states.release(finishing)
    assert (finished.request, pool.leased) == (request, 0)
    with pytest.raises(DeadLease):
        states.release(finishing)


def test_a_retracted_state_has_given_everything_back() -> None:
    pool = PagePool(4)
    request = Request(1, np.zeros(3, np.int32), SamplingParams(), 0, (), 9, False)
    waiting = states.Waiting(request, np.empty(0, np.int32), Past(0.0, 0.0, 0))
    decoding = states.decode(states.admit(waiting, 1, pool.lease(2)))
    again = states.retract(decoding, np.array([7, 8], np.int32), Past(1.0, 2.0, 3))
    assert (again.request, again.answer.tolist(), again.past) == (request, [7, 8], Past(1.0, 2.0, 3))
    assert pool.free == 4
    with pytest.raises(DeadLease):
        states.finish(decoding, 1)


@given(st.data())
def test_no_page_is_lost_or_doubled_whatever_happens(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    pool = PagePool(total)
    live: list[tuple[Lease, list[int]]] = []  # with the pages it must have
    dead: list[Lease] = []
    for _ in range(data.draw(st.integers(0, 25))):
        action = data.draw(st.sampled_from(["lease", "grow", "move", "release", "dead"]))
        if action == "lease":
            count = data.draw(st.integers(0, total + 1))
            if count > pool.free:
                with pytest.raises(ValueError, match="asked for"):
                    pool.lease(count)
            else:
                lease = pool.lease(count)
                live.append((lease, lease.pages.tolist()))
        elif action == "dead" and dead:
            with pytest.raises(DeadLease):
                data.draw(st.sampled_from(dead)).release()
        elif action == "grow":
            chosen = data.draw(st.lists(st.sampled_from(range(len(live))), unique=True)) if live else []
            counts = [data.draw(st.integers(0, 3)) for _ in chosen]
            if sum(counts) <= pool.free:
                taken = pool.grow([live[i][0] for i in chosen], np.array(counts, np.int32)).tolist()
                for i, count in zip(chosen, counts, strict=True):
                    live[i] = live[i][0], live[i][1] + taken[:count]
                    taken = taken[count:]
        elif live:
            lease, pages = live.pop(data.draw(st.integers(0, len(live) - 1)))
            dead.append(lease)
            if action == "move":
                live.append((lease.move(), pages))
            else:
                lease.release()
        held = [page for lease, _ in live for page in lease.pages.tolist()]
        assert all(lease.pages.tolist() == pages for lease, pages in live)
        assert len(held) == len(set(held)) == pool.leased
        assert set(held) <= set(range(1, total + 1))
        assert pool.free + pool.leased == total
    for lease, _ in live:
        lease.release()
    assert pool.free == total
    assert sorted(pool.lease(total).pages.tolist()) == list(range(1, total + 1))
