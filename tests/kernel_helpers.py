"""What the tests of the Triton kernels share: where they run, and paged problems."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fastgraph.kernels.attention import Pages

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
TOLERANCE = 1e-2 if HAS_GPU else 1e-5  # of ||out - reference|| / ||reference||
gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")


def load(*names: str) -> list[ModuleType]:
    """Modules of `fastgraph.kernels` that need Triton."""
    pytest.importorskip("triton")
    return [importlib.import_module(f"fastgraph.kernels.{name}") for name in names]


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def error(out: Tensor, reference: Tensor) -> float:
    """Relative to the reference's norm; NaN in `out` gives NaN, which is below nothing."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


@dataclass
class Paged:
    """Rows with a history in scrambled pages; what was never written is NaN."""

    k_cache: Tensor  # [pages, page_size, kv_heads, head_dim]
    v_cache: Tensor
    page_table: Tensor  # [slots, pages_per_slot] int32
    lengths: Tensor  # [slots] int32
    slots: Tensor  # [rows] int32

    @classmethod
    def of(cls, past: list[int], span: int, kv_heads: int, head_dim: int, page_size: int) -> Paged:
        """Row r has `past[r]` tokens in its pages and room for `span`."""
        rows, per_slot = len(past), -(-span // page_size)
        pages = torch.randperm(rows * per_slot).int() + 1
        table = torch.cat([torch.zeros(1, per_slot, dtype=torch.int32), pages.view(rows, per_slot)]).to(DEVICE)
        shape = (rows * per_slot + 1, page_size, kv_heads, head_dim)
        k_cache, v_cache = (torch.full(shape, torch.nan, device=DEVICE, dtype=DTYPE) for _ in range(2))
        slots = (torch.randperm(rows) + 1).int().to(DEVICE)
        lengths = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
        lengths[slots.long()] = torch.tensor(past, dtype=torch.int32, device=DEVICE)
        paged = cls(k_cache, v_cache, table, lengths, slots)
        for row, count in enumerate(past):
            page, offset = paged.cells(row, 0, count)
            k_cache[page, offset] = randn(count, kv_heads, head_dim)
            v_cache[page, offset] = randn(count, kv_heads, head_dim)
        return paged

    def pages(self, counts: list[int], unowned: int = 0, empty: int = 0) -> Pages:
        """What a step of `counts` tokens a row gets.

        Behind them `unowned` tokens that belong to no row, and `empty` rows without tokens: what a step is padded with.
        """
        row_of = torch.tensor(
            [row for row, count in enumerate(counts) for _ in range(count)], dtype=torch.long, device=DEVICE
        )
        start = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32, device=DEVICE)
        place = torch.arange(len(row_of), device=DEVICE) - start[row_of]
        token_slots = self.slots[row_of]
        nobody = torch.zeros(max(unowned, empty), dtype=torch.int32, device=DEVICE)
        return Pages(
            self.k_cache,
            self.v_cache,
            self.page_table,
            self.lengths,
            torch.cat([self.slots, nobody[:empty]]),
            torch.cat([start, start[-1:].expand(empty)]),
            torch.cat([(self.lengths[token_slots.long()] + place).int(), nobody[:unowned]]),
            torch.cat([token_slots, nobody[:unowned]]),
        )

    def forget(self, window: int) -> None:
        """Let NaN stand in the pages that lie wholly before the window of each row's next token."""
        for slot in self.slots.tolist():
            behind = max(int(self.lengths[slot]) + 1 - window, 0) // self.k_cache.shape[1]
            for cache in (self.k_cache, self.v_cache):
                cache[self.page_table[slot, :behind].long()] = torch.nan

    def cells(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The page and the place in it of a row's positions [start, stop)."""
        position = torch.arange(start, stop, device=DEVICE)
        size = self.k_cache.shape[1]
        return self.page_table[int(self.slots[row]), position // size].long(), position % size

    def attention(self, q: Tensor, row: int, position: int, scale: float, window: int) -> Tensor:
        """Softmax attention of one token over its row's cache, in float64. q: [heads, head_dim]"""
        start = max(0, position + 1 - window) if window else 0
        page, offset = self.cells(row, start, position + 1)
        group = q.shape[0] // self.k_cache.shape[2]
        k = self.k_cache[page, offset].double().repeat_interleave(group, 1)  # [tokens, heads, head_dim]
        v = self.v_cache[page, offset].double().repeat_interleave(group, 1)
        share = torch.softmax(torch.einsum("hd,thd->ht", q.double(), k) * scale, dim=1)
        return torch.einsum("ht,thd->hd", share, v)
