"""Command-line flags made from the fields of `EngineConfig` and `SamplingParams`, so that each is named once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.errors import ConfigError, RequestError

_ENGINE_HELP = {
    "model": "A folder, a .gguf file or a hub id; without it, a small default model.",
    "revision": "The hub's branch, tag or commit.",
    "token": "The hub's access token.",
    "offline": "Make do with what was fetched before.",
    "device": "Where to run; auto takes a GPU if there is one.",
    "dtype": "Of weights and arithmetic; auto is what the machine multiplies natively.",
    "compile": "One graph (full), one per region (regional) or none (off).",
    "load_format": "dummy fills the model's shapes with random weights.",
    "chat_template": "A jinja file, or the template itself.",
    "max_model_len": "Tokens a request may span, prompt and answer together.",
    "max_decode_bs": "Requests that may decode at once.",
    "max_capture_bs": "The largest batch whose steps are captured as CUDA graphs; 0 for none.",
    "max_capture_tokens": "The most tokens of a step with prompts that is captured as a CUDA graph; 0 for none.",
    "max_step_tokens": "Tokens one step may compute; longer prompts are chunked.",
    "page_size": "Tokens a page of KV holds.",
    "kv_pages": "Pages of KV; sized from free memory if left out.",
    "prefix_cache": "Prompts share the pages of what they begin with.",
    "host_kv_gb": "GB of host memory that requests may be saved to when they have to make room.",
    "in_flight_depth": "Steps submitted before the oldest is read.",
    "autotune": "Measure at start which of several kernels is the fastest.",
    "kernels": "OP=NAME, the kernel an op takes; may be repeated. `fastgraph kernels` lists them.",
    "trace": "Write the scheduler's decisions to this file, for `fastgraph replay`.",
}

_SAMPLING_HELP = {
    "temperature": "0 always takes the likeliest token.",
    "top_k": "Sample among the k likeliest tokens; 0 is all.",
    "top_p": "Sample among the likeliest tokens that make up this probability.",
    "min_p": "Drop tokens less likely than this share of the likeliest.",
    "repetition_penalty": "Above 1 discourages tokens of prompt and answer.",
    "presence_penalty": "Subtracted from the logit of a token that the answer has.",
    "frequency_penalty": "Subtracted as many times as the answer has the token.",
    "logit_bias": "ID=BIAS, added to a token's logit; may be repeated.",
    "seed": "The same seed gives the same answer; random if left out.",
    "n": "How many answers to give.",
    "max_tokens": "Tokens an answer may have.",
    "min_tokens": "No end of text before so many tokens.",
    "stop": "End the answer before this text; may be repeated.",
    "stop_token_ids": "End the answer at this token id; may be repeated.",
    "ignore_eos": "Go on past the model's end of text.",
    "logprobs": "Report the log-probability of each token.",
    "top_logprobs": "And of so many alternatives.",
}

_SINGULAR = {"kernels": "kernel"}  # a flag that is repeated names one at a time
_CHAT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "stop")


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags that reach a command as one argument, `name`, which is what `collect` makes of their values."""

    name: str
    parameters: Sequence[inspect.Parameter]
    collect: Callable[[dict[str, Any]], Any]


def takes(*groups: FlagGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a typer command the flags of some groups. Values that cannot work are a usage error."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        added = [parameter for group in groups for parameter in group.parameters]

        def run(**values: Any) -> None:
            for group in groups:
                chosen = {parameter.name: values.pop(parameter.name) for parameter in group.parameters}
                try:
                    values[group.name] = group.collect(chosen)
                except (ConfigError, RequestError) as error:
                    raise typer.BadParameter(str(error)) from error
            command(**values)

        kept = [parameter for name, parameter in own.items() if name not in {group.name for group in groups}]
        signature = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*kept, *added)]
        run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {}
        run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        return run

    return decorate


def _flag(name: str, annotation: Any, default: Any, help: str, panel: str) -> inspect.Parameter:
    long = _SINGULAR.get(name, name).replace("_", "-")
    names = [f"--{long}/--no-{long}" if default is True else f"--{long}", *(["-m"] if name == "model" else [])]
    option = typer.Option(*names, help=help, rich_help_panel=panel, show_default=default not in (None, "auto", False))
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )


def _engine_flags() -> list[inspect.Parameter]:
    hints = get_type_hints(EngineConfig) | {"kernels": list[str] | None}
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(EngineConfig)}
    return [_flag(name, hints[name], value, _ENGINE_HELP.get(name, ""), "Engine") for name, value in defaults.items()]


def _engine(values: dict[str, Any]) -> EngineConfig:
    pairs = [text.partition("=") for text in values.pop("kernels") or ()]
    wrong = [op for op, _, name in pairs if not op or not name]
    if wrong:
        raise ConfigError(f"a kernel is chosen by OP=NAME, like decode_attention=triton, not {wrong[0]!r}")
    return EngineConfig(**values, kernels={op: name for op, _, name in pairs})


def _sampling_flags(names: Sequence[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(SamplingParams)
    # A flag that is left out leaves the matter to the model's generation config.
    kinds: dict[Any, Any] = {float: float | None, tuple[str, ...]: list[str] | None, tuple[int, ...]: list[int] | None}
    kinds |= {int: int | None, Mapping[int, float]: list[str] | None}
    return [
        _flag(name, kinds.get(hints[name], hints[name]), False if hints[name] is bool else None, help, "Sampling")
        for name, help in _SAMPLING_HELP.items()
        if name in names
    ]


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling options that were given, checked."""
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    if "top_logprobs" in given:
        given["logprobs"] = True
    SamplingParams.of({}, given)
    return given


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise RequestError(f"a logit bias is written ID=BIAS, like 42=-100, not {text!r}") from error


ENGINE = FlagGroup("engine", _engine_flags(), _engine)
SAMPLING = FlagGroup("sampling", _sampling_flags(tuple(_SAMPLING_HELP)), _sampling)
CHAT_SAMPLING = FlagGroup("sampling", _sampling_flags(_CHAT), _sampling)
