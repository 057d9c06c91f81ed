"""The socket of a running job: who finds it, who is let in, and what is left of it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import MISBEHAVE, Job, jaxrun, started, wait_until
from other_user import as_stranger

from jaxrun.controller.supervisor.job_server import JobServer, JobSockets, open_sockets
from jaxrun.job_client.job_requests import request_overview
from jaxrun.job_client.running_job import find_running_job
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.codec import Form, MessageDecoder, encode_json_frame, message_types
from jaxrun.protocol.job_messages import SOCKET_VERSION, EndOrder, Follow, Greeting, ToClient
from jaxrun.records.rundir import job_sockets

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def socket_of(job: Job) -> Path:
    return Path(json.loads((job.run_dir / "job.json").read_text())["launcher"]["socket"])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that makes steps until it is ended."""
    directory = tmp_path_factory.mktemp("running")
    with started(directory, "-n", "2", MISBEHAVE, "--steps", "1000000") as job:
        job.wait_for_output("ready", 2)
        yield job


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The directories in which a socket may be: two, of which the first is the wanted one, where others may look."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        found = [f"{name}/a", f"{name}/b"]
        monkeypatch.setattr(job_sockets, "_candidates", lambda environ: found)
        yield found


@pytest.mark.extended
def test_only_the_launcher_holds_the_listening_socket(running: Job) -> None:
    path = socket_of(running)
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    (inode,) = {row[6] for row in rows if row[-1] == str(path) and row[3] == "00010000"}  # __SO_ACCEPTCON
    launcher = psutil.Process(running.process.pid)
    holders = []
    for process in (launcher, *launcher.children(recursive=True)):
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(fd) == f"socket:[{inode}]":
                    holders.append(process.pid)
    assert holders == [launcher.pid] and len(launcher.children(recursive=True)) > 2
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.extended
def test_many_threads_ask_at_once_by_one_connection_and_by_their_own(running: Job) -> None:
    shared = find_running_job(running.run_dir, "jaxrun top")
    seen: list[tuple[int, ...]] = []

    def ask(number: int) -> None:
        job = shared if number % 2 else find_running_job(running.run_dir, "jaxrun top")
        for _ in range(3):
            seen.append(request_overview(job).live)
        if job is not shared:
            job.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared.close()
    assert seen == [(0, 1)] * 24


@only_root
def test_another_user_is_refused_even_where_the_directory_lets_him_in(candidates: list[str]) -> None:
    listener, path = job_sockets.listen("ab" * 16, {})
    loop, is_over = EventLoop(), threading.Event()
    server = JobServer("ab" * 16, JobSockets(listener, path), loop, 0, lambda event: None, lambda text: None)

    def serve() -> None:
        while not is_over.is_set():
            loop.run_once(0.1)

    def connect() -> list[object]:
        with socket.socket(socket.AF_UNIX) as link:
            try:
                link.connect(path)
            except OSError as error:
                return [error.errno]
            link.settimeout(20)
            data = b""
            while piece := link.recv(65536):
                data += piece
            return [type(one).__name__ for one in MessageDecoder(message_types(ToClient), form=Form.JSON).feed(data)]

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        assert as_stranger(connect) == [errno.EACCES]
        os.chmod(candidates[0], 0o755)
        os.chmod(path, 0o777)
        assert as_stranger(connect) == ["Dropped"]
    finally:
        os.chmod(candidates[0], 0o700)
        is_over.set()
        serving.join()
        server.close()
        loop.close()


def test_an_order_of_another_process_ends_the_job_which_says_so_and_followers_hear_it(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "1", MISBEHAVE, "--steps", "1000000") as job:
        job.wait_for_output("ready")
        path = socket_of(job)
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            link.sendall(b"".join(map(encode_json_frame, (Greeting(SOCKET_VERSION), Follow(), EndOrder()))))
            received = b""
            while data := link.recv(65536):
                received += data
        result = job.end()
    types = [type(one).__name__ for one in MessageDecoder(message_types(ToClient), form=Form.JSON).feed(received)]
    assert types[0] == "Greeting" and "JobEvent" in types and types[-1] == "JobEnded"
    assert result.code == 129 and "an order at its socket" in result.err
    assert not path.exists()


@pytest.mark.extended
def test_what_a_killed_launcher_leaves_is_removed_by_its_guard_or_by_the_next_launcher(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    with started(tmp_path / "killed", "-n", "1", MISBEHAVE, "--steps", "1000000") as job:
        job.wait_for_output("ready")
        path = socket_of(job)
        link = find_running_job(job.run_dir, "jaxrun top")
        assert link.is_running
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not link.is_running)
        link.close()
        wait_until(lambda: not path.exists())
    left, name = job_sockets.listen(path.stem, os.environ)
    left.close()  # as if guard and launcher had been killed
    assert name == str(path)
    job_sockets.remove_stale(os.environ)
    assert path.exists()  # it could be of a launcher that does not listen yet
    os.utime(path, (time.time() - 60,) * 2)
    (tmp_path / "next").mkdir()
    assert jaxrun(tmp_path / "next", "-n", "1", MISBEHAVE).code == 0
    assert not path.exists()


# ---- where sockets are


def place() -> str:
    """The directory that is chosen."""
    listener, path = job_sockets.listen("ab" * 16, {})
    listener.close()
    job_sockets.remove(path)
    return os.path.dirname(path)


def test_a_directory_that_is_not_this_users_alone_is_not_used(candidates: list[str]) -> None:
    assert place() == candidates[0] and not os.path.exists(candidates[0])
    os.mkdir(candidates[0])
    os.chmod(candidates[0], 0o755)
    assert place() == candidates[1]
    os.rmdir(candidates[0])
    os.symlink("/tmp", candidates[0])
    assert place() == candidates[1]


@only_root
def test_a_directory_of_another_user_is_not_used(candidates: list[str]) -> None:
    os.mkdir(candidates[0], 0o700)
    os.chown(candidates[0], 1234, 1234)
    assert place() == candidates[1]


def test_a_path_that_is_too_long_for_a_socket_is_not_used(candidates: list[str]) -> None:
    candidates[0] += "x" * 80
    assert place() == candidates[1]


def test_a_job_that_can_have_no_socket_says_so_and_runs(candidates: list[str]) -> None:
    candidates[:] = ["/nowhere/jaxrun-0"]
    sockets = open_sockets("ab" * 16, {}, is_named=True)
    assert sockets.listener is None and sockets.path == ""
    assert sockets.trouble == (
        f"jaxrun top, stacks and profile cannot reach this job: {candidates[0]}: No such file or directory"
    )


def test_only_sockets_that_nobody_listens_at_are_removed(candidates: list[str]) -> None:
    listener, path = job_sockets.listen("ab" * 16, {})
    dead, left = job_sockets.listen("cd" * 16, {})
    dead.close()
    for one in (path, left):
        os.utime(one, (0, 0))
    job_sockets.remove_stale({})
    assert os.path.exists(path) and not os.path.exists(left)
    listener.close()
    job_sockets.remove(path)


def test_the_usual_place_is_short_and_others_follow() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/scratch"}
    own = f"jaxrun-{os.geteuid()}"
    assert job_sockets._candidates(environ) == [f"/tmp/{own}", f"/run/user/7/{own}", f"/scratch/{own}"]
    assert job_sockets._candidates({"TMPDIR": "/tmp"}) == [f"/tmp/{own}"]
