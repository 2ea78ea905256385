"""What a user may set: `EngineConfig` once per engine, `SamplingParams` once per request. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from fastgraph.errors import ConfigError, RequestError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
CompileMode = Literal["auto", "full", "regional", "off"]
LoadFormat = Literal["auto", "dummy"]

# Rows of per-slot device tables; a request that needs more is refused.
MAX_STOP_IDS = 32
MAX_LOGIT_BIAS = 512
MAX_LOGPROBS = 20
MAX_N = 16384  # of one prompt: each answer is a request, and all are submitted together
MAX_IN_FLIGHT = 64  # steps: each has a buffer of its own for what comes back


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine. `None` and "auto" are settled when the model and the device are known.

    Capacity and speed are apart: `max_decode_bs` is how many requests may decode at once. The command line makes its
    flags of the fields and what is said of them; there, `kernels` is written OP=NAME.
    """

    model: Annotated[str | None, "A folder, a .gguf file or a hub id; without it, a small default model."] = None
    revision: Annotated[str | None, "The hub's branch, tag or commit."] = None
    token: Annotated[str | None, "The hub's access token."] = None
    offline: Annotated[bool, "Make do with what was fetched before."] = False
    device: Annotated[Device, "Where to run; auto takes a GPU if there is one."] = "auto"
    dtype: Annotated[DType, "Of weights and arithmetic; auto is what the machine multiplies natively."] = "auto"
    compile: Annotated[CompileMode, "One graph (full), one per region (regional) or none (off)."] = "auto"
    load_format: Annotated[LoadFormat, "dummy fills the model's shapes with random weights."] = "auto"
    chat_template: Annotated[str | None, "A jinja file, or the template itself."] = None
    max_model_len: Annotated[int | None, "Tokens a request may span, prompt and answer together."] = None
    max_decode_bs: Annotated[int | None, "Requests that may decode at once."] = None
    max_capture_bs: Annotated[int | None, "The largest batch captured as a CUDA graph; 0 for none."] = None
    max_capture_tokens: Annotated[int | None, "The most tokens of a captured step with prompts; 0 for none."] = None
    max_step_tokens: Annotated[int | None, "Tokens one step may compute; longer prompts are chunked."] = None
    page_size: Annotated[int, "Tokens a page of KV holds."] = 16
    kv_pages: Annotated[int | None, "Pages of KV; sized from the memory that the weights leave free."] = None
    prefix_cache: Annotated[bool, "Prompts share the pages of what they begin with."] = True
    host_kv_gb: Annotated[float | None, "GB of host memory for requests that have to make room."] = None
    in_flight_depth: Annotated[int | None, "Steps submitted before the oldest is read."] = None
    multi_step: Annotated[int | None, "Decode steps that may count as one step, if they are short."] = None
    autotune: Annotated[bool, "Measure at start which of several kernels is the fastest."] = True
    kernels: Annotated[
        Mapping[str, str], "OP=NAME, the kernel an op takes; may be repeated. `fastgraph kernels` lists them."
    ] = field(default_factory=dict)
    trace: Annotated[str | None, "Write the scheduler's decisions to this file, for `fastgraph replay`."] = None

    def __post_init__(self) -> None:
        if self.model == "":
            raise ConfigError("model is empty: name a folder, a .gguf file or a hub id, or leave it out")
        choices = {"device": Device, "dtype": DType, "compile": CompileMode, "load_format": LoadFormat}
        for name, literal in choices.items():
            value, allowed = getattr(self, name), get_args(literal)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        texts = dict.fromkeys(("model", "revision", "token", "chat_template", "trace"), (str | None, "text"))
        switches = dict.fromkeys(("offline", "prefix_cache", "autotune"), (bool, "True or False"))
        for name, (kind, wanted) in (texts | switches).items():
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name} must be {wanted}, not {value!r}")
        positive = ("max_decode_bs", "max_step_tokens", "page_size", "kv_pages", "multi_step")
        least_of = dict.fromkeys(("max_capture_bs", "max_capture_tokens", "in_flight_depth"), 0)
        least_of |= dict.fromkeys(positive, 1) | {"max_model_len": 2}  # a token of the prompt and one of the answer
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < least):
                raise ConfigError(f"{name} must be a whole number from {least} up, not {value!r}")
            if value is not None and value >= 2**31:  # the device counts in int32
                raise ConfigError(f"{name} must be below 2**31, not {value}")
        if self.in_flight_depth is not None and self.in_flight_depth > MAX_IN_FLIGHT:
            raise ConfigError(f"in_flight_depth must be {MAX_IN_FLIGHT} at most, not {self.in_flight_depth}")
        if self.host_kv_gb is not None and (not _is_real(self.host_kv_gb) or self.host_kv_gb < 0):
            raise ConfigError(f"host_kv_gb must be a number from 0 up, not {self.host_kv_gb!r}")
        if not isinstance(self.kernels, Mapping) or not all(
            isinstance(i, str) for p in self.kernels.items() for i in p
        ):
            raise ConfigError(f"kernels maps ops to names of implementations, and is not {self.kernels!r}")
        # The trace is opened when the engine stands, which is late to learn that it cannot be.
        if self.trace is not None:
            check_writable("the trace", self.trace)


