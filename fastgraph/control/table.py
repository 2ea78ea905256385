"""What the scheduler knows of each slot, as numpy columns: a step touches all decoding slots at once."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from fastgraph.config import MAX_STOP_IDS
from fastgraph.control.plan import Int32, Limits
from fastgraph.control.states import Past, Queued


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
        self.admitted_at = np.zeros(rows)  # seconds of time.perf_counter()
        self.first_token_at = np.zeros(rows)  # the same; 0 until it has landed
        self.cached_tokens = np.zeros(rows, np.int32)  # of the prompt, found in the prefix tree at first
        self.number = np.zeros(rows)  # what the policy says of the request

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
        self.min_tokens[slot] = request.sampling.min_tokens
        self.running[slot] = True
        self.decoding[slot] = False
        self.incremental[slot] = request.incremental
        self.admitted_at[slot] = state.past.admitted or perf_counter()
        self.first_token_at[slot] = state.past.first_token
        self.cached_tokens[slot] = state.past.cached_tokens if state.past.admitted else shared
        self.number[slot] = state.past.number

    def retire(self, slot: int) -> None:
        """The slot takes part in no further step; what is in flight for it will be dropped."""
        self.running[slot] = self.decoding[slot] = False

    def answer(self, slot: int) -> Int32:
        """The tokens generated so far, as a copy: [generated]."""
        answer: Int32 = self.tokens[slot, self.prompt[slot] : self.known[slot]].copy()
        return answer

    def written(self, slot: int) -> Int32:
        """The known tokens whose KV is in the slot's pages, once the steps in flight have run: [tokens]."""
        # The last token of an answer is never computed; what was computed after a stop is not known.
        written: Int32 = self.tokens[slot, : min(self.known[slot], self.scheduled[slot])]
        return written

    def pasts(self, slots: Int32) -> list[Past]:
        columns = (self.number, self.admitted_at, self.first_token_at, self.cached_tokens)  # in the order of Past
        return list(map(Past, *(column[slots].tolist() for column in columns)))

    def past(self, slot: int) -> Past:
        return self.pasts(np.array([slot], np.int32))[0]

    def last(self) -> int:
        """The running slot whose request is last in the policy's order."""
        running = np.flatnonzero(self.running)
        return int(running[np.lexsort((self.request_id[running], self.number[running]))[-1]])

    def ready(self) -> Int32:
        """Slots that can decode one more token, in slot order: [rows]."""
        # The token sampled after position `scheduled` is number scheduled + 2 of the sequence.
        ready: Int32 = np.flatnonzero(self.decoding & (self.scheduled + 2 <= self.limit)).astype(np.int32)
        return ready

    def cramped(self, slots: Int32, tokens: int = 1) -> Int32:
        """Those of `slots` whose pages have no room for the KV of the next tokens that they may have: [rows]."""
        cramped: Int32 = slots[np.minimum(self.scheduled[slots] + tokens, self.limit[slots] - 1) > self.capacity[slots]]
        return cramped

    def room(self, slots: Int32) -> int:
        """How many tokens each of `slots` can decode in the pages it has, before its answer is as long as it may be."""
        return int((np.minimum(self.limit[slots] - 1, self.capacity[slots]) - self.scheduled[slots]).min())

    def land(self, slots: Int32, tokens: Int32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Record the sampled tokens of each slot: [steps, rows].

        Returns how many of them are part of its answer, [rows], and two masks [rows]: ended by a stop id, which is no
        part of it, and ended by length.
        """
        known = self.known[slots]
        step = np.arange(len(tokens))[:, None]
        generated = known - self.prompt[slots]
        if not generated.all():
            self.first_token_at[slots[generated == 0]] = perf_counter()
        taken, stopped = np.full(len(slots), len(tokens)), np.zeros(len(slots), bool)
        stops = self.stop_ids[slots] == tokens[..., None]  # [steps, rows, stop ids]
        if stops.any():  # seldom
            stops = stops.any(-1) & (generated + step >= self.min_tokens[slots])
            stopped = stops.any(0)
            taken = np.where(stopped, stops.argmax(0), len(tokens))
        self.tokens[slots, known + step] = tokens
        self.known[slots] = known + taken
        return taken, stopped, ~stopped & (known + taken >= self.limit[slots])
