"""Pages of host memory, to which retracted requests are saved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastgraph.control.plan import Int32, StepPlan
from fastgraph.device.upload import upload
from fastgraph.ops import LayerCache

BLOCK_BYTES = 64 << 20  # host memory is pinned so much at a time, when it is first needed
STAGED_BYTES = 16 << 20  # device memory that a copy passes through


class HostPages:
    """Copies pages, all layers of them at once, between the device and pinned memory.

    Nothing waits for a copy: it runs on the stream of the steps, after those that were submitted before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[int, Tensor] = {}  # [pages, layers * 2, page_size, kv_heads, head_dim] each

    def copy(self, plan: StepPlan, caches: Sequence[LayerCache]) -> None:
        """What the plan wants saved first: its pages may be the very ones that something is restored to."""
        parts = [part for cache in caches for part in cache]  # [pages, page_size, kv_heads, head_dim] each
        for pairs in _portions(plan.snapshots, parts):
            pages = upload(pairs[:, 0].copy(), self._device)
            staged = torch.stack(
                [part[pages] for part in parts], dim=1
            )  # [pages, parts, page_size, kv_heads, head_dim]
            for page, host_page in zip(staged, pairs[:, 1].tolist(), strict=True):
                self._page(host_page, page).copy_(page, non_blocking=True)
        for pairs in _portions(plan.restores, parts):
            pages = upload(pairs[:, 1].copy(), self._device)
            shape = (len(pairs), len(parts), *parts[0].shape[1:])
            staged = torch.empty(shape, dtype=parts[0].dtype, device=self._device)
            for page, host_page in zip(staged, pairs[:, 0].tolist(), strict=True):
                page.copy_(self._page(host_page, page), non_blocking=True)
            for part, pages_of_part in zip(parts, staged.unbind(1), strict=True):
                part[pages] = pages_of_part

    def _page(self, number: int, like: Tensor) -> Tensor:
        """A host page: [layers * 2, page_size, kv_heads, head_dim], as `like`."""
        block, index = divmod(number, max(BLOCK_BYTES // like.nbytes, 1))
        if block not in self._blocks:
            shape = (max(BLOCK_BYTES // like.nbytes, 1), *like.shape)
            pinned = self._device.type == "cuda"
            self._blocks[block] = torch.empty(shape, dtype=like.dtype, pin_memory=pinned)
        return self._blocks[block][index]


def _portions(pairs: Int32, parts: Sequence[Tensor]) -> list[Int32]:
    """The pairs of pages in portions that are small enough to be staged."""
    most = max(STAGED_BYTES // sum(part[0].nbytes for part in parts), 1)
    return np.split(pairs, range(most, len(pairs), most)) if len(pairs) else []