def check_writable(what: str, file: str) -> None:
    """Refuse a file that could not be written, before there is something to write. Raises `ConfigError`."""
    path = Path(file).absolute()
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder to write {what} {file} to")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{what} {file} cannot be written: it is a folder, or not allowed")
    except OSError as error:  # of a name that cannot be one
        raise ConfigError(f"{what} {file} cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    Order of the filters: logit_bias, penalties, min_tokens, temperature, top_k, top_p, min_p. `temperature=0` is
    argmax. Log-probabilities are those of the raw model, before any of them. The repetition penalty divides logits
    above 0 and multiplies those below (CTRL, arXiv:1909.05858). `max_tokens=None` is as many as the context leaves.
    """

    temperature: Annotated[float, "0 always takes the likeliest token."] = 0.0
    top_k: Annotated[int, "Sample among the k likeliest tokens; 0 is all."] = 0
    top_p: Annotated[float, "Sample among the likeliest tokens that make up this probability."] = 1.0
    min_p: Annotated[float, "Drop tokens less likely than this share of the likeliest."] = 0.0
    repetition_penalty: Annotated[float, "Above 1 discourages tokens of prompt and answer."] = 1.0
    presence_penalty: Annotated[float, "Subtracted from the logit of a token that the answer has."] = 0.0
    frequency_penalty: Annotated[float, "Subtracted as many times as the answer has the token."] = 0.0
    logit_bias: Annotated[Mapping[int, float], "ID=BIAS, added to a token's logit; may be repeated."] = field(
        default_factory=dict
    )
    seed: Annotated[int | None, "The same seed gives the same answer; random if left out."] = None
    n: Annotated[int, "How many answers to give."] = 1
    max_tokens: Annotated[int | None, "Tokens an answer may have."] = None
    min_tokens: Annotated[int, "No end of text before so many tokens."] = 0
    stop: Annotated[tuple[str, ...], "End the answer before this text; may be repeated."] = ()
    stop_token_ids: Annotated[tuple[int, ...], "End the answer at this token id; may be repeated."] = ()
    ignore_eos: Annotated[bool, "Go on past the model's end of text."] = False
    logprobs: Annotated[bool, "Report the log-probability of each token."] = False
    top_logprobs: Annotated[int, "And of so many alternatives."] = 0

    @classmethod
    def of(cls, defaults: Mapping[str, Any], options: Mapping[str, Any]) -> SamplingParams:
        """Build from a model's defaults and a caller's options. Unknown names raise `RequestError`."""
        names = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(options) - names)
        if unknown:
            known = ", ".join(sorted(names))
            raise RequestError(f"unknown sampling parameter {', '.join(unknown)}; known are: {known}")
        merged = {**defaults, **options}
        if isinstance(merged.get("stop"), str):
            merged["stop"] = (merged["stop"],)
        for name in ("stop", "stop_token_ids"):
            value = merged.get(name, ())
            if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
                wanted = "text or a list of texts" if name == "stop" else "a list"
                raise RequestError(f"{name} must be {wanted}, not {value!r}")
            merged[name] = tuple(value or ())
        if merged.get("logit_bias") is None:
            merged.pop("logit_bias", None)
        return cls(**merged)

    def __post_init__(self) -> None:
        _number(self, "temperature", 0.0, None)
        _number(self, "top_p", 0.0, 1.0, low_open=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, None, low_open=True)
        _number(self, "presence_penalty", None, None)
        _number(self, "frequency_penalty", None, None)
        _whole(self, "top_k", 0)
        _whole(self, "n", 1)
        _whole(self, "min_tokens", 0)
        _whole(self, "top_logprobs", 0)
        if self.max_tokens is not None:
            _whole(self, "max_tokens", 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.seed is not None:
            _whole(self, "seed", 0)
            if self.seed >= 2**63:
                raise RequestError(f"seed must be below 2**63, not {self.seed}")
        if self.n > MAX_N:
            raise RequestError(f"n must be at most {MAX_N}, not {self.n}: ask again for more")
        if self.top_logprobs > MAX_LOGPROBS:
            raise RequestError(f"top_logprobs must be at most {MAX_LOGPROBS}, not {self.top_logprobs}")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=True")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop strings must be non-empty text, not {list(self.stop)!r}")
        if not all(_is_int(i) and i >= 0 for i in self.stop_token_ids):
            raise RequestError(f"stop_token_ids must be token ids, not {list(self.stop_token_ids)!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias maps token ids to numbers, and is not {self.logit_bias!r}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # what is checked here is not to change later
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias may name {MAX_LOGIT_BIAS} tokens at most, not {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not _is_int(token) or token < 0 or not _is_real(bias):
                raise RequestError(f"logit_bias maps token ids to numbers, not {token!r} to {bias!r}")
        if not isinstance(self.logprobs, bool) or not isinstance(self.ignore_eos, bool):
            raise RequestError("logprobs and ignore_eos are True or False; ask for alternatives with top_logprobs")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    # The device keeps numbers in float32. (No NaN is below anything.)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3e38


def _whole(params: SamplingParams, name: str, low: int) -> None:
    value = getattr(params, name)
    if not _is_int(value) or value < low:
        raise RequestError(f"{name} must be a whole number of {low} or more, not {value!r}")


def _number(params: SamplingParams, name: str, low: float | None, high: float | None, low_open: bool = False) -> None:
    value = getattr(params, name)
    below = low is not None and _is_real(value) and (value <= low if low_open else value < low)
    if not _is_real(value) or below or (high is not None and value > high):
        lower = "" if low is None else f" {'above' if low_open else 'from'} {low:g}"
        upper = "" if high is None else f" up to {high:g}"
        raise RequestError(f"{name} must be a number{lower}{upper}, not {value!r}")
