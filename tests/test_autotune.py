"""Measuring at start: what is wrong is never chosen however fast, the fastest of the rest is, and it is remembered."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgraph import compile_cache
from fastgraph.errors import FastgraphWarning
from fastgraph.kernels import autotune, builtin, problems, registry
from fastgraph.kernels.attention import Pages, Turn
from fastgraph.kernels.builtin import after_writing
from fastgraph.kernels.registry import Choice, Implementation, Kernel, Signature

SIGNATURE = Signature("cpu", "float32", 4, 2, 16, 8, 32, 50, 2, frozenset({"window"}))
FAST, SLOW = 0.0, 0.02  # seconds, of a kernel that takes about a millisecond


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("FASTGRAPH_CACHE", str(tmp_path))
    registry.implementations("sample")
    known = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(known)


class Fake:
    """A prefill attention that takes its time, or is wrong; it counts its calls."""

    def __init__(self, name: str, delay: float = FAST, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.calls, self._delay, self._change, self.name = 0, delay, change, name
        self._reference = next(i for i in registry.implementations("prefill_attention") if i.name == "reference").load()

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        time.sleep(self._delay)
        return self._change(self._reference(*args))

    def offer(self, **options: Any) -> Fake:
        features = frozenset({"window"})
        registry.register(Implementation("prefill_attention", self.name, lambda: self, features=features, **options))
        return self


def tune(**options: Any) -> Choice:
    said: list[tuple[str, float | None]] = []
    choices = registry.choose(SIGNATURE, options.get("forced", {}))
    found = autotune.tune(choices, SIGNATURE, 4, options.get("tokens", 20), lambda *phase: said.append(phase))
    assert all(phase == "measuring kernels for prefill_attention" and 0 <= (done or 0) < 1 for phase, done in said)
    return found["prefill_attention"]


def test_where_there_is_one_kernel_nothing_is_measured(tmp_path: Path) -> None:
    assert tune().who() == "reference"
    assert not list(tmp_path.rglob("*.json"))


def test_the_fastest_serves_by_the_number_of_rows() -> None:
    Fake("slow", SLOW).offer(rank=30)
    few = Fake("few", FAST).offer(rank=20, max_rows=8)
    Fake("slower", 2 * SLOW).offer(rank=10)
    choice = tune()
    assert few.calls
    assert choice.who() == "few up to 8 rows, slow"
    assert [name for _, name in sorted(choice.fastest.items())] == ["few", "few", "slow"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: x * 1.01, "is 0.01 off the reference"),
        (lambda x: x * torch.nan, "is nan off the reference"),
        (lambda x: x[0] if len(x) > 8 else x, "of 20 rows"),
        (lambda x: 1 / 0, "fails with ZeroDivisionError"),
    ],
)
def test_a_fast_one_that_is_wrong_is_left_out_and_that_is_said(change: Any, told: str) -> None:
    Fake("wrong", FAST, change).offer(rank=30)
    Fake("right", SLOW).offer(rank=20)
    with pytest.warns(FastgraphWarning, match="prefill_attention: wrong is left out"):
        choice = tune()
    assert choice.who() == "right"
    reasons = {implementation.name: reason for implementation, reason in choice.verdicts()}
    assert told in reasons["wrong"]
    assert reasons["right"] == "serves: measured"


def test_the_next_start_finds_what_was_measured_and_another_version_measures_again() -> None:
    slow, fast = Fake("slow", SLOW).offer(rank=30), Fake("fast").offer(rank=20, version="1")
    assert tune().who() == "fast"
    before = slow.calls, fast.calls
    assert tune().who() == "fast"
    assert (slow.calls, fast.calls) == before
    assert tune(tokens=9).who() == "fast"  # fewer than were measured
    recalled = autotune.recall(registry.choose(SIGNATURE, {}), SIGNATURE)["prefill_attention"]
    assert recalled.who() == "fast"
    assert (slow.calls, fast.calls) == before
    fast.offer(rank=20, version="2")
    assert tune().who() == "fast"
    assert fast.calls > before[1]
    before = slow.calls, fast.calls
    tune(tokens=30)  # more than were measured
    assert fast.calls > before[1]
    other = registry.choose(replace(SIGNATURE, head_dim=32), {})
    assert autotune.recall(other, replace(SIGNATURE, head_dim=32)) == other


PACKAGE = {
    "offers.py": """
