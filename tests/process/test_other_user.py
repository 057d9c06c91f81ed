"""What another user of the same machine finds of a job and of a gang: names and arguments, and no way in."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from harness import MISBEHAVE, TIME_LIMIT, Job, start_command

import jaxrun
from jaxrun.protocol.names import GANG_TOKEN, TOKEN

STRANGER = 65534
PRIVATE = ("environ", "mem", "fd", "map_files", "maps")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_stranger(act: Callable[[], object]) -> object:
    """What `act` returns, which must be JSON, in a process of another user."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside other threads: the child runs no code of theirs
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return json.loads(found)


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


def unix_sockets(pids: list[int]) -> list[str]:
    """The names at which these processes listen, or could be reached, by Unix sockets."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in inodes})


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


def test_another_user_cannot_enter_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its sockets and directory, nor its fork server and launchers, nor the memory that it shares."""
    before = set(os.listdir("/dev/shm"))
    own = psutil.Process()
    others = {process.pid for process in own.children(recursive=True)}  # of other tests, maybe as another user
    with jaxrun.Gang(2, platform="cpu") as gang:
        instance = gang._lifecycle.instance
        token = instance._listener.environ[GANG_TOKEN]
        directory = instance._listener.directory
        call = gang.start_call(np.sum, np.ones(2**20))  # whose array is in a memory file
        assert call.running == (0, 1)
        pids = [process.pid for process in own.children(recursive=True) if process.pid not in others]
        sockets = unix_sockets([own.pid, *pids])
        assert {worker.pid for worker in gang.workers} | {instance.launcher.pid} <= set(pids)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert as_stranger(lambda: os.access(directory, os.R_OK) or os.access(directory, os.X_OK)) is False
        assert as_stranger(lambda: entered([own.pid, *pids])) == []
        assert as_stranger(lambda: connected(sockets)) == []
        assert not any(token.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        new = [Path("/dev/shm") / name for name in set(os.listdir("/dev/shm")) - before]
        assert not [path for path in new if path.stat().st_uid == 0 and path.stat().st_mode & 0o077]
        assert [float(total) for total in call.results()] == [2.0**20] * 2


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One into which others can look, as into a shared one; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_another_user_cannot_enter_a_job_or_learn_its_token(open_directory: Path) -> None:
    """Of `jaxrun attach`, whose token is in the environment of its processes and in the rendezvous file."""
    token, run_dir = "5" * 64, open_directory / "run"
    words = ["attach", "--rank", "0", "--size", "1", "--rendezvous", str(open_directory), "--run-dir", str(run_dir)]
    process = start_command([*words, MISBEHAVE, "--steps", "100000"], open_directory, {TOKEN: token})
    try:
        Job(process, run_dir).wait_for_output("ready")
        pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        (rendezvous,) = open_directory.glob(".jaxrun-attach-*")
        assert token in rendezvous.read_text()
        assert as_stranger(lambda: [os.access(path, os.R_OK) for path in (open_directory, rendezvous)]) == [True, False]
        assert len(pids) > 2 and as_stranger(lambda: entered(pids)) == []
        assert not any(token.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        assert unix_sockets(pids) == []
        shown = [path for path in run_dir.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
        assert shown == []
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIME_LIMIT)
