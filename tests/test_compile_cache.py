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

from fastgraph import compile_cache

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
