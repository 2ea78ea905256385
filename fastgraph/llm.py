"""The Python front: text and messages in, text out. `fastgraph.load_model()` returns an `LLM`."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed, wait
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, cast, overload

import numpy as np

from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.control.policy import Policy, first_come
from fastgraph.control.trace import Trace
from fastgraph.engine import Ask, Completion, Engine, Ticket, Timing, TokenLogprob, are_ids
from fastgraph.errors import ConfigError, RequestError
from fastgraph.loading.chat_template import ChatTemplate, find_chat_template
from fastgraph.loading.checkpoint import open_checkpoint
from fastgraph.loading.files import Progress
from fastgraph.loading.tokenizer import Tokenizer
from fastgraph.text import TextStream
from fastgraph.thinking import find_thinking

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int]  # text, or token ids

DEFAULT_MAX_TOKENS = 256  # of a request that does not say; `max_tokens=None` is as many as the context leaves

__all__ = ["LLM", "Completion", "Stream", "Timing", "TokenLogprob", "load_model"]


def load_model(
    name: str | os.PathLike[str] | None = None,
    /,
    *,
    progress: Progress | None = None,
    policy: Policy = first_come,
    **options: Any,
) -> LLM:
    """Load a model and start an engine for it.

    `name` is a folder, a .gguf file or a hub id; None is a small default model. `options` are the fields of
    `EngineConfig`. `progress(phase, fraction)` is told what happens meanwhile. `policy(request)` is a number, and of
    the requests that wait the one with the smallest goes first. Raises `ConfigError` for an unknown or
    impossible option, `ModelError` for a model that cannot be loaded.
    """
    known = set(EngineConfig.__dataclass_fields__) - {"model"}
    unknown = sorted(set(options) - known)
    if unknown in (["model"], ["name"]):
        raise ConfigError(f"the model is the first argument, without a name: load_model({options[unknown[0]]!r})")
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}; known are: {', '.join(sorted(known))}")
    if not callable(policy):
        raise ConfigError(f"a policy is a function of a request, and not {policy!r}")
    model = os.fspath(name) if isinstance(name, os.PathLike) else name
    return LLM(EngineConfig(model=model, **options), progress=progress, policy=policy)


class LLM:
    """A model being served in this process. Threads and coroutines may call it at once; `close` it, or use `with`.

    Sampling options of every method are the fields of `SamplingParams`; those left out come from the model's
    generation config, and are greedy without one. An unknown option raises `RequestError`.
    """

    def __init__(self, config: EngineConfig, *, progress: Progress | None = None, policy: Policy = first_come) -> None:
        # Here, so that what needs no engine need not wait for torch.
        from fastgraph import models
        from fastgraph.device.builder import build_device, dtype_name, settle_depth, settle_device, settle_dtype

        tell: Progress = progress or (lambda phase, fraction: None)
        device = settle_device(config)
        dtype = dtype_name(settle_dtype(config, device))
        self.checkpoint = here = open_checkpoint(config, dtype, tell)
        models.find(here.config)  # a model that cannot run need not have a tokenizer
        # A dummy model may do without one.
        lacking = config.load_format == "dummy" and not (here.folder / "tokenizer.json").is_file()
        self.tokenizer = None if lacking else Tokenizer(here.folder, here.config, here.generation_config)
        template = find_chat_template(here.folder, config.chat_template)
        special = self.tokenizer.special_tokens if self.tokenizer else {}
        self._template = ChatTemplate(template, special) if template is not None else None
        self.thinking = find_thinking(template or "")
        if self.tokenizer and self.thinking:
            # Where a tag is a special token, text would come without it, and thoughts would run into the answer.
            tags = (self.tokenizer.encode(tag, add_special_tokens=False) for tag in self.thinking.tags)
            self.tokenizer.special_ids = self.tokenizer.special_ids.difference(*tags)
        self.sampling_defaults = _sampling_defaults(here.generation_config)
        vocab = self.tokenizer.vocab_size if self.tokenizer else None
        # What the thread holds must not lead back here, or nobody's letting go would ever end it.
        build = partial(build_device, config, here, device, vocab, tell)
        self.engine = Engine(build, settle_depth(config, device), policy)
        self.limits = self.engine.limits
        # Neither a forgotten `close` nor the interpreter's end may leave the thread running.
        self._close = weakref.finalize(self, self.engine.close)
        if config.trace is not None:
            about = {name: value for name, value in asdict(config).items() if name != "token"}
            self.engine.observe(Trace(config.trace, self.limits, about))

    # --- answers, whole ---

    @overload
    def generate(self, prompts: str, *, progress: bool | None = None, **sampling: Any) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[int], *, progress: bool | None = None, **sampling: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], *, progress: bool | None = None, **sampling: Any
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, *, progress: bool | None = None, **sampling: Any) -> Any:
        """Complete one prompt (text, or token ids) or a list of them.

        Returns a `Completion` for a prompt, and for a list of prompts a list in its order; with n > 1 each is itself a
        list of n. `progress` shows a bar on stderr: by default for more than one prompt, on a terminal.
        """
        if _is_prompt(prompts):
            return self._answer([self._ids(prompts)], sampling, progress)[0]
        return self._answer(self._all_ids(prompts), sampling, progress)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Completion:
        """Answer a conversation, written down by the model's chat template. With n > 1, a list of n answers."""
        ids = self.render(messages, tools=tools, template_variables=template_variables)
        return cast(Completion, self._answer([ids], sampling, progress=False)[0])

    async def agenerate(self, prompt: Prompt, **sampling: Any) -> Completion:
        """`generate` for one prompt, without blocking the event loop. Cancelling it aborts the request."""
        tickets = self.engine.submit_all(self._asks(self._ids(prompt), sampling))
        try:
            await asyncio.gather(*(asyncio.wrap_future(ticket.future) for ticket in tickets))
        except BaseException:
            self.engine.abort([ticket.request.id for ticket in tickets])
            raise
        return cast(Completion, _single([self._completion(ticket) for ticket in tickets]))

    # --- answers, as they come ---

    def stream(self, prompt: Prompt | Sequence[Message], **sampling: Any) -> Stream:
        """Iterate over the pieces of one answer's text, to a prompt or to a conversation.

        Joined, they are the text of `Stream.completion`. Leaving the loop early aborts the request.
        """
        pieces: SimpleQueue[str | None] = SimpleQueue()
        ticket = self._submit_stream(prompt, sampling, pieces.put)
        ticket.future.add_done_callback(lambda future: pieces.put(None))
        return Stream(self, ticket, pieces)

    async def astream(self, prompt: Prompt | Sequence[Message], **sampling: Any) -> AsyncIterator[str]:
        """`stream` for coroutines."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def put(piece: str | None) -> None:
            # A loop that has closed has nobody left to tell.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        ticket = self._submit_stream(prompt, sampling, put)
        ticket.future.add_done_callback(lambda future: put(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            ticket.future.result()  # a failure must not look like an end
        finally:
            self.abort(ticket.request.id)

    # --- the rest ---

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids that a conversation becomes, up to where the answer begins."""
        if self._template is None:
            raise RequestError(
                f"{self.checkpoint.name} has no chat template, and none is guessed: give one with --chat-template "
                f"(in Python, chat_template=), a jinja file, or use `generate`"
            )
        if template_variables and not (
            isinstance(template_variables, Mapping) and all(isinstance(name, str) for name in template_variables)
        ):
            raise RequestError(f"template_variables maps names to values, and is not {template_variables!r}")
        if taken := {"messages", "tools"}.intersection(template_variables or ()):
            raise RequestError(f"{', '.join(sorted(taken))} cannot be among the template_variables")
        given = [*(["tools"] if tools else []), *(template_variables or {})]
        if ignored := [name for name in given if not self._template.reads(name)]:
            raise RequestError(f"the chat template of {self.checkpoint.name} knows no {', '.join(ignored)}")
        text = self._template.render(messages, tools=tools, **(template_variables or {}))
        # The template has written the special tokens itself; a second BOS would change the answer.
        return self._text_tokenizer.encode(text, add_special_tokens=False)

    def abort(self, request: Stream | int | None = None) -> None:
        """End a request (a `Stream`, or its `request_id`), or all of them. What came of it is its answer."""
        number = request.request_id if isinstance(request, Stream) else request
        if number is not None and not isinstance(number, (int, np.integer)):
            raise RequestError(f"abort takes a Stream or its request_id, or nothing for all of them, not {number!r}")
        self.engine.abort(None if number is None else [int(number)])

    def stats(self) -> dict[str, int]:
        """Pages, requests and counters, as of now. Pages and requests are counted, `*_tokens` are tokens."""
        return self.engine.stats()

    def close(self) -> None:
        """Stop the engine and free its memory. Requests still running fail with `EngineDied`."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- from text to requests and back ---

    @property
    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.checkpoint.name} was loaded without a tokenizer: it takes and gives token ids")
        return self.tokenizer

    def _ids(self, prompt: Prompt) -> list[int]:
        return self._all_ids([prompt])[0]

    def _all_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt. Texts are tokenised together, which is faster."""
        # An empty list of ids is a prompt where it cannot be an empty list of prompts.
        if not isinstance(prompts, Sequence) or not all(
            _is_prompt(prompt) or (isinstance(prompt, list) and not prompt) for prompt in prompts
        ):
            raise RequestError("a prompt is a text or a list of token ids; `chat` and `stream` take messages")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._text_tokenizer.encode_batch(texts) if texts else ())
        all_ids = [next(encoded) if isinstance(prompt, str) else list(map(int, prompt)) for prompt in prompts]
        bos = self.tokenizer.bos_id if self.tokenizer else None
        for number, ids in enumerate(all_ids):
            if not ids and bos is None:
                where = f" (number {number})" if len(all_ids) > 1 else ""
                raise RequestError(f"the prompt{where} is empty, and the model has no BOS token to start from")
        return [ids or [cast(int, bos)] for ids in all_ids]

    def _asks(
        self, ids: list[int], sampling: Mapping[str, Any], on_text: Callable[[str], None] | None = None
    ) -> list[Ask]:
        """One prompt's n answers, as the engine is asked for them."""
        params = SamplingParams.of(self.sampling_defaults, sampling)
        if "max_tokens" not in sampling:
            room = max(self.limits.max_model_len - len(ids), 1)
            params = replace(params, max_tokens=min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room))
        if on_text is not None and params.n > 1:
            raise RequestError("a stream is one answer: n must be 1")
        eos = self.tokenizer.eos_ids if self.tokenizer and not params.ignore_eos else frozenset[int]()
        stop_ids = tuple(sorted(eos.union(params.stop_token_ids)))
        reads_text = bool(params.stop) or on_text is not None
        return [
            Ask(
                ids,
                params,
                seed,
                stop_ids,
                text=TextStream(self._text_tokenizer, params.stop) if reads_text else None,
                on_text=on_text,
            )
            for seed in _seeds(params.seed, params.n)
        ]

    def _submit_stream(
        self, prompt: Prompt | Sequence[Message], sampling: Mapping[str, Any], on_text: Callable[[str], None]
    ) -> Ticket:
        told = _are_messages(prompt)
        ids = self.render(cast(Sequence[Message], prompt)) if told else self._ids(cast(Prompt, prompt))
        return self.engine.submit_all(self._asks(ids, sampling, on_text))[0]

    def _answer(self, prompts: Sequence[list[int]], sampling: Mapping[str, Any], progress: bool | None) -> list[Any]:
        """A completion for each prompt, or a list of n. If anything stops the wait, everything is aborted."""
        groups = [self._asks(ids, sampling) for ids in prompts]
        tickets = self.engine.submit_all([ask for group in groups for ask in group])
        try:
            _wait([ticket.future for ticket in tickets], progress)
            answers = iter([self._completion(ticket) for ticket in tickets])
            return [_single([next(answers) for _ in group]) for group in groups]
        except BaseException:
            self.engine.abort([ticket.request.id for ticket in tickets])
            raise

    def _completion(self, ticket: Ticket) -> Completion:
        """The whole answer, once it is here, with its text."""
        completion = ticket.future.result()
        if ticket.text is not None or self.tokenizer is None:
            return completion
        return replace(completion, text=self.tokenizer.decode(completion.token_ids))


