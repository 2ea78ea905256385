"""Compiled code is found again by the next process, and never by one that it does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from fastgraph import compile_cache
from fastgraph.env import _compiler

ROOT = Path(__file__).resolve().parent.parent

# A process that adds a hundred entries one by one, once it is told to.
ADDS = """
import sys
from fastgraph import compile_cache
print("ready", flush=True)
sys.stdin.readline()
for i in range(100):
    compile_cache.add("record.json", {f"{sys.argv[1]} {i}": "x" * 200})
"""

# A process that compiles a model and runs it; it says what it has compiled, what it has found, and what it answers.
COMPILES = """
import json, sys
import fastgraph
options = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "max_decode_bs": 2}
with fastgraph.load_model(sys.argv[1], compile="regional", **options) as llm:
    answer = llm.generate([1, 2, 3], max_tokens=4).token_ids
from torch._dynamo.utils import counters
inductor = counters["inductor"]
print(json.dumps([inductor["fxgraph_cache_miss"], inductor["fxgraph_cache_hit"], answer]))
"""
SHAPE = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTGRAPH_CACHE", str(tmp_path))
    for variable in compile_cache.VARIABLES:
        monkeypatch.setenv(variable, "")  # so that what a test sets is undone
        monkeypatch.delenv(variable)


def test_the_compilers_caches_move_into_the_users_folder(tmp_path: Path) -> None:
    folder = compile_cache.activate()
    assert folder.is_relative_to(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")


def test_a_folder_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    compile_cache.activate()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_what_torch_has_set_itself_is_not_the_users_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so when something imports its compiler, as making a model does."""
    cache_dir_utils.cache_dir()
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    folder = compile_cache.activate()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")


@pytest.mark.skipif(_compiler() is None, reason="needs a C++ compiler")
def test_the_next_process_compiles_nothing_anew(tmp_path: Path) -> None:
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(SHAPE))

    def start() -> tuple[int, int, list[int], dict[Path, int]]:
        run = subprocess.run(
            [sys.executable, "-c", COMPILES, str(shape)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert run.returncode == 0, run.stderr
        kernels = {path: path.stat().st_mtime_ns for path in compile_cache.folder().rglob("*.so")}
        missed, found, answer = json.loads(run.stdout)
        return missed, found, answer, kernels

    missed, found, answer, kernels = start()
    assert (missed, found) == (3, 0)  # the three regions
    assert kernels
    assert start() == (0, 3, answer, kernels)


def test_another_torch_or_machine_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_cache.key()
    assert here == compile_cache.key()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    other_torch = compile_cache.key()
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    assert len({here, other_torch, compile_cache.key()}) == 3


def test_processes_that_add_to_a_record_at_once_lose_nothing_and_no_reader_sees_half_of_it() -> None:
    command, env = [sys.executable, "-c", ADDS], {**os.environ, "PYTHONPATH": str(ROOT)}
    options: Any = {"env": env, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, name], **options) for name in "ab"]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    file, seen = compile_cache.folder() / "record.json", set()
    while any(writer.poll() is None for writer in writers):
        if file.exists():
            seen.add(len(json.loads(file.read_text(encoding="utf-8"))))
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.communicate()
    assert len(seen) > 1  # it was read while it grew
    assert set(compile_cache.read("record.json")) == {f"{name} {i}" for name in "ab" for i in range(100)}
    assert {path.name for path in file.parent.iterdir()} == {"record.json", "record.json.lock"}


def test_a_record_grows_where_the_system_has_no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "fcntl", None)
    compile_cache.add("record.json", {"a": 1, "b": 1})
    compile_cache.add("record.json", {"b": 2})
    assert compile_cache.read("record.json") == {"a": 1, "b": 2}
