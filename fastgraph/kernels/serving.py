"""The kernels that serve a thread: an engine's thread has a table of its own, in which ops find their kernels.

So engines of one process do not disturb one another, and an op spends one look-up on its choice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from fastgraph.kernels.registry import Kernels, choose, load

T = TypeVar("T")


class _Thread(threading.local):
    def __init__(self) -> None:
        self.kernels: dict[str, Kernels] = {}  # by device
        self.laid_out: dict[Hashable, Any] = {}
        self.kept: dict[Hashable, Any] = {}
        self.asked: set[str] | None = None


_thread = _Thread()


def serve(device: str, kernels: Kernels) -> None:
    """From now on these kernels serve whatever this thread, an engine's, runs on a device."""
    _thread.kernels[device] = kernels


def kernels(device: str) -> Kernels:
    """The kernels of this thread's engine; where there is none, those that such a device gives a common model."""
    return _thread.kernels.get(device) or _common(device)


@cache
def _common(device: str) -> Kernels:
    from fastgraph.kernels.probe import typical  # which runs models, and they call ops

    return load(choose(typical(device), {}))


def begin_step() -> None:
    """Tell kernels that lay a step out, once for all layers, that another one begins."""
    _thread.laid_out.clear()


def once(key: Hashable, lay_out: Callable[[], T]) -> tuple[T, bool]:
    """What `lay_out` made for `key` in this step, and whether it did so just now."""
    new = key not in _thread.laid_out
    if new:
        _thread.laid_out[key] = lay_out()
    return _thread.laid_out[key], new


def keep(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` made for `key` in this thread, which keeps it for as long as it lives."""
    if key not in _thread.kept:
        _thread.kept[key] = make()
    kept: T = _thread.kept[key]
    return kept


@contextmanager
def asked() -> Iterator[set[str]]:
    """Collect the features that ops are called with meanwhile, on tensors without data."""
    features: set[str] = set()
    _thread.asked = features
    try:
        yield features
    finally:
        _thread.asked = None


def ask(**features: bool) -> None:
    """Say which features an op is called with; nobody listens but in `asked`."""
    if _thread.asked is not None:
        _thread.asked.update(name for name, wanted in features.items() if wanted)
