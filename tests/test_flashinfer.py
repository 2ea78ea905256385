"""FlashInfer as a second prefill attention, on a stand-in for the package: what is planned, built and said."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgraph.errors import FastgraphWarning
from fastgraph.kernels import flashinfer_prefill, problems, registry, serving
from fastgraph.kernels.registry import Signature

# What of FlashInfer is used, by its own names. The attention is brute force; building a kernel writes its file.
PACKAGE = {
    "__init__.py": """
import torch

plans = []


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace, layout, *, backend):
        assert layout == "NHD"

    def plan(self, starts, page_starts, pages, last, heads, kv_heads, head_dim, page_size, *, causal, **options):
        assert causal and starts.device == page_starts.device == last.device == torch.device("cpu")
        assert {x.dtype for x in (starts, page_starts, pages, last)} == {torch.int32}
        self.starts, self.page_starts, self.pages, self.last = starts, page_starts, pages, last
        self.scale, self.window = options["sm_scale"], options["window_left"]
        plans.append(self)

    def run(self, q, caches, *, enable_pdl):
        out, size = torch.full_like(q, torch.nan), caches[0].shape[1]
        for row, last in enumerate(self.last.tolist()):
            tokens = range(int(self.starts[row]), int(self.starts[row + 1]))
            mine = self.pages[int(self.page_starts[row]) : int(self.page_starts[row + 1])].long()
            total = (len(mine) - 1) * size + last
            for token, position in zip(tokens, range(total - len(tokens), total)):
                first = max(0, position - self.window) if self.window >= 0 else 0
                k, v = (c[mine].flatten(0, 1)[first : position + 1] for c in caches)
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
                share = torch.softmax(torch.einsum("hd,thd->ht", q[token], k) * self.scale, 1)
                out[token] = torch.einsum("ht,thd->hd", share, v)
        return out
""",
    "compilation_context.py": """
class CompilationContext:
    TARGET_CUDA_ARCHS = {(9, "0a")}
""",
    "jit/__init__.py": "",
    "jit/attention.py": """
import os
from pathlib import Path


class Spec:
    is_aot = False

    def __init__(self, name):
        self.build_dir = Path(os.environ["FAKE_CACHE"]) / name

    @property
    def is_compiled(self):
        return (self.build_dir / "kernel.so").exists()

    def build(self, verbose):
        if os.environ.get("FAKE_FAULT"):
            raise RuntimeError("nvcc fatal: too warm")
        self.build_dir.mkdir(parents=True)
        assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
        (self.build_dir / "kernel.so").write_text(os.environ["MAX_JOBS"])


def gen_batch_prefill_module(backend, q, k, out, index, dim, dim_v, positions, window, cap, rounded):
    return Spec(f"{backend}_{q}_{dim}_{window}")
""",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package `flashinfer`, here and for the processes that are started, and the tools that it needs."""
    for name, text in PACKAGE.items():
        file = tmp_path / "site" / "flashinfer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for tool in ("nvcc", "ninja"):
        file = tmp_path / "bin" / tool
        file.parent.mkdir(exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flashinfer"}
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), root]))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CACHE", str(tmp_path / "cache"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield importlib.import_module("flashinfer")
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]
    sys.modules.update(known)


def signature(device: str, window: bool = False, **changes: Any) -> Signature:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 8, "hidden": 32, "vocab": 50, "layers": 2}
    features = frozenset({"window"} if window else ())
    dtype = "bfloat16" if device == "cuda" else "float32"
    capability = (9, 0) if device == "cuda" else (0, 0)
    return Signature(**{"device": device, "dtype": dtype, **sizes, **changes}, features=features, capability=capability)


def verdict(asked: Signature, **forced: str) -> str:
    choice = registry.choose(asked, forced)["prefill_attention"]
    return next(reason for implementation, reason in choice.verdicts() if implementation.name == "flashinfer")


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 60])
def test_rows_pages_and_windows_are_laid_out_as_they_are(package: Any, window: bool, rows: int) -> None:
    kernel = flashinfer_prefill.load()
    assert problems.error(kernel, "prefill_attention", signature("cpu", window), rows) < 1e-5
    assert problems.error(kernel, "decode_attention", signature("cpu", window), rows) < 1e-5  # many rows


@torch.inference_mode()
def test_a_step_is_laid_out_once_for_all_layers_that_are_alike(package: Any) -> None:
    kernel, args = flashinfer_prefill.load(), problems.problem("prefill_attention", signature("cpu"), 9)
    for step in (1, 2):
        serving.begin_step()
        for _ in range(4):
            kernel(*args)
        assert len(package.plans) == step
    kernel(*args[:-1], 16)  # layers with a window
    kernel(*args)
    kernel(*args[:-1], 16)
    assert len(package.plans) == 3
    assert package.plans[-1].window == 15


@torch.inference_mode()
def test_two_engines_plan_apart(package: Any) -> None:
    serving.begin_step()
    for rows in (9, 5):
        args = problems.problem("prefill_attention", signature("cpu"), rows)
        assert flashinfer_prefill.load()(*args).isfinite().all()


def test_it_is_left_out_with_a_reason(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(signature("cpu")) == "runs on cuda"
    assert verdict(signature("cuda", head_dim=32)) == "has no kernel for head_dim 32"
    assert verdict(signature("cuda", dtype="float32")) == "takes bfloat16, float16"
    assert verdict(signature("cuda")) == "its kernels are not built yet"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "no nvcc to build them" in verdict(signature("cuda"))
    assert flashinfer_prefill.build(signature("cuda")) == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert "needs ninja" in verdict(signature("cuda"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.attention", None)
    assert "cannot be used: ModuleNotFoundError" in verdict(signature("cuda"))


def wait_for(found: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_is_missing_is_built_in_the_background_for_the_next_start(package: Any) -> None:
    asked = signature("cuda", window=True)
    choices = registry.choose(asked, {})
    assert choices["prefill_attention"].who() == "triton"
    begun = time.monotonic()
    with pytest.warns(FastgraphWarning, match="being built in the background, for the next start; Triton serves now"):
        registry.build_missing(choices, asked)
    assert time.monotonic() - begun < 1
    wait_for(lambda: not flashinfer_prefill.refuses(asked))
    choice = registry.choose(asked, {})["prefill_attention"]
    assert [implementation.name for implementation in choice.candidates] == ["triton", "flashinfer", "reference"]
    registry.build_missing(registry.choose(asked, {}), asked)  # nothing is left to build, and nothing said
    assert registry.choose(asked, {"prefill_attention": "flashinfer"})["prefill_attention"].who() == "flashinfer"


def test_a_build_that_fails_is_said_and_not_tried_again(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "1")
    asked = signature("cuda")
    assert flashinfer_prefill.build(asked)
    wait_for(lambda: flashinfer_prefill.refuses(asked) != "its kernels are not built yet")
    reason = verdict(asked)
    assert "could not be built" in reason
    wait_for(lambda: Path(reason.split(": ")[1].partition(" says why")[0]).read_text() == "nvcc fatal: too warm")
    assert flashinfer_prefill.build(asked) == ""


def test_a_forced_kernel_has_nothing_built(package: Any) -> None:
    asked = signature("cuda")
    registry.build_missing(registry.choose(asked, {"prefill_attention": "triton"}), asked)


def test_where_it_can_never_serve_nothing_is_built(package: Any) -> None:
    """Not on a CPU, where another engine of the same machine may run, and not for a dtype it has no kernels for."""
    for asked in (signature("cpu"), signature("cuda", dtype="float32")):
        registry.build_missing(registry.choose(asked, {}), asked)
