"""The engine thread, and the requests that wait on it. Everything here is token ids and text; no tensor passes."""

from __future__ import annotations

import contextlib
import itertools
import reprlib
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from fastgraph.config import MAX_STOP_IDS, SamplingParams
from fastgraph.control.loop import EngineLoop, Observer
from fastgraph.control.plan import Device, Int32, Limits
from fastgraph.control.policy import Policy, first_come
from fastgraph.control.scheduler import Output, Scheduler
from fastgraph.control.states import FinishReason, Past, Request, check
from fastgraph.errors import EngineDied, RequestError
from fastgraph.text import TextStream

PATIENCE = 10.0  # seconds that an interrupted `close` still waits


class BuiltDevice(Device, Protocol):
    """What a builder hands to the engine thread."""

    def counters(self) -> dict[str, int]: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of the raw model at one token of the answer."""

    token_id: int
    logprob: float
    top: dict[int, float]  # token id -> log-probability, likeliest first


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the request was submitted."""

    queued: float  # until it got a slot
    ttft: float  # until its first token
    total: float


@dataclass(frozen=True, slots=True)
class Ask:
    """An answer that is wanted.

    `text` reads the answer as it comes: it is needed for stop strings and for `on_text`, which is called in the
    engine thread and must not block.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    text: TextStream | None = None
    on_text: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. `str()` of it is its text."""

    text: str  # of an `Ask` whose text nobody reads as it comes: empty
    token_ids: list[int]  # without the id that stopped it
    finish_reason: FinishReason  # "stop", "length" or "abort"
    logprobs: list[TokenLogprob] | None  # one per token, if asked for
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    timing: Timing

    def __str__(self) -> str:
        return self.text


class Ticket:
    """One submitted request. `future` resolves to its `Completion`."""

    def __init__(self, request: Request, ask: Ask) -> None:
        self.request = request
        self.future: Future[Completion] = Future()
        self.future.set_running_or_notify_cancel()  # asyncio would cancel it: only `abort` ends a request
        self.text, self._on_text = ask.text, ask.on_text
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._submitted = perf_counter()

    def take(self, output: Output) -> bool:
        """Record an output, in the engine thread. True if a stop string has been reached: nothing more is wanted."""
        self._tokens += output.token_ids.tolist()
        if output.logprobs is not None:
            self._logprobs += _token_logprobs(output, self.request.sampling.top_logprobs)
        reason = output.finish_reason
        if self.text is not None:
            piece = self.text.push(output.token_ids.tolist())
            if self.text.stopped:
                reason = "stop"  # the string wins over whatever else ended the request in this step
                del self._tokens[self.text.kept :], self._logprobs[self.text.kept :]
            elif reason is not None:
                piece += self.text.finish()
            if piece and self._on_text is not None:
                self._on_text(piece)
        if reason is not None:
            self._resolve(reason, output.past)
        return reason is not None and output.finish_reason is None

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _resolve(self, reason: FinishReason, past: Past) -> None:
        start, now = self._submitted, perf_counter()
        completion = Completion(
            text="" if self.text is None else self.text.text,
            token_ids=self._tokens,
            finish_reason=reason,
            logprobs=self._logprobs if self.request.sampling.logprobs else None,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=past.cached_tokens,
            timing=Timing((past.admitted or now) - start, (past.first_token or now) - start, now - start),
        )
        self.future.set_result(completion)


def _token_logprobs(output: Output, alternatives: int) -> Iterator[TokenLogprob]:
    assert output.logprobs is not None
    chosen, top_ids, top = output.logprobs.chosen, output.logprobs.top_ids, output.logprobs.top
    for i, token in enumerate(output.token_ids.tolist()):
        pairs = zip(top_ids[i, :alternatives].tolist(), top[i, :alternatives].tolist(), strict=True)
        yield TokenLogprob(token, float(chosen[i]), dict(pairs))


