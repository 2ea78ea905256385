"""What the scheduler knows of each slot, as numpy columns: a step touches all decoding slots at once."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np

from fastgraph.config import MAX_STOP_IDS
from fastgraph.control.plan import Int32, Limits
from fastgraph.control.states import Past, Queued


class Batch(NamedTuple):
    """The slots that can decode one more token, and for how long they need not be looked at again."""

    slots: Int32  # [rows], in slot order
    left: int  # steps, until the first of them has all the tokens that it may have
    room: int  # tokens, for which all of them have pages


class SlotTable:
    """Row s is slot s; row 0, the null slot, stays empty.

    Of a slot's sequence (prompt, then answer), `known` tokens have landed on the host, and the KV of the first
    `scheduled` is written by steps that have been submitted. The device runs ahead of `known` by the steps in flight.
    """

    def __init__(self, limits: Limits) -> None:
        rows = limits.slots + 1
        self.request_id = np.zeros(rows, np.int64)
        self.tokens = np.zeros((rows, limits.max_model_len), np.int32)
        self.prompt = np.zeros(rows, np.int32)  # tokens of the prompt
        self.known = np.zeros(rows, np.int32)
        self.scheduled = np.zeros(rows, np.int32)
        self.capacity = np.zeros(rows, np.int32)  # tokens that the slot's pages hold
        # Of these, tokens in pages that it need not have for itself: found in the prefix tree, or given back
        self.shared = np.zeros(rows, np.int32)
        self.limit = np.zeros(rows, np.int32)  # tokens at which the request is complete
        self.stop_ids = np.full((rows, MAX_STOP_IDS), -1, np.int32)
        self.min_tokens = np.zeros(rows, np.int32)
        self.running = np.zeros(rows, bool)  # tokens that land count; false once the request is finishing
        self.decoding = np.zeros(rows, bool)
        self.incremental = np.zeros(rows, bool)
        self.past = [Past(0.0, 0.0, 0.0, 0)] * rows  # of the slot's request
        self._batch: Batch | None = None  # the last one, while its slots and their pages stay the same
        self._silent: set[int] = set()  # slots whose first token has not landed
        self._stops = 0  # the most stop ids that a request has had

    def admit(self, slot: int, state: Queued, computed: int, shared: int) -> None:
        """`computed` tokens have their KV already, those of the first `shared` in pages of the prefix tree."""
        request = state.request
        prompt = len(request.prompt)
        known = prompt + len(state.answer)
        self.request_id[slot] = request.id
        self.tokens[slot, :prompt] = request.prompt
        self.tokens[slot, prompt:known] = state.answer
        self.prompt[slot] = prompt
        self.known[slot] = known
        self.scheduled[slot] = computed
        self.capacity[slot] = self.shared[slot] = shared
        self.limit[slot] = request.max_length
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        self._stops = max(self._stops, len(request.stop_ids))
        self.min_tokens[slot] = request.sampling.min_tokens
        self.running[slot] = True
        self.decoding[slot] = False
        self.incremental[slot] = request.incremental
        # When a request came in and what was found of it in the prefix tree counts from the first time.
        new = not state.past.admitted
        self.past[slot] = state.past._replace(admitted=perf_counter(), cached_tokens=shared) if new else state.past
        if not state.past.first_token:
            self._silent.add(slot)

    def retire(self, slot: int) -> None:
        """The slot takes part in no further step; what is in flight for it will be dropped."""
        self.running[slot] = self.decoding[slot] = False
        self._silent.discard(slot)
        self._batch = None

    def begin(self, slot: int) -> None:
        """The slot's prompt is computed, from the next step on it decodes."""
        self.decoding[slot] = True
        self._batch = None

    def grow(self, slots: Int32, tokens: Int32) -> None:
        """The slots have pages for so many more tokens."""
        self.capacity[slots] += tokens
        self._batch = None

    def answer(self, slot: int) -> Int32:
        """The tokens generated so far, as a copy: [generated]."""
        answer: Int32 = self.tokens[slot, self.prompt[slot] : self.known[slot]].copy()
        return answer

    def written(self, slot: int) -> Int32:
        """The known tokens whose KV is in the slot's pages, once the steps in flight have run: [tokens]."""
        # The last token of an answer is never computed; what was computed after a stop is not known.
        written: Int32 = self.tokens[slot, : min(self.known[slot], self.scheduled[slot])]
        return written

    def last(self) -> int:
        """The running slot whose request is last in the policy's order."""
        running = self.running.nonzero()[0].tolist()
        return int(max(running, key=lambda slot: (self.past[slot].number, self.request_id[slot])))

    def batch(self) -> Batch:
        """The decoding slots as they are now. The same array, until some come, go or get pages."""
        if self._batch is None or self._batch.left < 1:
            slots: Int32 = self.decoding.nonzero()[0].astype(np.int32)
            # The token sampled after position `scheduled` is number scheduled + 2 of the sequence.
            left = self.limit[slots] - 1 - self.scheduled[slots]
            slots, left = slots[left >= 1], left[left >= 1]
            most = len(self.tokens[0])
            room = (self.capacity[slots] - self.scheduled[slots]).min(initial=most)
            self._batch = Batch(slots, int(left.min(initial=most)), int(room))
        return self._batch

    def schedule(self, batch: Batch, steps: int) -> None:
        """So many steps of the batch are submitted."""
        self.scheduled[batch.slots] += steps
        if batch is self._batch:
            self._batch = Batch(batch.slots, batch.left - steps, batch.room - steps)

    def cramped(self, slots: Int32, tokens: int = 1) -> Int32:
        """Those of `slots` whose pages have no room for the KV of the next tokens that they may have: [rows]."""
        cramped: Int32 = slots[np.minimum(self.scheduled[slots] + tokens, self.limit[slots] - 1) > self.capacity[slots]]
        return cramped

    def land(self, slots: Int32, tokens: Int32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Record the sampled tokens of each slot: [steps, rows].

        Returns how many of them are part of its answer, [rows], and two masks [rows]: ended by a stop id, which is no
        part of it, and ended by length.
        """
        if self._silent:
            now, begun = perf_counter(), self._silent.intersection(slots.tolist())
            for slot in begun:
                self.past[slot] = self.past[slot]._replace(first_token=now)
            self._silent -= begun
        known = self.known[slots]
        step = np.arange(len(tokens))[:, None]
        taken, stopped = np.full(len(slots), len(tokens)), np.zeros(len(slots), bool)
        stops = self.stop_ids[slots, : self._stops] == tokens[..., None]  # [steps, rows, stop ids]
        if stops.any():  # seldom
            stops = stops.any(-1) & (known - self.prompt[slots] + step >= self.min_tokens[slots])
            stopped = stops.any(0)
            taken = np.where(stopped, stops.argmax(0), len(tokens))
        # One index for both, in half the time that two take.
        self.tokens.ravel()[slots.astype(np.int64) * self.tokens.shape[1] + known + step] = tokens
        known += taken
        self.known[slots] = known
        return taken, stopped, ~stopped & (known >= self.limit[slots])