class Stream:
    """The pieces of one answer's text, as an iterator. Used up, or left, it needs no closing."""

    def __init__(self, llm: LLM, ticket: Ticket, pieces: SimpleQueue[str | None]) -> None:
        self._llm, self._ticket, self._pieces = llm, ticket, pieces
        self._ended = False
        self.request_id = ticket.request.id

    def __iter__(self) -> Iterator[str]:
        # A generator is told when the loop over it is left, and then so is the engine.
        try:
            while True:
                try:
                    piece = next(self)
                except StopIteration:
                    return
                yield piece
        finally:
            if not self._ended:
                self.abort()

    def __next__(self) -> str:
        piece = None if self._ended else self._pieces.get()
        if piece is None:
            self._ended = True
            self._ticket.future.result()  # a failure must not look like an end
            raise StopIteration
        return piece

    def abort(self) -> None:
        """End the answer here. What came is its completion, with finish_reason "abort"."""
        self._llm.abort(self.request_id)

    @property
    def completion(self) -> Completion:
        """The whole answer; waits for its end."""
        return self._llm._completion(self._ticket)


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, Sequence) and len(value) > 0 and are_ids(value))


def _are_messages(value: object) -> bool:
    """Whether it is meant as a conversation, by its first message; an empty list is one without a message."""
    if isinstance(value, Mapping):
        return True  # a message that is not in a list, which will be refused
    return isinstance(value, Sequence) and not isinstance(value, str) and (not value or isinstance(value[0], Mapping))


def _single(completions: list[Completion]) -> Completion | list[Completion]:
    return completions[0] if len(completions) == 1 else completions


def _seeds(seed: int | None, n: int) -> list[int]:
    """A seed for each of n answers: random ones, or ones that follow from `seed`, which the first keeps."""
    if seed is None:
        return [secrets.randbits(63) for _ in range(n)]
    spread = np.random.SeedSequence(seed).generate_state(n, np.uint64) >> np.uint64(1)
    return [seed, *map(int, spread[1:])]


def _sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's generation_config.json says of sampling; nothing if it does not ask to sample."""
    if not generation_config.get("do_sample", generation_config.get("temperature") is not None):
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    # Hugging Face's own default for a model that samples.
    return {"temperature": 1.0} | {n: generation_config[n] for n in names if generation_config.get(n) is not None}


def _wait(futures: Sequence[Future[Completion]], progress: bool | None) -> None:
    """Until all are done, with a bar on stderr if asked for."""
    show = progress if progress is not None else len(futures) > 1 and sys.stderr.isatty()
    if not show:
        wait(futures)
        return
    from rich.console import Console
    from rich.progress import track

    for _ in track(as_completed(futures), "generating", total=len(futures), console=Console(stderr=True)):
        pass
