"""The one path that prepares a step's inputs: capture, replay and eager all come through here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgraph.control.plan import NULL_SLOT, Int32, Limits, StepPlan

FROM_SLOT = -1  # an input id that means: the token this slot sampled last


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
    """Static input buffers. Decode rows are alike (one token, the slot's last), so only `slots` ever changes."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        rows = limits.slots
        self._device = device
        self._slots = torch.full((rows,), NULL_SLOT, dtype=torch.int32, device=device)
        self._from_slot = torch.full((rows,), FROM_SLOT, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        self._ones = torch.ones(rows, dtype=torch.int32, device=device)
        self._arange = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def refresh_decode_metadata(self, bs: int, actual_bs: int, slots: Int32, *, for_graph_replay: bool) -> StepInputs:
        """Inputs of a decode step of `bs` rows, of which the first `actual_bs` are live.

        slots: [actual_bs]. Rows [actual_bs, bs) are padding: they point at the null slot, whose page is page 0.
        Capture is a refresh with actual_bs=0; a replay reads the same buffers. Without a graph nothing is padded.
        """
        assert len(slots) == actual_bs <= bs
        assert for_graph_replay or bs == actual_bs
        padded = np.full(bs, NULL_SLOT, np.int32)
        padded[:actual_bs] = slots
        self._slots[:bs].copy_(torch.from_numpy(padded))
        # Each a view of its own: to a compiled step, one tensor in two places is another graph.
        return StepInputs(
            ids=self._from_slot[:bs],
            offsets=self._zeros[:bs],
            token_slots=self._slots[:bs],
            slots=self._slots[:bs],
            sampling_slots=self._slots[:bs],
            query_start=self._arange[: bs + 1],
            last=self._arange[:bs],
            query_lengths=self._ones[:bs],
        )

    def refresh_mixed_metadata(self, plan: StepPlan) -> StepInputs:
        """Inputs of a step with prefill spans: decode rows first, then a row for each span. One packed copy."""
        lengths = np.array([1] * len(plan.decode_slots) + [len(s.ids) for s in plan.spans], np.int32)
        slots = np.concatenate([plan.decode_slots, np.array([s.slot for s in plan.spans], np.int32)])
        sampling = np.concatenate(
            [plan.decode_slots, np.array([s.slot if s.samples else NULL_SLOT for s in plan.spans], np.int32)]
        )
        start = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        decode_ids = np.full(len(plan.decode_slots), FROM_SLOT, np.int32)
        parts = (
            np.concatenate([decode_ids, *(s.ids for s in plan.spans)]),
            np.arange(start[-1], dtype=np.int32) - np.repeat(start[:-1], lengths),
            np.repeat(slots, lengths),
            slots,
            sampling,
            start,
            start[1:] - 1,
            lengths,
        )
        packed = torch.from_numpy(np.concatenate(parts, dtype=np.int32))
        if self._device.type != "cpu":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        return StepInputs(*packed.split([len(part) for part in parts]))
