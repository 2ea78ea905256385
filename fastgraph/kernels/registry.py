"""Which kernel serves each op: settled once, when an engine starts, from what its model asks and the machine has.

An `Op` is a computation with a fixed meaning and fixed arguments. An `Implementation` says which signatures, machines
and features it takes. Those that take what is asked are ranked; the first serves, unless another is forced or was
measured to be faster (`fastgraph.kernels.autotune`). Only those that are chosen are imported.
"""

from __future__ import annotations

import importlib.util
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fastgraph.errors import ConfigError, FastgraphWarning

Kernel = Callable[..., Any]
Kernels = Mapping[str, Kernel]  # by op

ENTRY_POINTS = "fastgraph.kernels"  # each names an `Implementation`, or several in a list
FEATURES = ("rope", "norms", "window", "sinks")  # what a model's attention may ask for beside the plain softmax
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Op:
    """A computation that has several implementations. Their arguments: `fastgraph/kernels/builtin.py`."""

    name: str
    does: str
    features: frozenset[str] = frozenset()  # those of `FEATURES` that its implementations must cope with
    captured: bool = True  # runs in decode steps, which CUDA graphs record
    devices: tuple[str, ...] = ("cpu", "cuda")  # elsewhere there is no choice: the compiler fuses it with the rest


_TURNS, _ATTENTION = frozenset({"rope", "norms"}), frozenset(FEATURES)
OPS = {
    op.name: op
    for op in (
        Op("decode_attention", "one token a row: norm, rotate, write to pages, attend", _ATTENTION),
        Op("prefill_attention", "rows of any length: norm, rotate, write to pages, attend", _ATTENTION, captured=False),
        Op("rotate_and_write", "norm, rotate, write to pages, for an attention that only attends", _TURNS),
        Op("linear", "a linear with its norm, SwiGLU and residual", devices=("cuda",)),
        Op("experts", "each token through the experts that it was routed to"),
        Op("sample", "from logits to tokens"),
    )
}


@dataclass(frozen=True, slots=True)
class Signature:
    """What an engine asks of its kernels: the same in every step. Raises `ConfigError` for what cannot be."""

    device: str  # cpu or cuda
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    hidden: int
    vocab: int
    layers: int
    features: frozenset[str] = frozenset()
    capability: tuple[int, int] = (0, 0)  # compute capability of the GPU
    graphs: bool = False  # whether CUDA graphs record decode steps
    intermediate: int = 0  # width inside an MLP, or inside an expert; 0 if the model does not say
    experts: int = 0
    top_k: int = 0  # experts of a token

    def __str__(self) -> str:
        asks = "".join(f", {name}" for name in sorted(self.features))
        heads = f"{self.heads} heads of {self.head_dim}, {self.kv_heads} of keys"
        return f"{self.dtype}, {heads}, pages of {self.page_size}{asks}"

    def __post_init__(self) -> None:
        sizes = ("heads", "kv_heads", "head_dim", "page_size", "hidden", "vocab", "layers")
        wrong = [f"{name} {getattr(self, name)!r}" for name in sizes if getattr(self, name) < 1]
        wrong += [f"feature {name}" for name in sorted(self.features - set(FEATURES))]
        wrong += [f"dtype {self.dtype}"] * (self.dtype not in DTYPES)
        if wrong or self.heads % self.kv_heads:
            raise ConfigError(f"no kernel takes {', '.join(wrong) or f'{self.heads} heads for {self.kv_heads}'}")


def nothing(signature: Signature) -> str:
    """Nothing to object, nothing to build."""
    return ""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op, and when it can be used."""

    op: str
    name: str
    load: Callable[[], Kernel]  # called once, if it is chosen
    devices: tuple[str, ...] = ("cpu", "cuda")
    capability: tuple[int, int] = (0, 0)  # the least
    packages: tuple[str, ...] = ()  # modules that it imports
    dtypes: tuple[str, ...] = DTYPES
    features: frozenset[str] = frozenset()
    max_rows: int | None = None  # tokens it takes in one call
    capturable: bool = True  # reads nothing on the host, so that a CUDA graph may record it
    refuses: Callable[[Signature], str] = nothing  # why it cannot take a signature; "" if it can
    build: Callable[[Signature], str] = nothing  # begins, in the background, what it lacks; says so, or ""
    rank: int = 0  # the highest serves; the built-in kernels have 10, the reference 0
    version: str = ""  # of who brings it: what was measured of another is measured again

    def why_not(self, signature: Signature) -> str:
        """Why it cannot serve, in words; "" if it can."""
        return self.lacks(signature) or self.refuses(signature)

    def lacks(self, signature: Signature) -> str:
        """What keeps it from serving in principle, whatever it may still build."""
        op = OPS[self.op]
        lacks = sorted(signature.features & op.features - self.features)
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        reasons = {
            f"runs on {' and '.join(self.devices)}": signature.device not in self.devices,
            f"needs compute capability {self.capability[0]}.{self.capability[1]}": signature.device == "cuda"
            and signature.capability < self.capability,
            f"needs {', '.join(missing)}, not installed here": bool(missing),
            f"takes {', '.join(self.dtypes)}": signature.dtype not in self.dtypes,
            f"lacks {', '.join(lacks)}": bool(lacks),
            "reads on the host, which no CUDA graph can record": signature.graphs
            and op.captured
            and not self.capturable,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves an op. `candidates` come best first; one with `max_rows` serves up to there, the next from there."""

    op: str
    candidates: tuple[Implementation, ...]
    refused: tuple[tuple[Implementation, str], ...]
    forced: bool
    fastest: Mapping[int, str] = field(default_factory=dict)  # rows up to which, and the name: what was measured

    def kernel(self) -> Kernel:
        """The function that serves: the one implementation's, or by the number of rows where several share the op."""
        parts = self.parts()
        kernels = [implementation.load() for _, implementation in parts]
        if len(kernels) == 1:
            return kernels[0]
        bounds = [most for most, _ in parts if most is not None]
        return lambda *args: kernels[bisect_left(bounds, len(args[0]))](*args)

    def parts(self) -> list[tuple[int | None, Implementation]]:
        """Up to how many rows who serves, ascending; the last has no bound."""
        bounds: list[int | None] = [*sorted(self.fastest or {i.max_rows for i in self.candidates if i.max_rows}), None]
        parts = [(most, self._best(most)) for most in bounds]
        return [part for part, after in zip(parts, [*parts[1:], None], strict=True) if not after or after[1] != part[1]]

    def who(self) -> str:
        """The names of those that serve, and up to how many rows where they share the op."""
        return ", ".join(i.name if most is None else f"{i.name} up to {most} rows" for most, i in self.parts())

    def verdicts(self) -> list[tuple[Implementation, str]]:
        """Every implementation, and why it serves or not."""
        serving = {implementation for _, implementation in self.parts()}
        why = "forced" if self.forced else "measured" if self.fastest else "the highest rank that fits"
        able = ((i, f"serves: {why}" if i in serving else f"fits, but has rank {i.rank}") for i in self.candidates)
        return [*able, *self.refused]

    def _best(self, rows: int | None) -> Implementation:
        """Who serves so many rows; None is any number."""
        measured = self.fastest.get(max(self.fastest) if rows is None else rows) if self.fastest else None
        in_order = sorted(self.candidates, key=lambda implementation: implementation.name != measured)
        for implementation in in_order:
            if implementation.max_rows is None or (rows is not None and rows <= implementation.max_rows):
                return implementation
        raise ConfigError(f"nothing computes {self.op} of any number of rows here{_listed(self.refused)}")