class Engine:
    """Owns the engine thread. `build` runs in it, so that the device is made where it is used.

    Every public method may be called from any thread.
    """

    def __init__(self, build: Callable[[], BuiltDevice], depth: int, policy: Policy = first_come) -> None:
        self._tickets: dict[int, Ticket] = {}  # touched by the engine thread alone
        self._ids = itertools.count(1)
        self._ended = threading.Event()
        self._order = threading.Lock()  # a request's number is its age: numbers are submitted in order
        ready: Future[tuple[EngineLoop, BuiltDevice]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build, depth, policy, ready), name="fastgraph-engine", daemon=True
        )
        try:
            self._thread.start()
            self._loop, device = ready.result()
        except BaseException:  # interrupted, perhaps, while the device is being built: the thread is to end then
            if not ready.cancel() and not ready.exception():
                ready.result()[0].stop()  # it was ready in that very moment
            raise
        self._counters = device.counters
        self.limits: Limits = device.limits

    # --- for callers ---

    def submit_all(self, asks: Sequence[Ask]) -> list[Ticket]:
        """Queue requests, all between the same two steps, so that they form the same batches (see `multi_step`).

        Raises `RequestError` if one of them cannot be served, and then none is; `EngineDied` after the end.
        """
        prompts = {id(ask.prompt): ask.prompt for ask in asks}  # several answers to one are looked through once
        for ids in prompts.values():
            _check_list("prompt", ids)
        known = {key: _known_ids("prompt token", ids, self.limits.vocab) for key, ids in prompts.items()}
        with self._order:
            tickets = [Ticket(self._request(ask, known[id(ask.prompt)]), ask) for ask in asks]

            def enter() -> None:
                for ticket in tickets:
                    try:
                        self._loop.submit(ticket.request)
                    except Exception as error:  # the policy's own fault; every other request goes on
                        ticket.fail(error)
                    else:
                        self._tickets[ticket.request.id] = ticket

            entered = self._loop.call(enter)

        def entered_or_not(command: Future[None]) -> None:
            if error := command.exception():
                for ticket in tickets:
                    ticket.fail(error)

        # The engine may end before it takes the command, and then nobody else knows of the tickets.
        entered.add_done_callback(entered_or_not)
        return tickets

    def abort(self, request_ids: Iterable[int] | None) -> None:
        """End requests now, or all of them; what has come of each is its answer. Ended ones are no error.

        After the engine's end all have ended.
        """

        def end() -> None:
            for request_id in list(self._tickets) if request_ids is None else request_ids:
                output = self._loop.abort(request_id)
                if output is not None:
                    self._take(output)

        with contextlib.suppress(EngineDied):
            self._loop.call(end)

    def stats(self) -> dict[str, int]:
        """Counts as of now, taken between two steps."""

        def count() -> dict[str, int]:
            scheduler = self._loop.scheduler
            return {
                "pages_total": scheduler.pool.total,
                "pages_free": scheduler.pool.free,
                "pages_cached": scheduler.pool.cached,
                "running": scheduler.running,
                "waiting": scheduler.waiting,
                "preemptions": scheduler.preemptions,
                "preemptions_saved": scheduler.preemptions_saved,
                "prompt_tokens": scheduler.prompt_tokens,
                "prefix_hit_tokens": scheduler.prefix_hit_tokens,
                **self._counters(),
            }

        return self._loop.call(count).result()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, but for what running requests hold."""
        self._loop.call(self._loop.forget).result()

    def observe(self, observer: Observer) -> None:
        """Tell it, from the next step on, all that the scheduler is given and plans."""
        self._loop.call(lambda: self._loop.observers.append(observer)).result()

    def ignore(self, observer: Observer) -> None:
        """Tell it no more."""
        self._loop.call(lambda: self._loop.observers.remove(observer)).result()

    def close(self) -> None:
        """Stop the thread. Requests that are still running fail with `EngineDied`. Calling it twice is no error."""
        if self._thread.is_alive():
            with contextlib.suppress(EngineDied):
                self._loop.stop()
            # The garbage collector calls this where it likes, in the engine thread too.
            if threading.current_thread() is not self._thread:
                self._wait()

    def _wait(self) -> None:
        """Until the thread has ended. Ctrl-C is put off till then: Python's end must not meet a thread at work."""
        interrupt: KeyboardInterrupt | None = None
        while not self._ended.is_set():
            try:
                if not self._ended.wait(PATIENCE if interrupt else None):
                    break  # something is stuck, and the user wants out
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        self._thread.join()

    # --- in the engine thread ---

    def _run(self, *arguments: Any) -> None:
        try:
            self._serve(*arguments)
        finally:
            self._ended.set()

    def _serve(
        self,
        build: Callable[[], BuiltDevice],
        depth: int,
        policy: Policy,
        ready: Future[tuple[EngineLoop, BuiltDevice]],
    ) -> None:
        try:
            device = build()
            loop = EngineLoop(Scheduler(device.limits, policy), device, depth, self._deliver)
        except BaseException as error:
            if ready.set_running_or_notify_cancel():
                ready.set_exception(error)
            return
        if not ready.set_running_or_notify_cancel():
            device.shutdown()
            return
        ready.set_result((loop, device))
        end = EngineDied("the engine was closed")
        try:
            loop.run()
        except BaseException as error:  # nobody may wait for ever, whatever went wrong
            end = EngineDied(f"the engine has failed, and must be made anew: {type(error).__name__}: {error}")
            end.__cause__ = error
        loop.close(end)
        for ticket in self._tickets.values():
            ticket.fail(end)
        self._tickets.clear()
        device.shutdown()

    def _deliver(self, outputs: list[Output]) -> list[int]:
        return [output.request_id for output in outputs if self._take(output)]

    def _take(self, output: Output) -> bool:
        ticket = self._tickets[output.request_id]
        try:
            enough = ticket.take(output)
        except Exception as error:  # this request's reader has failed; every other request goes on
            ticket.fail(error)
            enough = output.finish_reason is None
        if ticket.future.done():
            del self._tickets[output.request_id]
        return enough

    def _request(self, ask: Ask, ids: Int32) -> Request:
        """ids: of the prompt. Raises `RequestError` if it cannot be served."""
        sampling, vocab = ask.sampling, self.limits.vocab
        _check_list("stop_ids", ask.stop_ids)
        _known_ids("stop_token_ids", ask.stop_ids, vocab)
        _known_ids("logit_bias", list(sampling.logit_bias), vocab)
        if not are_ids([ask.seed]) or not 0 <= ask.seed < 2**63:
            raise RequestError(f"seed must be a whole number from 0 to 2**63 - 1, not {ask.seed!r}")
        if ask.text is None and (sampling.stop or ask.on_text is not None):
            raise RequestError("stop strings and on_text need the text of the answer: give a TextStream as `text`")
        if len(ask.stop_ids) > MAX_STOP_IDS:
            raise RequestError(f"{len(ask.stop_ids)} stop ids, the model's own included; {MAX_STOP_IDS} is the most")
        prompt = len(ids)
        room = self.limits.max_model_len - prompt
        request = Request(
            id=next(self._ids),
            prompt=ids,
            sampling=sampling,
            seed=int(ask.seed),  # numpy's would overflow in the device, and are nothing that a trace could hold
            stop_ids=tuple(map(int, ask.stop_ids)),
            max_length=prompt + (room if sampling.max_tokens is None else sampling.max_tokens),
            incremental=ask.text is not None or sampling.logprobs,
        )
        check(request, self.limits)
        if sampling.min_tokens > room:
            raise RequestError(f"min_tokens {sampling.min_tokens} is above the {room} tokens that the context leaves")
        return request


def are_ids(value: object) -> bool:
    """Whether it is a sequence of whole numbers. Their types are looked at, which are few: prompts are long."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        return False
    return all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in set(map(type, value)))


def _check_list(name: str, ids: object) -> None:
    if not are_ids(ids):
        raise RequestError(f"{name} must be a list of token ids, not {reprlib.repr(ids)}")


def _known_ids(name: str, ids: Sequence[int], vocab: int) -> Int32:
    """The ids as an array: prompts are long. Raises `RequestError` if one is not in the vocabulary."""
    with contextlib.suppress(OverflowError):  # of an id beyond 32 bits
        known = np.array(array("i", ids))
        if not len(known) or (known.min() >= 0 and known.max() < vocab):
            return known
    unknown = next(i for i in ids if not 0 <= i < vocab)
    raise RequestError(f"{name} {unknown} is not in the vocabulary of {vocab} tokens")
