"""Programs that ranks share, beside processes that end or remove their directory."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until

import jaxrun
from jaxrun.files import shared_memory as directories
from jaxrun_runtime.compile_cache.shared_programs import (
    SharedPrograms,
    seconds_worked,
)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The directory in the place of /dev/shm/jaxrun-UID, below a directory of the test's."""
    monkeypatch.setattr(directories, "_MEMORY", str(tmp_path))
    return tmp_path / f"jaxrun-{os.geteuid()}"


@pytest.fixture
def programs(own):
    return SharedPrograms("shared", 2)


def test_a_rank_that_has_ended_or_can_write_no_more_keeps_nobody_waiting(programs, own, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    programs.claim("first")
    os.symlink(str(ended.pid), own / "shared/k.claim")
    assert programs.claim("k") == ended.pid and programs.wait_for("k", ended.pid) is None
    monkeypatch.setattr(f"{SharedPrograms.__module__}.write_whole_file", lambda *_: (_ for _ in ()).throw(OSError()))
    programs.write("first", b"program")
    assert programs.wait_for("first", os.getpid()) is None  # though its process, this one, works


def test_a_directory_can_be_made_while_another_process_removes_it(own):
    """As at the end of one job and the start of another."""
    remover = subprocess.Popen([sys.executable, "-c", _REMOVER, str(own.parent)], env={"PYTHONPATH": _LAUNCHER})
    try:
        made = 0
        while made < 300 or not (own.parent / "removed").exists():
            assert remover.poll() is None
            with contextlib.suppress(FileNotFoundError):  # it may have been removed five times
                os.close(directories.open_shared_directory("shared"))
                made += 1
    finally:
        remover.kill()
        remover.wait()


_REMOVER = """
import itertools, os, sys
from jaxrun.files import shared_memory
shared_memory._MEMORY = sys.argv[1]
for number in itertools.count():
    shared_memory.remove_shared_directory("shared")
    if number == 1000:
        open(os.path.join(sys.argv[1], "removed"), "w").close()
"""
_LAUNCHER = str(Path(jaxrun.__file__).parents[1])


def test_what_a_process_has_worked_is_seen_until_it_ends():
    before = seconds_worked(os.getpid())
    assert before is not None
    wait_until(lambda: sum(range(10**6)) and seconds_worked(os.getpid()) > before)  # it is counted in ticks
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert seconds_worked(ended.pid) is None
