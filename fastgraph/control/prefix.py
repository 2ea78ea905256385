"""The prefix tree: which page holds the keys and values of which tokens, after which others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fastgraph.control.plan import NULL_PAGE, Int32


def page_keys(tokens: Int32, page_size: int) -> Iterator[bytes]:
    """The tokens of each page that they fill: what a page is found by. Made when asked for, as most are not."""
    data, width = tokens.tobytes(), page_size * tokens.itemsize
    return (data[i : i + width] for i in range(0, len(tokens) // page_size * width, width))


class PrefixTree:
    """Pages whose content is known, found by the page before them and the tokens they hold themselves.

    A hash only leads to a page: the tokens are compared, and with them those of every page before it. A page that no
    request holds is kept until another is needed in its place. The longest unused goes first; and since a request lets
    go of its last page first, a page never goes before those that follow it.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, bytes], tuple[int, int]] = {}  # (page before, tokens) -> (page, step writing it)
        self._keys: dict[int, tuple[int, bytes]] = {}  # of each page
        self._unused: OrderedDict[int, None] = OrderedDict()  # the longest unused first

    @property
    def unused(self) -> int:
        return len(self._unused)

    def find(self, keys: Iterable[bytes], step: int) -> tuple[Int32, bool]:
        """The pages that hold the longest known beginning of `keys`, and whether `step` is writing the one after it.

        Steps run in order, so what an earlier one writes is there when this one reads.
        """
        pages: list[int] = []
        page, being_written = NULL_PAGE, False
        for key in keys:
            page, written = self._found.get((page, key), (NULL_PAGE, 0))
            being_written = written >= step
            if page == NULL_PAGE or being_written:
                break
            pages.append(page)
        return np.array(pages, np.int32), being_written

    def add(self, before: int, keys: Iterable[bytes], pages: Iterable[int], step: int) -> int:
        """Make pages known that a request holds, the first of which follows `before`. Returns how many are known now.

        It ends at a page whose content another page is known to hold already.
        """
        count = 0
        for key, page in zip(keys, pages, strict=False):
            place, entry = (before, key), (page, step)
            if self._found.setdefault(place, entry) is not entry:
                break
            self._keys[page] = place
            before = page
            count += 1
        return count

    def hold(self, pages: Iterable[int]) -> None:
        """Requests hold these pages now that nobody held before."""
        for page in pages:
            del self._unused[page]

    def let_go(self, pages: Sequence[int]) -> list[int]:
        """Nobody holds these pages any more. Each comes before the page that it follows. Returns the unknown ones."""
        self._unused.update((page, None) for page in pages if page in self._keys)
        return [page for page in pages if page not in self._keys]

    def evict(self, count: int) -> list[int]:
        """Forget the pages that have been unused for longest: so many."""
        pages = [self._unused.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            del self._found[self._keys.pop(page)]
        return pages
