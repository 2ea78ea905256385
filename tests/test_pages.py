"""Pages are held through a lease or not at all, and none is ever lost, doubled or used after it was given back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from brute_force import BruteForce, Holding
from hypothesis import given
from hypothesis import strategies as st

from fastgraph.config import SamplingParams
from fastgraph.control import states
from fastgraph.control.pages import Lease, PagePool
from fastgraph.control.plan import NULL_PAGE, Int32
from fastgraph.control.prefix import page_keys
from fastgraph.control.states import Past, Request, Resources
from fastgraph.errors import DeadLease


def grow(pool: PagePool, lease: Lease, count: int) -> Int32:
    return pool.grow([lease], np.array([count], np.int32))


def found_of(pool: PagePool, keys: Sequence[bytes], step: int) -> tuple[list[int], bool]:
    pages, being_written = pool.tree.find(keys, step)
    return pages.tolist(), being_written


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
    waiting = states.Waiting(request, np.empty(0, np.int32), Past(0.0, 0.0, 0.0, 0))
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


def test_a_saved_state_holds_host_pages_alone_and_gives_them_back_when_it_is_restored() -> None:
    pool, host = PagePool(4), PagePool(3)
    request = Request(1, np.zeros(3, np.int32), SamplingParams(), 0, (), 9, False)
    waiting = states.Waiting(request, np.empty(0, np.int32), Past(0.0, 0.0, 0.0, 0))
    decoding = states.decode(states.admit(waiting, 1, pool.lease(2)))
    saved = host.lease(2)
    retracted = states.save(decoding, np.array([7, 8], np.int32), Past(0.5, 1.0, 2.0, 3), 4, saved)
    assert (pool.free, host.free) == (4, 1)
    assert (retracted.answer.tolist(), retracted.past, retracted.computed) == ([7, 8], Past(0.5, 1.0, 2.0, 3), 4)
    with pytest.raises(DeadLease):
        saved.release()
    prefilling = states.restore(retracted, 3, pool.lease(2))
    assert (prefilling.resources.slot, pool.free, host.free) == (3, 2, 3)
    with pytest.raises(DeadLease):
        states.restore(retracted, 3, pool.lease(2))


def test_a_retracted_state_has_given_everything_back() -> None:
    pool = PagePool(4)
    request = Request(1, np.zeros(3, np.int32), SamplingParams(), 0, (), 9, False)
    waiting = states.Waiting(request, np.empty(0, np.int32), Past(0.0, 0.0, 0.0, 0))
    decoding = states.decode(states.admit(waiting, 1, pool.lease(2)))
    again = states.retract(decoding, np.array([7, 8], np.int32), Past(0.5, 1.0, 2.0, 3))
    assert (again.request, again.answer.tolist(), again.past) == (request, [7, 8], Past(0.5, 1.0, 2.0, 3))
    assert pool.free == 4
    with pytest.raises(DeadLease):
        states.finish(decoding, 1)


def test_a_published_page_is_found_by_its_tokens_and_all_those_before_it() -> None:
    pool = PagePool(8)
    lease = pool.lease(3)
    pages = lease.pages.tolist()
    pool.publish(lease, [b"aa", b"bb", b"aa"], step=1)
    for keys, found in (
        ([b"aa", b"bb", b"aa"], 3),
        ([b"aa", b"bb", b"aa", b"aa"], 3),
        ([b"aa", b"bb", b"cc"], 2),
        ([b"aa", b"aa"], 1),  # a page with these tokens is known, but not after these
        ([b"bb"], 0),
        ([], 0),
    ):
        assert found_of(pool, keys, step=2) == (pages[:found], False)


def test_hashes_that_collide_mix_no_prefixes_up() -> None:
    class Colliding(bytes):
        def __hash__(self) -> int:
            return 1

    pool = PagePool(8)
    first, second = pool.lease(2), pool.lease(2)
    pool.publish(first, [Colliding(b"aa"), Colliding(b"bb")], step=1)
    pool.publish(second, [Colliding(b"cc"), Colliding(b"bb")], step=1)
    assert found_of(pool, [Colliding(b"cc"), Colliding(b"bb")], 2) == (second.pages.tolist(), False)
    assert found_of(pool, [Colliding(b"aa"), Colliding(b"bb")], 2) == (first.pages.tolist(), False)
    assert found_of(pool, [Colliding(b"bb"), Colliding(b"aa")], 2) == ([], False)


def test_what_a_step_writes_is_found_by_later_steps_and_announced_to_this_one() -> None:
    pool = PagePool(8)
    lease = pool.lease(2)
    pool.publish(lease, [b"aa"], step=4)
    pool.publish(lease, [b"bb"], step=5)
    pages = lease.pages.tolist()
    assert found_of(pool, [b"aa", b"bb"], step=4) == ([], True)
    assert found_of(pool, [b"aa", b"bb"], step=5) == (pages[:1], True)
    assert found_of(pool, [b"aa", b"cc"], step=5) == (pages[:1], False)
    assert found_of(pool, [b"aa", b"bb"], step=6) == (pages, False)


def test_shared_pages_stay_until_the_last_lease_lets_go_and_are_cached_then() -> None:
    pool = PagePool(4)
    first = pool.lease(3)
    pool.publish(first, [b"aa", b"bb"], step=1)
    found, _ = pool.tree.find([b"aa", b"bb"], step=2)
    second = pool.share(found)
    assert second.published == 2
    assert (pool.free, pool.leased, pool.cached) == (1, 3, 0)
    first.release()
    assert (pool.free, pool.leased, pool.cached) == (2, 2, 0)
    second.move().release()
    assert (pool.free, pool.leased, pool.cached, pool.available) == (2, 0, 2, 4)
    assert pool.unheld(found).tolist() == found.tolist()
    third = pool.share(found)
    assert (pool.free, pool.leased, pool.cached) == (2, 2, 0)
    assert not len(pool.unheld(found))
    third.release()


def test_the_longest_unused_goes_first_and_of_a_prefix_its_end() -> None:
    pool = PagePool(5)
    old, new = pool.lease(3), pool.lease(2)
    pool.publish(old, [b"aa", b"bb", b"cc"], step=1)
    pool.publish(new, [b"dd", b"ee"], step=1)
    old.release()
    new.release()
    pool.share(pool.tree.find([b"aa"], 2)[0]).release()  # used again: its own end is older now
    for known in ([b"aa", b"bb"], [b"aa"], [b"aa"], [b"aa"], []):
        pool.lease(1)
        assert len(pool.tree.find([b"aa", b"bb", b"cc"], 2)[0]) == len(known)
    assert pool.available == 0
    with pytest.raises(ValueError, match="1 pages asked for, 0 available"):
        pool.lease(1)


def test_publishing_ends_at_a_twin_and_goes_on_when_it_has_gone() -> None:
    pool = PagePool(6)
    first, second = pool.lease(2), pool.lease(2)
    pool.publish(first, [b"aa", b"bb"], step=1)
    pool.publish(second, [b"aa", b"bb"], step=1)
    assert second.published == 0
    twins = first.pages.tolist()
    first.release()
    pool.lease(4)  # the twins go
    pool.publish(second, [b"aa", b"bb"], step=2)
    assert second.published == 2
    assert found_of(pool, [b"aa", b"bb"], 3) == (second.pages.tolist(), False)
    assert not set(twins) & set(second.pages.tolist())


def test_page_keys_are_the_tokens_of_full_pages() -> None:
    keys = page_keys(np.array([1, 2, 3, 4, 5], np.int32), 2)
    assert [np.frombuffer(key, np.int32).tolist() for key in keys] == [[1, 2], [3, 4]]
    assert not [*page_keys(np.array([1], np.int32), 2), *page_keys(np.empty(0, np.int32), 2)]


@given(st.data())
def test_no_page_is_lost_or_doubled_whatever_happens(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    pool, model = PagePool(total), BruteForce(total, page_size=1)
    live: list[tuple[Lease, Holding, list[int]]] = []  # with what they must have, and what it is to hold
    dead: list[Lease] = []

    def keys_of(tokens: list[int]) -> list[bytes]:
        return [bytes([token]) for token in tokens]

    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["start", "start", "grow", "publish", "drop", "move", "release", "dead"]))
        if action == "start":
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=5))
            found, _ = pool.tree.find(keys_of(tokens), step=1)
            spare = pool.available - len(pool.unheld(found))
            lease, holding = pool.share(found), model.start(tokens)
            live.append((lease, holding, tokens))
            assert found.tolist() == holding.pages
            count = len(tokens) - len(found)
            if count <= spare:
                model.room(count)
                model.grow(holding, grow(pool, lease, count).tolist())
            else:
                with pytest.raises(ValueError, match="asked for"):
                    grow(pool, lease, count)
        elif action == "dead" and dead:
            with pytest.raises(DeadLease):
                data.draw(st.sampled_from(dead)).release()
        elif action == "grow":
            chosen = data.draw(st.lists(st.sampled_from(range(len(live))), unique=True)) if live else []
            counts = [data.draw(st.integers(0, 3)) for _ in chosen]
            if sum(counts) <= pool.available:
                model.room(sum(counts))
                taken = pool.grow([live[i][0] for i in chosen], np.array(counts, np.int32)).tolist()
                for i, count in zip(chosen, counts, strict=True):
                    model.grow(live[i][1], taken[:count])
                    taken = taken[count:]
        elif live:
            place = data.draw(st.integers(0, len(live) - 1))
            lease, holding, tokens = live[place]
            if action == "publish" and not holding.dropped:
                pool.publish(lease, keys_of(tokens)[lease.published :], step=0)
                model.publish(holding, tokens[: len(holding.pages)])
            elif action == "drop":
                count = data.draw(st.integers(0, len(holding.pages)))
                if pool.drop(lease, count):
                    model.drop(holding, count)
                else:
                    assert count <= max(holding.dropped, len(holding.known))
            elif action == "move":
                dead.append(lease)
                live[place] = lease.move(), holding, tokens
            elif action == "release":
                del live[place]
                dead.append(lease)
                lease.release()
                model.release(holding)
        for lease, holding, _ in live:
            assert lease.pages.tolist() == [NULL_PAGE] * holding.dropped + holding.pages[holding.dropped :]
            assert holding.dropped or lease.published == len(holding.known)
        assert len(model.held) == pool.leased
        assert model.held <= set(range(1, total + 1))
        assert pool.free + pool.leased + pool.cached == total
        assert set(pool.tree._keys) == set(model.page.values())
    for lease, _, _ in live:
        lease.release()
    assert pool.available == total
    assert sorted(pool.lease(total).pages.tolist()) == list(range(1, total + 1))