from functools import partial
from fastgraph.kernels import registry
from fastgraph.kernels.registry import Implementation

def load(name):
    from . import kernel
    return partial(kernel.attend, name)

OFFERED = [
    Implementation("prefill_attention", name, partial(load, name), features=frozenset({"window"}), rank=20)
    for name in ("one", "two")
]
""",
    "kernel.py": """
import time
from fastgraph.kernels.reference import attention_reference

def attend(name, *args):
    CALLS.append(name)
    time.sleep(0.02 if name == SLOW else 0)
    return attention_reference(*args)

CALLS, SLOW = [], "one"
""",
}


def test_what_another_process_measured_meanwhile_stays() -> None:
    Fake("fast", change=lambda x: compile_cache.add(autotune.RECORD, {"another": {"most": 1}}) or x).offer(rank=20)
    Fake("slow", SLOW).offer(rank=30)
    assert tune().who() == "fast"
    record = compile_cache.read(autotune.RECORD)
    assert len(record) == 2
    assert record["another"] == {"most": 1}


def test_an_edited_kernel_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its package's version stays: what counts is the code, beside its module too."""
    folder = tmp_path / "site" / "edited_kernels"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder.parent))

    def start(**files: str) -> tuple[str, int]:
        """As a process that begins: who serves then, and how often the kernels were called to find that out."""
        for name in [name for name in sys.modules if name.startswith("edited_kernels")]:
            del sys.modules[name]
        for name, text in {"__init__.py": "", **PACKAGE, **files}.items():
            (folder / name).write_text(text)
        importlib.invalidate_caches()
        autotune._source.cache_clear()
        for implementation in importlib.import_module("edited_kernels.offers").OFFERED:
            registry.register(implementation)
        who = tune().who()
        kernel = sys.modules.get("edited_kernels.kernel")
        return who, len(kernel.CALLS) if kernel else 0

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would not see an edit within the same second
    who, calls = start()
    assert who == "two"
    assert calls > 0
    assert start() == ("two", 0)
    who, calls = start(**{"kernel.py": PACKAGE["kernel.py"].replace('"one"', '"two"')})
    assert who == "one"
    assert calls > 0


def test_all_code_beside_a_kernel_of_fastgraph_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They help each other, and the problems and the reference stand there too, for those of others."""
    assert {i.load.__module__.rpartition(".")[0] for i in builtin.BUILTIN} == {"fastgraph.kernels"}
    Fake("one").offer(rank=20)
    Fake("two").offer(rank=30)
    choice = registry.choose(SIGNATURE, {})["prefill_attention"]

    def key() -> str:
        autotune._source.cache_clear()
        return autotune._key(choice, autotune._competitors(choice), SIGNATURE)

    before, read = key(), Path.read_bytes
    assert key() == before
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "launch.py"))
    assert key() != before
    autotune._source.cache_clear()


def test_a_model_of_other_sizes_is_measured_again() -> None:
    Fake("slow", SLOW).offer(rank=30)
    fast = Fake("fast").offer(rank=20)
    tune()
    assert autotune.recall(registry.choose(SIGNATURE, {}), SIGNATURE)["prefill_attention"].who() == fast.name
    for size in ("intermediate", "experts", "top_k"):
        other = replace(SIGNATURE, **{size: 4})
        assert autotune.recall(registry.choose(other, {}), other)["prefill_attention"].who() == "slow"


def test_experts_are_measured_in_the_sizes_of_the_model() -> None:
    x, gate_up, down, weights, ids, *_ = problems.problem(
        "experts", replace(SIGNATURE, intermediate=12, experts=5, top_k=3), 7
    )
    assert (x.shape, gate_up.shape, down.shape) == ((7, 32), (5, 24, 32), (5, 32, 12))
    assert weights.shape == ids.shape == (7, 3)


def test_a_record_that_cannot_be_read_is_measured_again() -> None:
    Fake("fast").offer(rank=20)
    Fake("slow", SLOW).offer(rank=30)
    tune()
    for broken in ("{", "[]"):
        (compile_cache.folder() / autotune.RECORD).write_text(broken)
        assert tune().who() == "fast"


def test_a_forced_kernel_is_not_measured() -> None:
    slow = Fake("slow", SLOW).offer()
    Fake("fast").offer(rank=30)
    assert tune(forced={"prefill_attention": "slow"}).who() == "slow"
    assert not slow.calls


def test_what_a_graph_can_record_is_timed_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts are captured as far as what serves them can be: that must not be judged by the host's time."""
    timed = {}

    def seconds(kernel: Fake, op: str, signature: Signature, rows: int, in_graph: bool) -> float:
        timed[kernel.name] = in_graph
        return 1.0

    monkeypatch.setattr(autotune, "seconds", seconds)
    Fake("recorded").offer(rank=30)
    Fake("planned").offer(rank=20, capturable=False)
    choices = {"prefill_attention": registry.choose(SIGNATURE, {})["prefill_attention"]}
    for graphs in (True, False):
        asked = replace(SIGNATURE, graphs=graphs)
        autotune.tune(choices, asked, 4, 20, lambda *phase: None)
        assert timed == {"recorded": graphs, "planned": False}


