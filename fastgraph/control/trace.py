"""The decision log: all that the scheduler is given and all that it plans, a JSON line each; and its replay.

The scheduler's plans follow from what it is given alone. So the log is enough to run it again, without a device, up to
the step where something went wrong, or to see what a change to it changes.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastgraph.config import SamplingParams
from fastgraph.control.loop import Observer
from fastgraph.control.plan import Limits, StepPlan, StepResult
from fastgraph.control.scheduler import Scheduler
from fastgraph.control.states import Request
from fastgraph.errors import ConfigError, FastgraphWarning, RequestError, TraceError

VERSION = 2  # of the lines' form

_BUFFER = 1 << 16  # bytes


class Trace(Observer):
    """Writes the log. What it is told is in the file when the engine has nothing to do, and when it ends."""

    def __init__(self, path: str, limits: Limits, about: Mapping[str, Any]) -> None:
        """`about` is for readers: whose log this is. Raises `ConfigError` if the file cannot be written."""
        self._path = path
        try:
            self._file = open(path, "w", _BUFFER, encoding="utf-8")  # noqa: SIM115 - `ended` closes it
        except OSError as error:
            raise ConfigError(f"the trace cannot be written: {error}") from error
        self._write("trace", {"version": VERSION, "limits": asdict(limits), "about": dict(about)})

    def submitted(self, request: Request) -> None:
        self._write("submit", _plain(request))

    def aborted(self, request_id: int) -> None:
        self._write("abort", request_id)

    def forgot(self) -> None:
        self._write("forget", None)

    def planned(self, plan: StepPlan | None) -> None:
        self._write("plan", _plain(plan))
        if plan is None:
            self._or_give_up(self._file.flush)

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        landed = {"number": plan.number, "tokens": result.tokens.tolist(), "seconds": result.seconds}
        self._write("land", landed)

    def ended(self, error: Exception) -> None:
        self._write("end", str(error))
        self._or_give_up(self._file.close)

    def _write(self, kind: str, value: Any) -> None:
        line = json.dumps({kind: value}, separators=(",", ":")) + "\n"
        self._or_give_up(lambda: self._file.write(line))

    def _or_give_up(self, work: Callable[[], Any]) -> None:
        """A full disk ends the log, and not the answers."""
        try:
            work()
        except OSError as error:
            message = f"the trace {self._path} ends before its time: {error}"
            warnings.warn(message, FastgraphWarning, stacklevel=2)
            self._file = open(os.devnull, "w")  # noqa: SIM115 - as above


def _plain(value: Any) -> Any:
    """As JSON will give it back."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of running a log again."""

    requests: int
    aborts: int
    steps: int
    whole: bool  # false: the log stops before its engine ended, perhaps in the midst of a line
    difference: str | None  # the first, in words: its line, its step, the field, and both values


def replay(
    path: str, make: Callable[[Limits], Scheduler] = Scheduler, tell: Callable[[float], None] = lambda share: None
) -> Replay:
    """Run a scheduler on what a log says was given to another, and compare the plans, up to the first difference.

    `make` makes the scheduler. `tell` is told the share of the log that is done. Raises `TraceError`, which names the
    line, for a file that is no log.
    """
    counts = {"submit": 0, "abort": 0, "plan": 0}
    rerun, kind, difference = None, "", None
    for number, line, share in _lines(path):
        if number > 1 and not line.endswith(b"\n"):
            break
        try:
            kind, value = _read(line, first=number == 1)
            if rerun is None:
                rerun = _Rerun(make(value))
            else:
                difference = rerun.event(kind, value)
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if difference is not None:
            difference = f"line {number}, {difference}"
            break
        if kind in counts and value is not None:
            counts[kind] += 1
        tell(share)
    return Replay(counts["submit"], counts["abort"], counts["plan"], kind == "end", difference)


