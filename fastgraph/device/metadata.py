"""The one path that prepares a step's inputs: capture, replay and eager all come through here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgraph.control.plan import NULL_SLOT, Int32, Limits, StepPlan
from fastgraph.device.upload import upload
from fastgraph.kernels.slots import FROM_SLOT


class StepInputs(NamedTuple):
    """What the step reads that the slots do not hold. Row r owns tokens [query_start[r], query_start[r + 1])."""

    ids: Tensor  # [tokens] int32, FROM_SLOT in decode rows
    offsets: Tensor  # [tokens] int32, place within the row
    token_slots: Tensor  # [tokens] int32
    slots: Tensor  # [rows] int32
    sampling_slots: Tensor  # [rows] int32, the null slot where the row's prompt goes on
    query_start: Tensor  # [rows + 1] int32
    last: Tensor  # [rows] int32, each row's last token
    query_lengths: Tensor  # [rows] int32


class StepMetadata:
    """Static input buffers, of which a step reads the front. A captured graph reads the very same addresses.

    Every input starts its own storage: a compiled model takes another offset for another graph.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        rows, tokens = max(limits.slots, 2), limits.max_step_tokens  # warming up takes a row of each kind

        def full(size: int, value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.int32, device=device)

        # Decode rows are alike (one token, the slot's last), so of a decode step only the slots ever change.
        self._decode = StepInputs(
            ids=full(rows, FROM_SLOT),
            offsets=full(rows, 0),
            token_slots=full(rows, NULL_SLOT),
            slots=full(rows, NULL_SLOT),
            sampling_slots=full(rows, NULL_SLOT),
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
            last=torch.arange(rows, dtype=torch.int32, device=device),
            query_lengths=full(rows, 1),
        )
        self._mixed = StepInputs(*(full(size, 0) for size in _sizes(tokens, rows + 1)))
        self.rows, self._device = limits.slots, device
        self._refreshed: tuple[int, Int32, StepInputs] | None = None  # the last decode step's size, slots and inputs

    def refresh_decode_metadata(self, bs: int, actual_bs: int, slots: Int32, *, for_graph_replay: bool) -> StepInputs:
        """Inputs of a decode step of `bs` rows, of which the first `actual_bs` are live.

        slots: [actual_bs]. Rows [actual_bs, bs) are padding: they point at the null slot, whose page is page 0.
        Capture is a refresh with actual_bs=0; a replay reads the same buffers. Without a graph nothing is padded.
        """
        assert len(slots) == actual_bs <= bs
        assert for_graph_replay or bs == actual_bs
        if self._refreshed is not None and self._refreshed[0] == bs:
            before = self._refreshed[1]
            if before is slots or np.array_equal(before, slots):
                return self._refreshed[2]  # the same batch as in the last decode step: everything stands there
        padded = np.full(bs, NULL_SLOT, np.int32)
        padded[:actual_bs] = slots
        inputs = StepInputs(*(buffer[:bs] for buffer in self._decode))._replace(
            query_start=self._decode.query_start[: bs + 1]
        )
        on_device = upload(padded, self._device)
        torch._foreach_copy_([inputs.token_slots, inputs.slots, inputs.sampling_slots], [on_device] * 3)
        self._refreshed = bs, slots, inputs
        return inputs

    def refresh_mixed_metadata(self, plan: StepPlan, tokens: int | None = None) -> StepInputs:
        """Inputs of a step with prefill spans: decode rows first, then a row for each span. One packed copy.

        `tokens`: how many the step is padded to, for a captured graph. Padding tokens belong to no row and write to
        page 0; the rows that are padding have no tokens.
        """
        decoding = plan.decode_slots
        lengths = np.array([1] * len(decoding) + [len(s.ids) for s in plan.spans], np.int32)
        slots = np.concatenate([decoding, np.array([s.slot for s in plan.spans], np.int32)])
        ends = np.array([s.slot if s.samples else NULL_SLOT for s in plan.spans], np.int32)
        start = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        total, rows = int(start[-1]), len(slots)
        sizes = _sizes(total, rows) if tokens is None else _sizes(tokens, rows_of(tokens, self.rows))
        parts = (  # in the order of StepInputs, each with what its padding holds
            (np.concatenate([np.full(len(decoding), FROM_SLOT, np.int32), *(s.ids for s in plan.spans)]), 0),
            (np.arange(total, dtype=np.int32) - np.repeat(start[:-1], lengths), 0),
            (np.repeat(slots, lengths), NULL_SLOT),
            (slots, NULL_SLOT),
            (np.concatenate([decoding, ends]), NULL_SLOT),
            (start, total),
            (start[1:] - 1, 0),
            (lengths, 0),
        )
        padded = [
            np.concatenate([part, np.full(size - len(part), value, np.int32)])
            for (part, value), size in zip(parts, sizes, strict=True)
        ]
        packed = upload(np.concatenate(padded, dtype=np.int32), self._device)
        inputs = StepInputs(*(buffer[:size] for buffer, size in zip(self._mixed, sizes, strict=True)))
        torch._foreach_copy_(list(inputs), packed.split(sizes))
        return inputs


def rows_of(tokens: int, slots: int) -> int:
    """Rows of a step that is padded to so many tokens: one more than it could have."""
    return min(tokens, slots) + 1


def _sizes(tokens: int, rows: int) -> list[int]:
    """In the order of StepInputs."""
    return [tokens, tokens, tokens, rows, rows, rows + 1, rows, rows]
