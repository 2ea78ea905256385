"""Command-line flags made from the fields of `EngineConfig` and `SamplingParams`, so that each is named once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.errors import ConfigError, RequestError

_SINGULAR = {"kernels": "kernel"}  # a flag that is repeated names one at a time
_CHAT_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "stop")
_KINDS: dict[Any, Any] = {Mapping[str, str]: list[str] | None, Mapping[int, float]: list[str] | None}
_SAMPLING_KINDS = _KINDS | {int: int | None, float: float | None}
_SAMPLING_KINDS |= {tuple[str, ...]: list[str] | None, tuple[int, ...]: list[int] | None}
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


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
        signature = [parameter.replace(kind=_KEYWORD_ONLY) for parameter in (*kept, *added)]
        run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {}
        run.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        return run

    return decorate


def _flags(options: type, defaults: Mapping[str, Any], kinds: Mapping[Any, Any], panel: str) -> list[inspect.Parameter]:
    """Flags for the fields of `options` that have a default here; `kinds` has the types that flags write otherwise."""
    hints = get_type_hints(options, include_extras=True)
    flags = []
    for name, default in defaults.items():
        kind, help = get_args(hints[name])
        long = _SINGULAR.get(name, name).replace("_", "-")
        names = [f"--{long}/--no-{long}" if default is True else f"--{long}", *(["-m"] if name == "model" else [])]
        shown = default not in (None, "auto", False)
        metavar = "<str>" if kind == Mapping[str, str] else None  # a long one would leave no room for the flags' names
        if get_origin(kind) is Literal:
            metavar, help = "<word>", f"{help} One of {', '.join(get_args(kind))}."
        option = typer.Option(*names, help=help, rich_help_panel=panel, show_default=shown, metavar=metavar)
        written: Any = kinds.get(kind, kind)
        flags.append(inspect.Parameter(name, _KEYWORD_ONLY, default=default, annotation=Annotated[written, option]))
    return flags


def _engine(values: dict[str, Any]) -> EngineConfig:
    pairs = [text.partition("=") for text in values.pop("kernels") or ()]
    wrong = [op for op, _, name in pairs if not op or not name]
    if wrong:
        raise ConfigError(f"a kernel is chosen by OP=NAME, like decode_attention=triton, not {wrong[0]!r}")
    return EngineConfig(**values, kernels=_once("--kernel", [(op, name) for op, _, name in pairs]))


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling options that were given, checked."""
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
    if "logit_bias" in given:
        given["logit_bias"] = _once("--logit-bias", [_bias(text) for text in given["logit_bias"]])
    if "top_logprobs" in given:
        given["logprobs"] = True
    SamplingParams.of({}, given)
    return given


def _once(flag: str, pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """The pairs as a dict. Raises `ConfigError` if one would take the place of another."""
    keys = [key for key, _ in pairs]
    if twice := [str(key) for key in dict(pairs) if keys.count(key) > 1]:
        raise ConfigError(f"{flag} is given more than once for {', '.join(twice)}")
    return dict(pairs)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise RequestError(f"a logit bias is written ID=BIAS, like 42=-100, not {text!r}") from error


_ENGINE = {f.name: None if f.default is MISSING else f.default for f in fields(EngineConfig)}
# A flag that is left out leaves the matter to the model's generation config.
_SAMPLING = {f.name: False if f.default is False else None for f in fields(SamplingParams)}
_CHAT = {name: None for name in _SAMPLING if name in _CHAT_NAMES}

ENGINE = FlagGroup("engine", _flags(EngineConfig, _ENGINE, _KINDS, "Engine"), _engine)
SAMPLING = FlagGroup("sampling", _flags(SamplingParams, _SAMPLING, _SAMPLING_KINDS, "Sampling"), _sampling)
CHAT_SAMPLING = FlagGroup("sampling", _flags(SamplingParams, _CHAT, _SAMPLING_KINDS, "Sampling"), _sampling)
