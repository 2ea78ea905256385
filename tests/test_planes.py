"""Two planes and one door: what may import what, what the door is called, and what passes through it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import SimulatedDevice, make_request

from fastgraph import control
from fastgraph.control import plan, states
from fastgraph.control.plan import Limits
from fastgraph.control.scheduler import Output, Scheduler

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fastgraph"
CONTROL = sorted((PACKAGE / "control").glob("*.py"))


def imports(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it, `from a import b` as both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", [*CONTROL, PACKAGE / "config.py", PACKAGE / "errors.py"], ids=lambda path: path.name)
def test_the_control_plane_imports_numpy_and_itself_alone(path: Path) -> None:
    allowed = ("fastgraph.control", "fastgraph.config", "fastgraph.errors")
    for name in imports(path):
        root = name.split(".")[0]
        own = root == "fastgraph" and (name == "fastgraph" or name.startswith(allowed))
        assert own or root == "numpy" or root in sys.stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize("name", ["engine.py", "text.py", "llm.py"])
def test_the_front_touches_no_tensor(name: str) -> None:
    assert not {module for module in imports(PACKAGE / name) if module.split(".")[0] == "torch"}


def test_the_control_plane_works_where_there_is_no_torch() -> None:
    names = [f"fastgraph.control.{module.name}" for module in pkgutil.iter_modules(control.__path__)]
    assert "fastgraph.control.scheduler" in names
    code = "import sys, importlib; sys.modules['torch'] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    run = subprocess.run(
        [sys.executable, "-c", code, *names, "fastgraph.config", "fastgraph.errors"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_a_model_file_imports_torch_the_ops_and_the_errors_alone() -> None:
    for path in (ROOT / "models").glob("*.py"):
        if path.name != "__init__.py":
            for name in imports(path):
                root = name.split(".")[0]
                own = name == "fastgraph" or name.startswith(("fastgraph.ops", "fastgraph.errors"))
                assert own or root == "torch" or root in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_the_door_has_these_names_and_no_more() -> None:
    from fastgraph.device.handle import DeviceHandle

    public = {name for name in dir(DeviceHandle) if not name.startswith("_")}
    assert public == {"execute", "limits", "counters", "shutdown"}
    instance = object.__new__(DeviceHandle)
    assert isinstance(inspect.getattr_static(instance, "limits"), property)  # to read, not to set


def control_dataclasses() -> list[type[Any]]:
    found = []
    for module in pkgutil.iter_modules(control.__path__):
        members = vars(importlib.import_module(f"fastgraph.control.{module.name}")).values()
        found += [m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m) and m not in found]
    return found


@pytest.mark.parametrize("kind", control_dataclasses(), ids=lambda kind: kind.__name__)
def test_what_crosses_a_border_is_frozen(kind: type[Any]) -> None:
    parameters: Any = kind.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    if kind is not plan.StepPlan:  # it remembers what it has worked out
        assert "__slots__" in vars(kind)


@pytest.mark.parametrize("kind", [*states.State.__args__, states.Request, states.Resources])
def test_states_are_frozen_and_slotted(kind: type[Any]) -> None:
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    instance = object.__new__(kind)
    assert not hasattr(instance, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(instance, dataclasses.fields(kind)[0].name, None)


def test_what_is_made_anew_for_each_stream_in_each_step_cannot_be_changed_either() -> None:
    past = states.Past(0.0, 0.0, 0.0, 0)
    for instance in (past, Output(1, np.empty(0, np.int32), None, None, past)):
        assert not hasattr(instance, "__dict__")
        for name in instance._fields:
            with pytest.raises(AttributeError):
                setattr(instance, name, None)


def leaves(value: Any) -> Iterator[Any]:
    """All that a plan is made of, down to what has no parts."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from leaves(pair)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def test_what_passes_the_door_is_numpy_and_numbers_and_can_be_sent_to_another_process() -> None:
    limits = Limits(slots=2, pages=8, page_size=4, max_model_len=33, max_step_tokens=8, vocab=24)
    scheduler, device = Scheduler(limits), SimulatedDevice(limits)
    for number in (1, 2):
        request = make_request(number, 10, 4, stop_ids=(30,), logprobs=True, logit_bias={1: 2.0}, stop=("x",))
        scheduler.submit(request)
    while step := scheduler.plan():
        result = device.execute(step).result()
        for leaf in [*leaves(step), *leaves(result)]:
            assert type(leaf) in (int, float, bool, str, type(None), np.ndarray), leaf
            if isinstance(leaf, np.ndarray):
                assert leaf.dtype in (np.int32, np.float32)
        copy = pickle.loads(pickle.dumps(step))
        for there, here in zip(leaves(copy), leaves(step), strict=True):
            assert np.array_equal(there, here)
        assert copy.sampling_slots.tolist() == step.sampling_slots.tolist()
        scheduler.land(step, result)


def test_the_top_of_the_repository_has_these_names_and_no_more() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", ".gitignore"}
    folders = {"fastgraph", "models", "compile_cache", "tests", "docs", "benchmarks", ".ci"}
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} == files | folders | {"cli.py"}


@pytest.mark.parametrize("name", ["models", "compile_cache", "cli.py"])
def test_what_stands_at_the_top_is_part_of_the_package_by_a_relative_link(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.exists()


def test_nothing_but_fastgraph_is_packaged_and_all_of_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["packages"]
    assert {name.split(".")[0] for name in listed} == {"fastgraph"}
    there = {"fastgraph", *(f"fastgraph.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py"))}
    assert set(listed) == there
    assert settings["project"]["scripts"] == {"fastgraph": "fastgraph.cli:main"}
