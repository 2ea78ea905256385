"""README.md and docs/: every Python block runs, every link leads somewhere, every name and flag is really there."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import typer

import fastgraph
from fastgraph import models
from fastgraph.cli import app
from fastgraph.config import EngineConfig, SamplingParams
from fastgraph.device import builder
from fastgraph.errors import ModelError
from fastgraph.kernels import registry
from fastgraph.llm import Completion
from fastgraph.loading.checkpoint import DEFAULT_COMMAND

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_IN_ORDER = ["README.md", "docs/python-api.md"]  # by one test each, with one engine for all
NEW_MODEL = "docs/add-a-model.md"
NEW_KERNEL = "docs/add-a-kernel.md"
NEW_POLICY = "docs/scheduling-policy.md"
SOURCES = [ROOT / "cli.py", *(p for folder in ("fastgraph", "models", "tests") for p in (ROOT / folder).rglob("*.py"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    heading: str  # the last one of level 2 above it
    language: str
    line: int  # of its first line, from 0
    text: str

    def run(self, names: dict[str, Any]) -> None:
        # The lines in front make a traceback point into the page.
        exec(compile("\n" * self.line + self.text, str(self.page), "exec"), names)


def blocks(page: Path) -> list[Block]:
    found, heading, start, language = [], "", None, ""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if start is None:
                start, language = number + 1, line[3:]
            else:
                text = "\n".join(lines[start:number]) + "\n"
                found.append(Block(page, heading, language, start, text))
                start = None
        elif start is None and line.startswith("## "):
            heading = line[3:]
    assert start is None, f"{page} leaves a block open"
    return found


def python(page: str) -> list[Block]:
    return [block for block in blocks(ROOT / page) if block.language == "python"]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def code(page: Path) -> list[str]:
    """What stands in backticks, and each line of the blocks for a shell."""
    shell = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
    return shell + re.findall(r"`([^`\n]+)`", prose(page))


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading, by the name in the first column."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {row[0].strip("`"): row[1:] for row in rows[1:]}


# --- Python ---


@pytest.fixture(scope="module")
def llm() -> Iterator[fastgraph.LLM]:
    with fastgraph.load_model(device="cpu", compile="off") as llm:
        yield llm


def test_no_python_block_is_left_out() -> None:
    assert {page for page in PAGES if python(str(page.relative_to(ROOT)))} == {
        ROOT / page for page in (*RUN_IN_ORDER, NEW_KERNEL, NEW_MODEL, NEW_POLICY)
    }


@pytest.mark.parametrize("page", RUN_IN_ORDER)
def test_examples_run_with_the_default_model(
    page: str, llm: fastgraph.LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = fastgraph.load_model

    def load_model(name: str | None = None, **options: Any) -> fastgraph.LLM:
        EngineConfig(model=name, **options)
        return llm if name is None else load(name, **options)

    monkeypatch.setattr(fastgraph, "load_model", load_model)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in python(page):
        block.run(names)
    assert "Paris" in capsys.readouterr().out
    stats = llm.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def test_the_new_policies_order_requests_as_the_page_says() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in python(NEW_POLICY):
        block.run(names)


def test_the_new_kernel_agrees_with_the_reference_and_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"__name__": "my_kernels"}
    registry.implementations("decode_attention")
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    calls = []
    *kernel, generate = python(NEW_KERNEL)
    for block in kernel:
        block.run(names)
    attend = names["attend"]
    names["attend"] = lambda q, *rest: calls.append(len(q)) or attend(q, *rest)
    generate.run(names)
    assert "Paris" in capsys.readouterr().out
    assert max(calls) > 1 == min(calls)  # it has prefilled and decoded


def test_the_new_kernel_is_found_where_its_package_is_installed(tmp_path: Path) -> None:
    """As pip leaves it: the module, and beside it what the page's TOML says of its entry points."""
    (block,) = (block for block in blocks(ROOT / NEW_KERNEL) if block.language == "toml")
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    module = [part.text for part in python(NEW_KERNEL) if part.heading in ("The kernel", "What it can do")]
    (tmp_path / "my_kernels.py").write_text("\n".join(module), encoding="utf-8")
    about = tmp_path / "my_kernels-2.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 2.5\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    tells = (
        "from fastgraph import cli\nfrom fastgraph.kernels import registry\n"
        "print([i.version for i in registry.implementations('decode_attention') if i.name == 'by-page'])\ncli.main()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", tells, "kernels", "--explain", "--device", "cpu"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    version, *listed = done.stdout.splitlines()
    assert version == "['my-kernels 2.5']"
    assert [" ".join(line.split()) for line in listed].count("by-page fits, but has rank 0") == 2


def test_the_fields_of_an_implementation_are_listed() -> None:
    told = {name.strip("` ") for row in table(NEW_KERNEL, "What it can do") for name in row.split(",")}
    assert told == {field.name for field in fields(registry.Implementation)} - {"op", "name", "build", "version"}


def test_the_ops_are_listed() -> None:
    assert list(table(NEW_KERNEL, "The ops")) == list(registry.OPS)


