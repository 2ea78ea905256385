"""The engine thread's loop: commands in, plan, submit, land, outputs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from fastgraph.control.plan import Device, PendingStep, StepPlan, StepResult
from fastgraph.control.scheduler import Output, Scheduler
from fastgraph.control.states import Request

T = TypeVar("T")
Deliver = Callable[[list[Output]], Iterable[int]]

_COMMANDS = 100  # that are taken between two steps: however fast they come, the device goes on


class Observer:
    """Is told, in the engine thread, what the scheduler is given, just before it is given it, and what it plans."""

    def submitted(self, request: Request) -> None: ...

    def aborted(self, request_id: int) -> None: ...

    def forgot(self) -> None:
        """The cached pages are to be forgotten."""

    def planned(self, plan: StepPlan | None) -> None:
        """None: nothing can move before something else happens."""

    def landed(self, plan: StepPlan, result: StepResult) -> None: ...

    def ended(self, error: Exception) -> None:
        """Nothing more comes. `error` is what later callers get."""


class EngineLoop:
    """Runs in one thread, which alone touches the scheduler and the device. Others reach it through `call`.

    `deliver` takes each step's outputs and returns the requests that should end now (their text reached a stop
    string). `depth` is how many further steps may be submitted before the oldest is read; 0 reads each at once.

    `retract_every` is for tests: after every so many plans a request is pushed out, as if there were no page for it.
    Observers are not told, so a decision log of such a run cannot be replayed. 0 is never.
    """

    def __init__(
        self, scheduler: Scheduler, device: Device, depth: int, deliver: Deliver, *, retract_every: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.observers: list[Observer] = []
        self._device = device
        self._depth = depth
        self._deliver = deliver
        self._retract_every = retract_every
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
        for observer in self.observers:
            with suppress(Exception):
                observer.ended(error)

    def submit(self, request: Request) -> None:
        for observer in self.observers:
            observer.submitted(request)
        self.scheduler.submit(request)

    def abort(self, request_id: int) -> Output | None:
        for observer in self.observers:
            observer.aborted(request_id)
        return self.scheduler.abort(request_id)

    def forget(self) -> None:
        for observer in self.observers:
            observer.forgot()
        self.scheduler.pool.forget()

    def run(self) -> None:
        while not self._stopping:
            for _ in range(min(self._commands.qsize(), _COMMANDS)):
                self._obey()
            if not self._stopping:
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
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise  # any other is the caller's to handle: the loop goes on

    def _submit(self) -> None:
        while self._may_submit() and (plan := self._plan()):
            self._in_flight.append((plan, self._device.execute(plan)))

    def _may_submit(self) -> bool:
        """Two plans are enough if the later one is of several steps: it is long, and who comes next waits for it."""
        if self._in_flight and self._retracts_after(self._in_flight[-1][0]):
            return False  # a retraction needs nothing in flight
        enough = len(self._in_flight) > 1 and self._in_flight[-1][0].repeats > 1
        return len(self._in_flight) <= self._depth and not enough

    def _retracts_after(self, plan: StepPlan) -> bool:
        return self._retract_every > 0 and plan.number % self._retract_every == 0

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        for observer in self.observers:
            observer.planned(plan)
        return plan

    def _land(self) -> None:
        plan, pending = self._in_flight.popleft()
        result = pending.result()
        for observer in self.observers:
            observer.landed(plan, result)
        outputs = self.scheduler.land(plan, result)
        if self._retracts_after(plan) and self.scheduler.table.running.any():
            self.scheduler.retract_last()
        if self._device_ahead() and not self._stopping:
            self._submit()  # text and stop strings can wait, and the device cannot
        for request_id in self._deliver(outputs):
            self.abort(request_id)

    def _device_ahead(self) -> bool:
        """Whether the device is through with all, or all but one, of the steps that it was given."""
        return self._depth > 0 and (len(self._in_flight) < 2 or self._in_flight[-2][1].ready())
