"""The engine thread's loop: commands in, plan, submit, land, outputs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from fastgraph.control.plan import Device, PendingStep, StepPlan
from fastgraph.control.scheduler import Output, Scheduler

T = TypeVar("T")
Deliver = Callable[[list[Output]], Iterable[int]]


class EngineLoop:
    """Runs in one thread, which alone touches the scheduler and the device. Others reach it through `call`.

    `deliver` takes each step's outputs and returns the requests that should end now (their text reached a stop
    string). `depth` is how many further steps may be submitted before the oldest is read; 0 reads each at once.
    """

    def __init__(self, scheduler: Scheduler, device: Device, depth: int, deliver: Deliver) -> None:
        self.scheduler = scheduler
        self._device = device
        self._depth = depth
        self._deliver = deliver
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._closed: Exception | None = None  # why no further command is taken
        self._closing = Lock()
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._stopping = False

    def call(self, function: Callable[[], T]) -> Future[T]:
        """From any thread: run `function` between two steps of the loop."""
        future: Future[T] = Future()
        with self._closing:
            if self._closed is not None:
                raise self._closed.with_traceback(None)  # or it would keep the frames of all who ever called
            self._commands.put((function, future))
        return future

    def stop(self) -> None:
        """From any thread: leave `run` once the steps in flight have landed."""
        self.call(lambda: setattr(self, "_stopping", True))

    def close(self, error: Exception) -> None:
        """After `run` has ended: every command that was not taken, and any later one, fails with `error`."""
        with self._closing:
            self._closed = error
        while not self._commands.empty():
            _, future = self._commands.get_nowait()
            future.set_exception(error)

    def run(self) -> None:
        while not self._stopping:
            while not self._commands.empty():
                self._obey()
            self._submit()
            if self._in_flight:
                self._land()
            elif not self._stopping:
                self._obey()  # nothing can move before a command comes
        while self._in_flight:
            self._land()

    def _obey(self) -> None:
        function, future = self._commands.get()
        try:
            future.set_result(function())
        except Exception as error:  # the caller's to handle: the loop goes on
            future.set_exception(error)

    def _submit(self) -> None:
        while len(self._in_flight) <= self._depth and (plan := self.scheduler.plan()):
            self._in_flight.append((plan, self._device.execute(plan)))

    def _land(self) -> None:
        plan, pending = self._in_flight.popleft()
        outputs = self.scheduler.land(plan, pending.result())
        for request_id in self._deliver(outputs):
            self.scheduler.abort(request_id)
