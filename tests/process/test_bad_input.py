"""Commands that cannot be executed as typed: exit 2, one clear message, nothing started and nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    (tmp_path / "unreadable.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "verdict.json").write_text("{}")
    (tmp_path / "good.env").write_text("A=1\n# a remark\nexport B='two words'\n")
    (tmp_path / "bad.env").write_text("A=1\nno equals sign\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxrun", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "0", "train.py"), ("-n/--processes", "0")),
        (("-n", "-3", "train.py"), ("-n/--processes", "-3")),
        (("-n", "x", "train.py"), ("--processes", "'x'")),
        (("-d", "0", "train.py"), ("--devices-per-process", "0")),
        (("--proceses", "2", "train.py"), ("--proceses", "--processes")),
        (("trian.py",), ("trian.py", "train.py")),
        (("folder",), ("folder", "directory")),
        ((), ("program",)),
        (("-m",), ("-m",)),
        (("-m", "no_such_module_here"), ("no_such_module_here",)),
        (("-m", "train.py"), ("train.py", "-m")),
        (("--env", "1A=x", "train.py"), ("1A",)),
        (("--env", "NOT_SET_ANYWHERE", "train.py"), ("NOT_SET_ANYWHERE",)),
        (("--env", "JAXRUN_RANK=3", "train.py"), ("JAXRUN_RANK",)),
        (("--env-file", "bad.env", "train.py"), ("bad.env:2", "no equals sign")),
        (("--env-file", "missing.env", "train.py"), ("missing.env",)),
        (("--run-dir", "used", "train.py"), ("used", "another job")),
        (("--run-dir", "train.py", "train.py"), ("train.py", "file")),
        (("--run-dir", "x", "--no-run-dir", "train.py"), ("--run-dir", "--no-run-dir")),
        (("--only-rank", "0", "--quiet-ranks", "1", "-n", "2", "train.py"), ("--only-rank", "--quiet-ranks")),
        (("--only-rank", "2", "-n", "2", "train.py"), ("--only-rank", "2")),
        (("--simulate-hosts", "2", "-n", "3", "train.py"), ("3", "2")),
        (("--timeout", "0", "train.py"), ("--timeout", "0")),
        (("--timeout", "soon", "train.py"), ("--timeout", "soon")),
        (("--platform", "gpu", "train.py"), ("--platform", "gpu")),
        (("--platform", "cuda", "-n", "2", "train.py"), ("cuda",)),
        (("--backend", "smoke", "train.py"), ("--backend", "smoke")),
    ],
)
def test_it_is_one_clear_message_and_nothing_else(
    folder: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    before = sorted(folder.rglob("*"))
    done = run(folder, *arguments)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr and done.stdout == ""
    for word in words:
        assert word in done.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_program_that_may_not_be_read_is_refused(folder: Path) -> None:
    (folder / "unreadable.py").chmod(0)
    command = [sys.executable, "-m", "jaxrun", "-n", "2", "unreadable.py"]
    if os.getuid() == 0:  # whom no mode stops, unless it is without that privilege
        command[:0] = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "unreadable.py" in done.stderr and "Traceback" not in done.stderr


def test_a_program_that_is_no_mpirun_is_recognised(folder: Path) -> None:
    for name, text in (("silent", "exit 3"), ("other", "echo mpiexec of nobody")):
        mpirun = folder / name
        mpirun.write_text(f"#!/bin/sh\n{text}\n")
        mpirun.chmod(0o755)
        done = run(folder, "--backend", "mpirun", "--mpirun", f"./{name}", "-n", "2", "train.py")
        assert done.returncode == 69, done
        assert "neither Open MPI, MPICH nor Intel MPI" in done.stderr and "Traceback" not in done.stderr


def test_a_good_environment_file_is_not_refused(folder: Path) -> None:
    done = run(folder, "--dry-run", "--env-file", "good.env", "train.py")
    assert done.returncode == 0
    assert "B='two words'" in done.stdout
