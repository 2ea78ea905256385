"""A plan in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastgraph.control.plan import Admission, Int32, PrefillSpan, StepPlan


@dataclass(frozen=True, slots=True)
class Draft:
    """What a `StepPlan` is made of, in the order in which it was decided."""

    admissions: list[Admission] = field(default_factory=list)
    page_writes: list[Int32] = field(default_factory=list)  # each [pages, 3], as in the plan
    restores: list[Int32] = field(default_factory=list)  # each [pages, 2], as in the plan
    spans: list[PrefillSpan] = field(default_factory=list)

    def write_pages(self, slot: int, first: int, pages: Int32) -> None:
        """Put pages into a slot's page table, from place `first` on."""
        writes = np.empty((len(pages), 3), np.int32)
        writes[:, 0], writes[:, 1], writes[:, 2] = slot, np.arange(first, first + len(pages)), pages
        self.page_writes.append(writes)

    def plan(self, number: int, decode_slots: Int32, repeats: int, snapshots: Sequence[Int32]) -> StepPlan:
        return StepPlan(
            number,
            tuple(self.admissions),
            _joined(self.page_writes, 3),
            decode_slots,
            tuple(self.spans),
            _joined(snapshots, 2),
            _joined(self.restores, 2),
            repeats,
        )


_NONE = {width: np.empty((0, width), np.int32) for width in (2, 3)}


def _joined(parts: Sequence[Int32], width: int) -> Int32:
    """[pages, width], of which there may be none."""
    return np.concatenate(parts) if parts else _NONE[width]
