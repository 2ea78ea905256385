"""An engine over a simulated device: what the tests of answers and of ends share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from simulated import SimulatedDevice, uninterrupted

from fastgraph.config import SamplingParams
from fastgraph.control.plan import Limits, StepPlan
from fastgraph.engine import Ask, Engine, Ticket

VOCAB = 24
LIMITS = Limits(slots=4, pages=40, page_size=4, max_model_len=128, max_step_tokens=24, vocab=VOCAB)
PATIENCE = 60.0  # seconds after which a caller has been forgotten

ALPHABET: Any = SimpleNamespace(special_ids=frozenset(), leading=b"", token_bytes=lambda i: bytes([97 + i]))


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + i) for i in tokens)


class Gate:
    """Lets the device run no more than so many steps. Something to hold an engine in the middle of its work."""

    def __init__(self, steps: int = 0) -> None:
        self._tickets = threading.Semaphore(steps)
        self.waiting = threading.Event()  # the engine has come to a step that it may not run yet
        self._open = False

    def __call__(self, plan: StepPlan) -> None:
        if not self._open and not self._tickets.acquire(blocking=False):
            self.waiting.set()
            assert self._tickets.acquire(timeout=PATIENCE)

    def open(self) -> None:
        self._open = True
        self._tickets.release()


@contextmanager
def running(
    depth: int = 0, limits: Limits = LIMITS, on_step: Callable[[StepPlan], None] | None = None
) -> Iterator[tuple[Engine, SimulatedDevice]]:
    device = SimulatedDevice(limits, depth, on_step)
    engine = Engine(lambda: device, depth)
    try:
        yield engine, device
    finally:
        if isinstance(on_step, Gate):
            on_step.open()
        engine.close()


def ask(engine: Engine, prompt: list[int], seed: int = 0, stop: tuple[int, ...] = (), **options: Any) -> Ticket:
    sampling = {name: options.pop(name) for name in list(options) if name not in ("text", "on_text")}
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return engine.submit_all([Ask(prompt, params, seed, stop, **options)])[0]


def expected(ticket: Ticket) -> tuple[list[int], str]:
    return uninterrupted(ticket.request, VOCAB)[:2]


def outcome(ticket: Ticket) -> tuple[list[int], str]:
    answer = ticket.future.result(PATIENCE)
    return answer.token_ids, answer.finish_reason


def baseline(engine: Any) -> bool:
    """Whether everything is back, once what is in flight has landed."""
    deadline = time.monotonic() + PATIENCE
    while unheld(engine.stats()) < LIMITS.pages and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = engine.stats()
    return (unheld(stats), stats["running"], stats["waiting"]) == (LIMITS.pages, 0, 0)


def unheld(stats: dict[str, int]) -> int:
    """Pages that no request holds."""
    return stats["pages_free"] + stats["pages_cached"]
