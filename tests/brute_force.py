"""The prefix cache as one would write it down, kept beside the real one: nothing is linked, all is looked for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from simulated import SimulatedDevice

from fastgraph.control.plan import Admission, Limits, StepPlan

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Holding:
    """Pages that somebody has, in the order of their tokens."""

    pages: list[int]
    known: list[Tokens]  # the sequences that the cache knows the first of them by, each with all before it
    dropped: int = 0  # of the first pages, how many were given back


class BruteForce:
    """Whole sequences, the page that each ends with, and when each was let go of."""

    def __init__(self, total: int, page_size: int) -> None:
        self.total, self.page_size = total, page_size
        self.page: dict[Tokens, int] = {}
        self.evicted = 0
        self._let_go: dict[Tokens, int] = {}
        self._clock = 0
        self._holdings: list[Holding] = []

    @property
    def held(self) -> set[int]:
        return {page for holding in self._holdings for page in holding.pages[holding.dropped :]}

    def start(self, tokens: Sequence[int]) -> Holding:
        """Hold all that is known of a sequence."""
        known = list(takewhile(self.page.__contains__, self._prefixes(tokens)))
        holding = Holding([self.page[prefix] for prefix in known], known)
        self._holdings.append(holding)
        return holding

    def room(self, count: int) -> None:
        """Forget what must be forgotten, for `count` pages to be free."""
        held = self.held
        while self.total - len(held | set(self.page.values())) < count:
            unheld = [prefix for prefix, page in self.page.items() if page not in held]
            leaves = [p for p in unheld if not any(q[: len(p)] == p for q in self.page if len(q) > len(p))]
            del self.page[min(leaves, key=lambda prefix: (self._let_go[prefix], -len(prefix)))]
            self.evicted += 1

    def grow(self, holding: Holding, pages: Sequence[int]) -> None:
        """`room` was made for them. Which of the free pages they are does not matter."""
        assert not (self.held | set(self.page.values())) & set(pages), "a page is taken that is not free"
        holding.pages += pages

    def publish(self, holding: Holding, tokens: Sequence[int]) -> None:
        """Its pages hold these tokens: they are known from now on, up to one whose twin is known already."""
        for prefix in self._prefixes(tokens)[len(holding.known) :]:
            if prefix in self.page:
                break
            self.page[prefix] = holding.pages[len(holding.known)]
            holding.known.append(prefix)

    def drop(self, holding: Holding, count: int) -> None:
        """The first `count` pages are given back, and with them all that is known of it: see `PagePool.drop`."""
        assert count >= len(holding.known)
        holding.dropped = count
        self._let_go_of(holding)

    def release(self, holding: Holding) -> None:
        self._holdings.remove(holding)
        self._let_go_of(holding)

    def _let_go_of(self, holding: Holding) -> None:
        self._clock += 1
        held = self.held
        self._let_go |= {prefix: self._clock for prefix in holding.known if self.page[prefix] not in held}
        holding.known = []

    def _prefixes(self, tokens: Sequence[int]) -> list[Tokens]:
        size = self.page_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]


class ExpectedCache:
    """What a scheduler's cache must know, by what its plans, results and ends say, and by the device's history."""

    def __init__(self, limits: Limits, device: SimulatedDevice) -> None:
        self.model = BruteForce(limits.pages, limits.page_size)
        self._limits, self._device = limits, device
        self._slots: dict[int, int] = {}  # of running requests, by number
        self._holdings: dict[int, Holding] = {}  # by slot
        self._finishing: deque[tuple[int, Holding]] = deque()  # with the last step that may write it
        self._saved: dict[int, int] = {}  # tokens of retracted requests that are on the host, by number
        self._drops: list[tuple[int, int]] = []  # (slot, pages) of this plan, which shows none of them
        self._landed = 0

    def dropped(self, slot: int, count: int) -> None:
        """While a step is planned, what is behind a slot's window comes back."""
        self._drops.append((slot, count))

    def retracted(self, number: int, saved: int) -> None:
        """Between two steps, or while the next is planned. `saved` tokens are copied to the host."""
        self._drop()
        slot, self._saved[number] = self._slots[number], saved
        self.model.release(self._end(number, len(self._device.tenants[slot].history)))

    def planned(self, plan: StepPlan | None) -> None:
        """A step has been submitted, or there is none. Pages were dropped and taken in this order."""
        pages: dict[int, list[int]] = defaultdict(list)
        for slot, _, page in plan.page_writes.tolist() if plan else ():
            pages[slot].append(page)
        decoding = set(plan.decode_slots.tolist()) if plan else set()
        self._drop(decoding)
        grown = [slot for slot in pages if slot in decoding]
        self.model.room(sum(len(pages[slot]) for slot in grown))
        for slot in grown:
            self.model.grow(self._holdings[slot], pages[slot])
        self._drop()
        if plan:
            self._prefilled(plan, pages)

    def _prefilled(self, plan: StepPlan, pages: Mapping[int, list[int]]) -> None:
        admissions = {admission.slot: admission for admission in plan.admissions}
        written: set[Tokens] = set()  # by this very step
        for span in plan.spans:
            slot, more = span.slot, pages.get(span.slot, [])
            if slot in admissions:
                found = self._admitted(admissions[slot], written)
                assert more[: len(found)] == found, "what is known of a request is not what it finds"
                more = more[len(found) :]
            holding = self._holdings[slot]
            self.model.room(len(more))
            self.model.grow(holding, more)
            before = len(holding.known)
            self._publish(slot, span.start + len(span.ids))
            written |= set(holding.known[before:])

    def _admitted(self, admission: Admission, written: set[Tokens]) -> list[int]:
        """The pages that it must find."""
        sequence = [*admission.prompt.tolist(), *admission.answer.tolist()]
        holding = self.model.start(sequence[:-1])  # the last token is computed in any case, for its logits
        assert not set(holding.known) & written, "pages are read by the step that writes them"
        self._slots[admission.seed], self._holdings[admission.slot] = admission.slot, holding
        found, saved = len(holding.pages) * self._limits.page_size, self._saved.pop(admission.seed, 0)
        assert admission.computed == max(found, saved)
        return holding.pages.copy()

    def ended(self, number: int, known: int) -> None:
        """With `known` tokens, prompt and answer. The pages stay held while steps in flight may write them."""
        if number in self._slots:  # or it had none
            self._finishing.append((self._device.steps, self._end(number, known)))
        self._saved.pop(number, None)
        self._release()

    def landed(self, step: int) -> None:
        """After the ends that came of it."""
        self._landed = step
        self._release()

    def _release(self) -> None:
        while self._finishing and self._finishing[0][0] <= self._landed:
            self.model.release(self._finishing.popleft()[1])

    def _drop(self, slots: set[int] | None = None) -> None:
        """Those of `slots`, or all."""
        now = [drop for drop in self._drops if slots is None or drop[0] in slots]
        self._drops = [drop for drop in self._drops if drop not in now]
        for slot, count in now:
            self.model.drop(self._holdings[slot], count)

    def _end(self, number: int, known: int) -> Holding:
        slot = self._slots.pop(number)
        # What was computed after a stop is not known, and the last token of an answer is not computed.
        self._publish(slot, min(known, self._device.tenants[slot].length))
        return self._holdings.pop(slot)

    def _publish(self, slot: int, tokens: int) -> None:
        """The first `tokens` of the slot's sequence are in its pages."""
        if self._limits.prefix_cache and not self._holdings[slot].dropped:
            tokens = min(tokens, self._limits.window or tokens)
            self.model.publish(self._holdings[slot], self._device.tenants[slot].history[:tokens])