def _lines(path: str) -> Iterator[tuple[int, bytes, float]]:
    """Every line with its number, and the share of the file that ends with it."""
    try:
        with open(path, "rb") as file:
            size, done = max(Path(path).stat().st_size, 1), 0
            for number, line in enumerate(file, 1):
                done += len(line)
                yield number, line, done / size
            if not done:
                raise TraceError(f"{path} is empty, and not a trace")
    except OSError as error:
        raise TraceError(f"the trace cannot be read: {error}") from error


def _read(line: bytes, first: bool) -> tuple[str, Any]:
    """A line's kind, and what it says."""
    try:
        ((kind, value),) = json.loads(line).items()
        if first != (kind == "trace"):
            raise ValueError(f"the first line, and no other, says {'trace'!r}, and this one says {kind!r}")
        match kind:
            case "trace" if value["version"] != VERSION:
                raise ValueError(f"it has version {value['version']}, and only {VERSION} can be replayed here")
            case "trace" if not all(isinstance(limit, int) for limit in value["limits"].values()):
                raise ValueError(f"its limits are whole numbers, and not all of {value['limits']} are")
            case "trace":
                return kind, Limits(**value["limits"])
            case "submit":
                return kind, _request(value)
            case "land":
                tokens = np.array(value["tokens"], np.int32)
                return kind, (int(value["number"]), StepResult(tokens, None, float(value["seconds"])))
            case "abort" | "forget" | "plan" | "end":
                return kind, value
        raise ValueError(f"nothing is known of {kind!r}")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RequestError) as error:
        raise TraceError(f"this is not of a trace: {error}") from error


def _request(value: Mapping[str, Any]) -> Request:
    sampling = dict(value["sampling"])
    sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    arrays = {"prompt": np.array(value["prompt"], np.int32), "stop_ids": tuple(value["stop_ids"])}
    return Request(**{**value, **arrays, "sampling": SamplingParams.of({}, sampling)})


class _Rerun:
    """A scheduler to which everything happens again."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: deque[StepPlan] = deque()
        self._newest = 0  # number of the newest step

    def event(self, kind: str, value: Any) -> str | None:
        """What differs, in words."""
        try:
            match kind:
                case "submit":
                    with suppress(Exception):  # what it refuses fails alone, and the engine has gone on
                        self._scheduler.submit(value)
                case "abort":
                    self._scheduler.abort(value)
                case "forget":
                    self._scheduler.pool.forget()
                case "plan":
                    return self._plan(value)
                case "land":
                    self._land(*value)
                case "end":  # which may have been the scheduler's own doing, when it was to plan
                    self._scheduler.plan()
        except TraceError:
            raise
        except Exception as error:
            return f"after step {self._newest}: the scheduler fails, {type(error).__name__}: {error}"
        return None

    def _plan(self, logged: Any) -> str | None:
        plan = self._scheduler.plan()
        difference = _difference(logged, _plain(plan), "plan")
        if difference is not None:
            return f"step {self._newest + 1}: {difference}"
        if plan is not None:
            self._newest = plan.number
            self._in_flight.append(plan)
        return None

    def _land(self, number: int, result: StepResult) -> None:
        if not self._in_flight or self._in_flight[0].number != number:
            raise TraceError(f"step {number} is not the oldest of those in flight")
        self._scheduler.land(self._in_flight.popleft(), result)


def _difference(logged: Any, planned: Any, name: str) -> str | None:
    """The first place at which two plain values are not the same."""
    if isinstance(logged, dict) and isinstance(planned, dict) and logged.keys() == planned.keys():
        pairs: Sequence[tuple[str, Any, Any]] = [(f"{name}.{key}", logged[key], planned[key]) for key in logged]
    elif isinstance(logged, list) and isinstance(planned, list):
        both = zip(logged, planned, strict=False)
        pairs = [(f"{name}[{i}]", there, here) for i, (there, here) in enumerate(both)]
        pairs.append((f"the length of {name}", len(logged), len(planned)))
    elif logged == planned and type(logged) is type(planned):
        return None
    else:
        return f"{name} is {_short(planned)} now, and {_short(logged)} in the log"
    return next((found for at, there, here in pairs if (found := _difference(there, here, at)) is not None), None)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."
