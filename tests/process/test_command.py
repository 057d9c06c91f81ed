"""The command as a process of its own: what it refuses, and what a shell needs of it."""

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
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "verdict.json").write_text("{}")
    (tmp_path / "good.env").write_text("A=1\n# a remark\nexport B='two words'\n")
    return tmp_path


def run(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxrun", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        timeout=30,
        errors="surrogateescape",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "0", "train.py"), ("-n/--processes", "0")),
        (("--run-dir", "used", "train.py"), ("used", "another job")),
        (("--run-dir", "train.py", "train.py"), ("train.py", "file")),
    ],
)
def test_bad_input_is_one_clear_message_and_nothing_else(
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


def test_names_that_are_no_unicode_pass_through_the_command(folder: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.py")
    (folder / name).write_text("")
    done = run(folder, "--dry-run", name, os.fsdecode(b"\xe4"), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{sys.executable} -m jaxrun_runtime '{name}' '{os.fsdecode(bytes([0xE4]))}'\n")


def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    script = f"{sys.executable} -m jaxrun --help-all | head -n 1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("Usage: jaxrun [OPTIONS] PROGRAM [ARGS]...\n", "")


def test_shells_complete_options_and_programs(folder: Path) -> None:
    assert "_jaxrun_completion" in run(folder, _JAXRUN_COMPLETE="zsh_source").stdout
    ask = {"_JAXRUN_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    assert "plain,--simulate-hosts" in run(folder, **ask, COMP_WORDS="jaxrun --sim").stdout
    assert run(folder, **ask, COMP_WORDS="jaxrun tr").stdout == "file,tr\n"
    assert run(folder, **ask, COMP_WORDS="jaxrun ex").stdout == "plain,explain\nfile,ex\n"
    of_command = {**ask, "COMP_CWORD": "2"}
    assert run(folder, **of_command, COMP_WORDS="jaxrun stacks --f").stdout == "plain,--full\n"
    assert run(folder, **of_command, COMP_WORDS="jaxrun explain r").stdout == "dir,r\n"
    fish = {"_JAXRUN_COMPLETE": "fish_complete", "COMP_CWORD": "--ra"}
    assert "plain,--rank\t" in run(folder, **fish, COMP_WORDS="jaxrun attach --ra").stdout
