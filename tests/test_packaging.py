"""What `pip install` puts where: one package, with what the symlinks point to in it, and the console script."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from an sdist, as PyPI's users get it."""
    out = tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    tree = tmp_path_factory.mktemp("tree")
    archive = out / "tree.tar"
    with tarfile.open(archive, "w") as tar:
        for name in tracked.decode().split("\0")[:-1]:
            if (ROOT / name).exists():
                tar.add(ROOT / name, name)
    with tarfile.open(archive) as tar:
        tar.extractall(tree, filter="fully_trusted")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    subprocess.run(build, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


def test_nothing_but_fastgraph_lands_at_the_top_of_site_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fastgraph"}
    for needed in ("models/llama.py", "compile_cache/__init__.py", "cli.py", "py.typed", "control/loop.py"):
        assert f"fastgraph/{needed}" in names


def test_the_installed_package_imports_and_has_its_command(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    code = "import fastgraph.models.llama, fastgraph.cli, fastgraph; print(fastgraph.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith(str(tmp_path))
    entry_points = next(tmp_path.glob("*.dist-info/entry_points.txt")).read_text()
    assert "fastgraph = fastgraph.cli:main" in entry_points
