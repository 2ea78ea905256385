"""What a user may set: `EngineConfig` once per engine, `SamplingParams` once per request. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from fastgraph.errors import ConfigError, RequestError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
CompileMode = Literal["auto", "full", "regional", "off"]
LoadFormat = Literal["auto", "dummy"]

# Rows of per-slot device tables; a request that needs more is refused.
MAX_STOP_IDS = 32
MAX_LOGIT_BIAS = 512
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine. `None` and "auto" are settled when the model and the device are known.

    Capacity and speed are apart: `max_decode_bs` is how many requests may decode at once.
    """

    model: str | None = None  # folder, .gguf file or hub id; None is the default small model
    revision: str | None = None
    token: str | None = None
    offline: bool = False
    device: Device = "auto"
    dtype: DType = "auto"
    compile: CompileMode = "auto"
    load_format: LoadFormat = "auto"
    chat_template: str | None = None  # a path to a jinja file, or the template itself
    max_model_len: int | None = None  # tokens a request may span, prompt and answer together
    max_decode_bs: int | None = None
    max_capture_bs: int | None = None  # decode rows that CUDA graphs are captured for; 0: none, None: max_decode_bs
    max_capture_tokens: int | None = None  # tokens of steps with prompts that CUDA graphs are captured for; 0: none
    max_step_tokens: int | None = None  # tokens one step may compute; longer prompts are chunked
    page_size: int = 16  # tokens a page holds
    kv_pages: int | None = None  # None: sized from the memory that is free once the weights are loaded
    prefix_cache: bool = True  # prompts share the pages of what they begin with
    host_kv_gb: float | None = None  # host memory that requests may be saved to when they have to make room
    in_flight_depth: int | None = None  # steps submitted before the oldest is read
    autotune: bool = True  # measure at start which of several kernels for an op is the fastest
    kernels: Mapping[str, str] = field(default_factory=dict)  # op -> the implementation to take, whatever is faster
    trace: str | None = None  # a file to write the scheduler's decisions to

    def __post_init__(self) -> None:
        choices = {"device": Device, "dtype": DType, "compile": CompileMode, "load_format": LoadFormat}
        for name, literal in choices.items():
            _one_of(name, getattr(self, name), get_args(literal))
        capacities = ("max_model_len", "max_decode_bs", "max_step_tokens", "page_size", "kv_pages")
        for name in (*capacities, "max_capture_bs", "max_capture_tokens"):
            value = getattr(self, name)
            least = 0 if name.startswith("max_capture") else 1
            if value is not None and (not _is_int(value) or value < least):
                raise ConfigError(f"{name} must be a whole number from {least} up, not {value!r}")
        if self.in_flight_depth is not None and (not _is_int(self.in_flight_depth) or self.in_flight_depth < 0):
            raise ConfigError(f"in_flight_depth must be 0 or more, not {self.in_flight_depth!r}")
        if self.host_kv_gb is not None and (not _is_real(self.host_kv_gb) or self.host_kv_gb < 0):
            raise ConfigError(f"host_kv_gb must be a number from 0 up, not {self.host_kv_gb!r}")
        if not isinstance(self.kernels, Mapping) or not all(
            isinstance(i, str) for p in self.kernels.items() for i in p
        ):
            raise ConfigError(f"kernels maps ops to names of implementations, and is not {self.kernels!r}")
        # The trace is opened when the engine stands, which is late to learn that it cannot be.
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise ConfigError(f"there is no folder to write the trace {self.trace} to")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    Order of the filters: logit_bias, penalties, min_tokens, temperature, top_k, top_p, min_p. `temperature=0` is
    argmax. Log-probabilities are those of the raw model, before any of them.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: all of the vocabulary
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides or multiplies logits of prompt and answer tokens (CTRL, arXiv:1909.05858)
    presence_penalty: float = 0.0  # subtracted once for a token that the answer has
    frequency_penalty: float = 0.0  # subtracted as many times as the answer has it
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: random
    n: int = 1
    max_tokens: int | None = None  # None: as many as the context leaves
    min_tokens: int = 0  # no end of text before this many tokens
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

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
                raise RequestError(f"{name} must be a list, not {value!r}")
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
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias may name {MAX_LOGIT_BIAS} tokens at most, not {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not _is_int(token) or token < 0 or not _is_real(bias):
                raise RequestError(f"logit_bias maps token ids to numbers, not {token!r} to {bias!r}")
        if self.logprobs not in (True, False) or self.ignore_eos not in (True, False):
            raise RequestError("logprobs and ignore_eos are True or False; ask for alternatives with top_logprobs")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


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