def test_one_that_fails_when_it_is_timed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says that a graph can record it, and reads on the host."""
    fast, timed = Fake("fast").offer(rank=30), autotune.seconds
    Fake("slow", SLOW).offer(rank=20)

    def seconds(kernel: Fake, *rest: Any) -> float:
        if kernel is fast:
            raise RuntimeError("operation not permitted when stream is capturing")
        return timed(kernel, *rest)

    monkeypatch.setattr(autotune, "seconds", seconds)
    with pytest.warns(FastgraphWarning, match="fast is left out: fails with RuntimeError: operation not permitted"):
        assert tune().who() == "slow"


def attend_one_by_one(q: Tensor, pages: Pages, scale: float, window: int) -> Tensor:
    """Softmax attention of a token at a time, over pages that hold everything already."""
    out, size = torch.empty_like(q), pages.k_cache.shape[1]
    group = q.shape[1] // pages.k_cache.shape[2]
    for i, (slot, position) in enumerate(zip(pages.token_slots.tolist(), pages.positions.tolist(), strict=True)):
        seen = torch.arange(max(0, position + 1 - window) if window else 0, position + 1)
        page = pages.page_table[slot, seen // size].long()
        k, v = (cache[page, seen % size].repeat_interleave(group, 1) for cache in pages[:2])  # [seen, heads, head_dim]
        share = torch.softmax(torch.einsum("hd,thd->ht", q[i], k) * scale, 1)
        out[i] = torch.einsum("ht,thd->hd", share, v)
    return out


def forget_to_write(q: Tensor, k: Tensor, v: Tensor, turn: Turn, pages: Pages, scale: float, window: int) -> Tensor:
    copies = pages._replace(k_cache=pages.k_cache.clone(), v_cache=pages.v_cache.clone())
    return reference("decode_attention")(q, k, v, turn, copies, scale, window)


def reference(op: str) -> Kernel:
    return next(i for i in registry.implementations(op) if i.name == "reference").load()


@pytest.mark.parametrize("op", ["decode_attention", "prefill_attention"])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_an_attention_that_only_attends_is_made_whole(op: str, rows: int) -> None:
    """And so the reference agrees with what knows nothing of it."""
    assert problems.error(after_writing(attend_one_by_one), op, SIGNATURE, rows) < 1e-5


def test_a_kernel_that_answers_right_but_writes_nothing_is_wrong() -> None:
    assert not problems.error(forget_to_write, "decode_attention", SIGNATURE, 5) <= 1.0


@pytest.mark.parametrize("op", ["rotate_and_write", "sample", "experts", "linear"])
def test_the_reference_is_right_and_a_change_is_seen(op: str) -> None:
    def changed(*args: Any) -> Any:
        returned = reference(op)(*args)
        if op == "sample":
            args[-1].tokens[0] += 1
        return None if returned is None else returned * 1.01

    assert problems.error(reference(op), op, SIGNATURE, 9) < 1e-5
    assert problems.error(changed, op, SIGNATURE, 9) > 5e-3
