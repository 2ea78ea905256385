"""Compiled code is found again by the next process, and never by one that it does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fastgraph import compile_cache


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
