"""Which sizes are captured, in which order, and which of them a batch is padded to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastgraph.device.executor import _orders
from fastgraph.device.ladder import CaptureLadder, rungs


@pytest.mark.parametrize(
    ("top", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (12, [1, 2, 4, 8, 12]),
        (256, [1, 2, 4, *range(8, 128, 8), *range(128, 257, 16)]),
    ],
)
def test_rungs_begin_at_one_widen_with_the_size_and_end_at_the_top(top: int, sizes: list[int]) -> None:
    assert rungs(top) == sizes


@pytest.mark.parametrize("slots", [1, 2, 3, 12, 64, 65, 100, 257, 1024])
def test_a_decode_step_of_every_order_of_size_runs_before_the_engine_serves(slots: int) -> None:
    """Kernels are built for a power of two of rows: none is built in a step that serves."""
    for captured in range(slots + 1):
        run = (rungs(captured) if captured else []) + [size for size in _orders(slots) if size > captured]
        orders = {(size - 1).bit_length() for size in run}
        assert orders == {(rows - 1).bit_length() for rows in range(1, slots + 1)}


class Recorder:
    """Notes what it is asked to record. A replay gives the inputs that were prepared for it."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def record(self, inputs: Any) -> Any:
        self.recorded.append(inputs)
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), outputs=inputs)


def test_the_largest_is_recorded_first_and_each_is_replayed_by_its_size() -> None:
    recorder: Any = Recorder()
    prepare: Any = "inputs of {}".format
    shares: list[float] = []
    ladder: Any = CaptureLadder(rungs(12), prepare)
    ladder.capture(recorder, shares.append)
    assert recorder.recorded == [f"inputs of {size}" for size in (12, 8, 4, 2, 1)]
    assert shares == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])  # told before each
    assert [ladder.replay(size) for size in (1, 12)] == ["inputs of 1", "inputs of 12"]
    assert [ladder.fit(size) for size in (1, 2, 3, 4, 5, 9, 12, 13)] == [1, 2, 4, 4, 8, 12, 12, None]
