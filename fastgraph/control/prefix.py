"""The prefix tree: which page holds the keys and values of which tokens, after which others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fastgraph.control.plan import NULL_PAGE, Int32


def page_keys(tokens: Int32, page_size: int) -> list[bytes]:
    """The tokens of each page that they fill: what a page is found by."""
    data, width = tokens.tobytes(), page_size * tokens.itemsize
    return [data[i : i + width] for i in range(0, len(tokens) // page_size * width, width)]


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

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    @property
    def unused(self) -> int:
        return len(self._unused)

    def find(self, keys: Sequence[bytes], step: int) -> tuple[list[int], bool]:
        """The pages that hold the longest known beginning of `keys`, and whether `step` is writing the one after it.

        Steps run in order, so what an earlier one writes is there when this one reads.
        """
        pages: list[int] = []
        page = NULL_PAGE
        for key in keys:
            page, written = self._found.get((page, key), (NULL_PAGE, 0))
            if page == NULL_PAGE or written >= step:
                return pages, page != NULL_PAGE
            pages.append(page)
        return pages, False

    def add(self, before: int, key: bytes, page: int, step: int) -> bool:
        """Make a page known that a request holds. False if another page with the same content is known already."""
        if (before, key) in self._found:
            return False
        self._found[before, key] = page, step
        self._keys[page] = before, key
        return True

    def hold(self, pages: Sequence[int]) -> None:
        """Requests hold these pages now that nobody held before."""
        for page in pages:
            del self._unused[page]

    def let_go(self, pages: Sequence[int]) -> None:
        """Nobody holds these pages any more. Each comes before the page that it follows."""
        for page in pages:
            self._unused[page] = None

    def evict(self) -> int:
        """Forget the page that has been unused for longest."""
        page, _ = self._unused.popitem(last=False)
        del self._found[self._keys.pop(page)]
        return page