_registered: dict[tuple[str, str], Implementation] = {}


def register(implementation: Implementation) -> None:
    """Offer an implementation from now on. One of the same op and name is replaced."""
    if implementation.op not in OPS:
        raise ConfigError(f"there is no op {implementation.op}; ops are: {', '.join(OPS)}")
    _registered[implementation.op, implementation.name] = implementation


@cache
def _load_offers() -> None:
    """Register what comes with fastgraph, then what installed packages offer."""
    from fastgraph.kernels.builtin import BUILTIN

    for implementation in BUILTIN:
        _registered.setdefault((implementation.op, implementation.name), implementation)
    for point in entry_points(group=ENTRY_POINTS):
        source = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        try:
            offered = point.load()
            for implementation in (offered,) if isinstance(offered, Implementation) else offered:
                register(replace(implementation, version=implementation.version or source))
        except Exception as error:  # somebody else's package must not keep an engine from starting
            message = f"the kernels of {source} are left out: {type(error).__name__}: {error}"
            warnings.warn(message, FastgraphWarning, stacklevel=2)


def implementations(op: str) -> list[Implementation]:
    """All that are known of an op, the highest rank first."""
    _load_offers()
    return sorted((i for i in _registered.values() if i.op == op), key=lambda i: -i.rank)


def choose(signature: Signature, forced: Mapping[str, str]) -> dict[str, Choice]:
    """Who serves each op. Raises `ConfigError` for a forced name that does not exist or cannot, or if nobody can."""
    ops = [op.name for op in OPS.values() if signature.device in op.devices]
    unknown = [op for op in forced if op not in ops]
    if unknown:
        what = f"there is no op {', '.join(unknown)} to choose a kernel for on a {signature.device}"
        raise ConfigError(f"{what}; ops are: {', '.join(ops)}")
    return {op: _choose(op, signature, forced.get(op)) for op in ops}


def _choose(op: str, signature: Signature, name: str | None) -> Choice:
    known = implementations(op)
    verdicts = [(implementation, implementation.why_not(signature)) for implementation in known]
    able = tuple(implementation for implementation, reason in verdicts if not reason)
    refused = tuple((implementation, reason) for implementation, reason in verdicts if reason)
    if name is None:
        if not able:
            raise ConfigError(f"nothing computes {op} here{_listed(refused)}")
        return Choice(op, able, refused, forced=False)
    if name not in [implementation.name for implementation in known]:
        raise ConfigError(f"{op} has no kernel {name}; it has {', '.join(i.name for i in known)}")
    # Others serve only what the forced one cannot take: more rows than it can.
    chosen = [implementation for implementation in able if implementation.name == name]
    if not chosen:
        raise ConfigError(f"{op} cannot be forced{_listed(r for r in refused if r[0].name == name)}")
    rest = tuple(i for i in able if i.name != name) if chosen[0].max_rows is not None else ()
    return Choice(op, (chosen[0], *rest), refused, forced=True)


def _listed(refused: Iterable[tuple[Implementation, str]]) -> str:
    return "".join(f"; {implementation.name}: {reason}" for implementation, reason in refused)


def build_missing(choices: Mapping[str, Choice], signature: Signature) -> None:
    """Begin to build what would have served if it were built, for the next start; warn that it happens."""
    for choice in choices.values():
        for implementation, _ in () if choice.forced else choice.refused:
            said = "" if implementation.lacks(signature) else implementation.build(signature)
            if said:
                warnings.warn(said, FastgraphWarning, stacklevel=2)


def load(choices: Mapping[str, Choice]) -> Kernels:
    """Import what was chosen."""
    return {op: choice.kernel() for op, choice in choices.items()}
