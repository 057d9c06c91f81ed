"""What scripts/release builds, installed with pip into an empty environment, as people have it without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from harness import TIME_LIMIT
from pages import ROOT, files

from jaxrun.protocol.names import VERSION

pytestmark = pytest.mark.extended

HELLO = files((ROOT / "README.md").read_text())["hello.py"]
TEST = """
import jax, pytest

@pytest.mark.processes(2)
def test_a_sum():
    assert jax.process_count() == 2
"""
# What a notebook does, in the shell that a notebook has.
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell

if __name__ == "__main__":
    shell = InteractiveShell.instance()
    cell = "%%gang\\nimport jax; print(jax.process_count(), 'ranks')"
    for cell in ("%load_ext jaxrun", "%gang -n 2", cell, "%gang stop"):
        shell.run_cell(cell).raise_error()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution."""
    into = tmp_path_factory.mktemp("dist")
    command = [ROOT / "scripts/release", "--into", into, "--tag", f"v{VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done
    return into


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment that has the wheel, what it depends on, pytest and IPython."""
    venv = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=TIME_LIMIT)
    (wheel,) = built.glob("*.whl")
    # With the versions of this environment, which are tested elsewhere, and most of which pip has kept.
    freeze = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"], capture_output=True, text=True
    )
    (venv / "constraints.txt").write_text(freeze.stdout)
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--constraint", venv / "constraints.txt"]
    done = subprocess.run([*pip, wheel, "pytest", "ipython"], capture_output=True, text=True, timeout=4 * TIME_LIMIT)
    assert done.returncode == 0, done.stderr
    return venv / "bin"


def run(bin_directory: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment, with no other one on PATH."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL"))
    }
    environ["PATH"] = f"{bin_directory}:/usr/bin:/bin"
    command = [bin_directory / words[0], *words[1:]]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT, env=environ)


def test_both_hold_both_packages_and_the_sources_also_the_scripts(built: Path) -> None:
    (wheel,), (sources,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"jaxrun/py.typed", "jaxrun_runtime/py.typed", "jaxrun_runtime/worker.py"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {"jaxrun", "jaxrun_runtime", f"jaxrun-{VERSION}.dist-info"}
    with tarfile.open(sources) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"scripts/jaxrun", "scripts/test", "tests/process/test_release.py", "docs/tutorial.md"} <= held
    assert not [name for name in held if name.startswith((".venv", ".engines", ".python314", "jaxrun-runs"))]


def test_pypi_shows_a_readme_whose_links_lead_somewhere(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    metadata = zipfile.ZipFile(wheel).read(f"jaxrun-{VERSION}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata and "Programming Language :: Python :: 3.14" in metadata
    assert "](docs/" not in metadata and "](CONTRIBUTING.md)" not in metadata


def test_a_tag_of_another_version_is_not_built(tmp_path: Path) -> None:
    command = [ROOT / "scripts/release", "--into", tmp_path, "--tag", "v99"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == 2 and f"which is v{VERSION}" in done.stderr and not list(tmp_path.iterdir())


def test_the_command_and_the_module_know_their_version_and_run_a_job(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    for words in (["jaxrun"], ["python", "-m", "jaxrun"]):
        assert run(installed, tmp_path, *words, "--version").stdout == f"jaxrun {VERSION}\n"
    done = run(installed, tmp_path, "jaxrun", "-n", "2", "hello.py")
    assert done.returncode == 0 and "[1] process 1 of 2, total 3" in done.stdout, done
    assert "environment of its own" not in done.stderr


def test_pytest_and_a_notebook_find_their_plugins(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_sum.py").write_text(TEST)
    tested = run(installed, tmp_path, "pytest", "-q", "test_sum.py")
    assert tested.returncode == 0 and "1 passed" in tested.stdout, tested
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    shown = run(installed, tmp_path, "python", "notebook.py")
    assert shown.returncode == 0 and "2 ranks" in shown.stdout, shown


def test_an_environment_that_holds_jaxrun_alone_is_named_by_the_first_job(installed: Path, tmp_path: Path) -> None:
    """As with `pipx install jaxrun`, whose environment has this file."""
    (tmp_path / "hello.py").write_text(HELLO)
    mark = installed.parent / "pipx_metadata.json"
    mark.touch()
    try:
        done = run(installed, tmp_path, "jaxrun", "-n", "1", "hello.py")
    finally:
        mark.unlink()
    assert done.returncode == 0 and "jaxrun: pipx runs jaxrun in an environment of its own" in done.stderr, done
