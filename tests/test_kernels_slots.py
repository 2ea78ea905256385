"""The kernels before and after the model, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import DEVICE, load
from torch import Tensor

from fastgraph.kernels import slots

SLOTS, DEPTH = 300, 8
pytestmark = pytest.mark.kernels


def ints(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32, device=DEVICE)


def random_tables() -> slots.Tables:
    """Of the null slot nothing is known."""
    found = slots.Tables(ints(0, 1000, DEPTH, SLOTS), *(ints(0, 500, SLOTS) for _ in range(3)))
    for table in found:
        table[..., 0] = 0
    return found


def live(rows: int) -> Tensor:
    """Slots, all different, but for padding."""
    some = (torch.randperm(SLOTS - 1, device=DEVICE)[:rows] + 1).int()
    return torch.where(ints(0, 4, rows) == 0, 0, some)


@pytest.mark.parametrize("tokens", [1, 7, 128, 700])
def test_gathering_gives_what_plain_pytorch_gives(tokens: int) -> None:
    (triton,) = load("slots_triton")
    ids, token_slots = ints(0, 1000, tokens), ints(0, SLOTS, tokens)
    ids = torch.where(ints(0, 2, tokens) == 0, slots.FROM_SLOT, ids)
    arguments = (ids, ints(0, 50, tokens), token_slots, random_tables())
    for found, expected in zip(triton.gather(*arguments), slots.gather_reference(*arguments), strict=True):
        assert found.dtype == torch.int32
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 7, 128, 299])
def test_moving_on_gives_what_plain_pytorch_gives(rows: int) -> None:
    (triton,) = load("slots_triton")
    row_slots = live(rows)
    sampling_slots = torch.where(ints(0, 3, rows) == 0, 0, row_slots)
    moved = random_tables()
    expected = slots.Tables(*(table.clone() for table in moved))
    arguments = (torch.where(sampling_slots > 0, ints(0, 1000, rows), 0), sampling_slots, row_slots, ints(0, 50, rows))
    triton.advance(*arguments, moved)
    slots.advance_reference(*arguments, expected)
    for table, wanted in zip(moved, expected, strict=True):
        assert torch.equal(table, wanted)
    assert not moved.generated[0]
    assert not moved.lengths[0]
