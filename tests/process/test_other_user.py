"""What another user of the same machine finds of a job and of a gang: names and arguments, and no way in."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import datetime
from itertools import takewhile
from pathlib import Path

import numpy as np
import psutil
import pytest
from harness import MISBEHAVE, started
from other_user import as_stranger

import jaxrun
from jaxrun.frontends.gang import rank_connections
from jaxrun.protocol.names import TOKEN
from jaxrun.records.rundir.rundir import create

PRIVATE = ("environ", "mem", "fd", "map_files", "maps")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def entered(pids: list[int]) -> list[str]:
    """What of these processes' private files can be opened."""
    found = []
    for pid in pids:
        for name in PRIVATE:
            path = f"/proc/{pid}/{name}"
            try:
                os.listdir(path) if os.path.isdir(path) else open(path, "rb").close()
            except OSError:
                continue
            found.append(path)
    return found


def gang_processes(gang: jaxrun.Gang) -> list[int]:
    """Those between this process and the gang's ranks, of which the second is its launcher, and all below that."""
    above = list(takewhile(lambda process: process.pid != os.getpid(), psutil.Process(gang.workers[0].pid).parents()))
    launcher = above[-2]
    return [process.pid for process in (above[-1], launcher, *launcher.children(recursive=True))]


def links(pids: list[int]) -> set[str]:
    """What the descriptors of these processes lead to."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(fd))
    return found


def unix_sockets(pids: list[int]) -> list[str]:
    """The names at which these processes listen, or could be reached, by Unix sockets."""
    inodes = links(pids)
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in inodes})


def shared_files(pids: list[int]) -> list[Path]:
    """The files of shared memory that these processes have open or mapped."""
    words = links(pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            words.update(Path(f"/proc/{pid}/maps").read_text().split())
    return [Path(word) for word in words if word.startswith("/dev/shm/") and Path(word).exists()]


def shows(pids: list[int], token: str) -> bool:
    """Whether a command line has the token."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if token.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
    return False


def connected(paths: list[str]) -> list[str]:
    found = []
    for path in paths:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
            except OSError:
                continue
            found.append(path)
    return found


@pytest.mark.extended
def test_another_user_cannot_enter_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its sockets and directory, nor its fork server and launcher, nor the memory that it shares."""
    token = "ab" * 32
    monkeypatch.setattr(rank_connections, "new_token", lambda: token)
    with jaxrun.Gang(2, platform="cpu") as gang:
        directory = gang.run_dir.parent
        call = gang.start_call(np.sum, np.ones(2**20))  # whose array is in a memory file
        assert call.running == (0, 1)
        pids = [os.getpid(), *gang_processes(gang)]
        sockets = [str(directory / "ranks"), *unix_sockets(pids)]
        assert {worker.pid for worker in gang.workers} <= set(pids)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert as_stranger(lambda: os.access(directory, os.R_OK) or os.access(directory, os.X_OK)) is False
        assert as_stranger(lambda: entered(pids)) == []
        assert as_stranger(lambda: connected(sockets)) == []
        assert not shows(pids[1:], token)
        assert not [path for path in shared_files(pids) if path.stat().st_mode & 0o077]
        assert [float(total) for total in call.results()] == [2.0**20] * 2


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One into which others can look, as into a shared one; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.extended
def test_another_user_cannot_enter_a_job_or_learn_its_token(open_directory: Path) -> None:
    """Of `jaxrun attach`, whose token is in the environment of its processes and in the rendezvous file."""
    token, run_dir = "5" * 64, open_directory / "run"
    words = ("attach", "--rank", "0", "--size", "1", "--rendezvous", str(open_directory), "--run-dir", str(run_dir))
    command = (sys.executable, "-m", "jaxrun", *words, MISBEHAVE, "--steps", "100000")
    with started(open_directory, command=command, env={TOKEN: token}) as job:
        job.wait_for_output("ready")
        pids = [job.process.pid, *(child.pid for child in psutil.Process(job.process.pid).children(recursive=True))]
        (rendezvous,) = open_directory.glob(".jaxrun-attach-*")
        assert token in rendezvous.read_text()
        assert as_stranger(lambda: [os.access(path, os.R_OK) for path in (open_directory, rendezvous)]) == [True, False]
        assert len(pids) > 2 and as_stranger(lambda: entered(pids)) == []
        assert not shows(pids, token)
        assert as_stranger(lambda: connected(unix_sockets(pids))) == []
        shown = [path for path in run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
        assert shown == []
        job.process.send_signal(signal.SIGINT)
        job.result()


STRANGER = 65534


def test_in_a_shared_directory_each_user_learns_of_the_others():
    """In /tmp: who comes first has jaxrun-runs there; root's serves all, as root could do anything anyway."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o1777)
        assert _create_as(STRANGER, base) == ""
        assert "it belongs to" in _create_as(STRANGER - 1, base)
        assert "it belongs to" in _create_as(0, base)
        shutil.rmtree(base / "jaxrun-runs")
        assert _create_as(0, base) == ""
        assert "Permission denied" in _create_as(STRANGER, base)
        (base / "jaxrun-runs").chmod(0o1777)
        assert _create_as(STRANGER, base) == ""


def _create_as(uid, base):
    """What a process of this user is told that makes a run directory; empty where it gets one."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside the test runner's threads: the child runs no code of theirs
        pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            create(None, base=base, name="train", now=datetime(2026, 11, 20, 21, 42))
        except BaseException as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as file:
        return file.read()