@pytest.fixture
def new_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The model file of the page, as if it stood in models/."""
    source = "\n\n".join(block.text for block in python(NEW_MODEL) if block.heading == "The file")
    file = tmp_path / "models" / "phi.py"
    file.parent.mkdir()
    file.write_text(source, encoding="utf-8")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(file.parent)])
    module = importlib.import_module("fastgraph.models.phi")
    assert module.__file__ == str(file)
    yield module
    del sys.modules["fastgraph.models.phi"], models.phi


def test_the_new_model_passes_its_own_tests(new_model: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "test_phi"}
    (block,) = (block for block in python(NEW_MODEL) if block.heading == "Compare it with transformers")
    block.run(names)
    assert models.supported()["PhiForCausalLM"] == new_model.__name__
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    names["test_phi_equals_transformers"](checkpoint)
    refuses = names["test_phi_refuses_what_it_would_compute_wrongly"]
    for mark in refuses.pytestmark:
        for option in mark.args[1]:
            refuses(option)


def test_the_new_model_is_gone_afterwards() -> None:
    with pytest.raises(ModelError, match=r"PhiForCausalLM.*add-a-model"):
        models.find({"architectures": ["PhiForCausalLM"]})


def test_the_new_model_imports_no_more_than_a_model_may(new_model: Any) -> None:
    imported = set()
    for node in ast.walk(ast.parse(Path(new_model.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = node.module == "fastgraph"
            imported |= {f"fastgraph.{name.name}" for name in node.names} if inside else {node.module}
    foreign = {name for name in imported if name.split(".")[0] not in {*sys.stdlib_module_names, "torch"}}
    assert foreign == {"fastgraph.ops"}  # and `fastgraph.errors`, if it had more to refuse


def test_the_names_that_the_page_asks_for_are_in_every_model_file(new_model: Any) -> None:
    asked = [name.split("(")[0] for name in table(NEW_MODEL, "What a model file is")]
    modules = [new_model, *(importlib.import_module(name) for name in set(models.supported().values()))]
    for module in modules:
        for name in asked:
            if name != "Model.layers":  # which an instance has
                assert attrgetter(name)(module)


# --- tables ---


def default(field: Any) -> str:
    value = field.default_factory() if field.default is MISSING else field.default
    return f"`{value!r}`"


@pytest.mark.parametrize(("heading", "kind"), [("Loading", EngineConfig), ("Sampling parameters", SamplingParams)])
def test_options_are_listed_with_their_defaults(heading: str, kind: Any) -> None:
    listed = {name: cells[0] for name, cells in table("docs/python-api.md", heading).items()}
    assert listed == {field.name: default(field) for field in fields(kind)}


def test_what_a_machine_is_given_is_what_the_page_says() -> None:
    options = {name: cells[1] for name, cells in table("docs/python-api.md", "Loading").items()}
    for name, values in (
        ("max_decode_bs", builder.DEFAULT_DECODE_BS),
        ("max_step_tokens", builder.DEFAULT_STEP_TOKENS),
    ):
        assert "{cpu} on a CPU and {cuda} on a GPU".format(**values) in options[name]


def test_the_options_of_a_fast_start_are_options_and_leave_out_what_takes_long() -> None:
    options = set()
    for cells in table("docs/python-api.md", "A fast start").values():
        options |= {ast.unparse(ast.parse(text).body[0]) for text in re.findall(r"`(\w+=[^`]+)`", cells[1])}
    assert options == {"compile = 'off'", "autotune = False", "max_capture_bs = 0", "max_capture_tokens = 0"}
    EngineConfig(compile="off", autotune=False, max_capture_bs=0, max_capture_tokens=0)


def test_completion_fields_are_listed() -> None:
    assert list(table("docs/python-api.md", "Completion")) == [field.name for field in fields(Completion)]


def test_stats_are_listed(llm: fastgraph.LLM) -> None:
    assert set(table("docs/python-api.md", "Statistics")) == set(llm.stats())


# --- links, flags, names ---


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def flags(command: Any = None, name: str = "") -> dict[str, set[str]]:
    """The flags of each command, of `bench latency` as of `bench`."""
    command = command or typer.main.get_command(app)
    parameters = command.params
    found = {name: {"--help", "-h"}.union(*((*p.opts, *p.secondary_opts) for p in parameters if p.opts[0][0] == "-"))}
    for part, inner in getattr(command, "commands", {}).items():
        found |= flags(inner, f"{name} {part}".strip())
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    known = flags()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))
    for text in code(page):
        words = re.sub(r"\"[^\"]*\"|'[^']*'", "TEXT", text.partition("#")[0]).split()
        if words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= targets, text
        elif words[:1] == ["fastgraph"] and len(words) > 1:
            command = next(name for name in (" ".join(words[1:3]), words[1], "") if name in known)
            assert command or words[1].startswith("-"), text
            assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known[command], text
        elif words[:2] == ["pip", "install"]:
            assert set(re.findall(r"\[(\w+)\]", text)) <= extras, text
        elif words and words[0].startswith("-"):
            assert any(words[0].partition("=")[0] in options for options in known.values()), text


def test_files_and_functions_of_the_architecture_exist() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    for text in code(ROOT / "docs/architecture.md"):
        if re.fullmatch(r"[\w./]+(\.py|/)", text):
            assert (ROOT / text).exists(), text
        elif call := re.fullmatch(r"(?:(\w+)\.)?(\w+)\([^()]*\)", text):
            assert re.search(rf"\bdef {call[2]}\b", source), text
            assert not call[1] or re.search(rf"\bclass {call[1]}\b", source) or call[1] in ("step", "ops"), text
        elif re.fullmatch(r"[A-Z]\w+", text):
            assert re.search(rf"\b{text}\b", source), text


def test_every_module_has_its_place_in_the_architecture() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = [ROOT / "fastgraph", *(ROOT / "fastgraph" / name for name in ("chat", "control", "device", "loading"))]
    modules = [path for folder in folders for path in folder.glob("*.py") if path.stem != "__init__"]
    lacking = [str(path.relative_to(ROOT)) for path in modules if not path.is_symlink()]
    assert [name for name in lacking if f"`{name}`" not in page] == []


def test_what_brings_the_default_model_is_what_the_code_says() -> None:
    assert DEFAULT_COMMAND in (ROOT / "README.md").read_text(encoding="utf-8")
