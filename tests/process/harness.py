"""Runs the `jaxrun` command as a user does, and sees to it that nothing of the job is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jaxrun.node.agent.guard import find_marked, job_marker

HERE = Path(__file__).parent
MISBEHAVE = str(HERE / "misbehave.py")
DAEMONS = str(HERE / "daemons.py")
MADE_NVML = HERE.parent / "nvml"  # for PYTHONPATH: a machine with a GPU
TIME_LIMIT = 240  # seconds until a wait has failed; less than what pytest gives a test
Found = TypeVar("Found")


def extended(*values: object, id: str | None = None) -> object:
    """A parameter set that only scripts/test --all tries."""
    return pytest.param(*values, id=id, marks=pytest.mark.extended)


@dataclass(frozen=True)
class Result:
    """How a job ended; `run_dir` is its run directory."""

    code: int
    out: str
    err: str
    run_dir: Path

    def verdict(self) -> dict[str, object]:
        return json.loads((self.run_dir / "verdict.json").read_text())

    def events(self, name: str) -> list[dict[str, Any]]:
        """The messages of this type in the event log."""
        return read_events(self.run_dir, name)


def read_events(run_dir: Path, name: str = "") -> list[dict[str, Any]]:
    """The messages of this type, or all, in the event log, each with "logged" and "attempt", perhaps "to"."""
    path = run_dir / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()[1:]  # a running job may be in the middle of a line
    events = []
    for content in map(json.loads, lines):
        message = content.pop("event")
        if name in ("", message["type"]):
            events.append({**message, "logged": content.pop("time"), **content})
    return events


class Job:
    """A job that is running."""

    def __init__(self, process: subprocess.Popen[str], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir

    def wait_until(self, condition: Callable[[], Found], what: str) -> Found:
        """Until `condition` holds, and what it returned; an error where the job has ended without that."""

        def has_come() -> Found:
            has_ended = self.process.poll() is not None  # asked first, as what the job did last counts
            found = condition()
            assert found or not has_ended, (what, self.process.communicate())
            return found

        return wait_until(has_come, what)

    def wait_for_output(self, text: str, count: int = 1) -> None:
        """Until `count` ranks have written whole lines with `text` to their stdout; a print may come in pieces."""

        def is_written() -> bool:
            logs = [path.read_text(errors="replace").rpartition("\n")[0] for path in self.run_dir.glob("rank-*.out")]
            return sum(text in log for log in logs) >= count

        self.wait_until(is_written, f"{text!r} from {count} ranks")

    def wait_for_event(self, name: str, count: int = 1) -> None:
        """Until so many events of this name have been noted."""
        self.wait_until(lambda: len(self.events(name)) >= count, f"{count} events {name!r}")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The messages of this type, or all, that have been noted so far."""
        return read_events(self.run_dir, name)

    @property
    def job_id(self) -> str:
        return str(json.loads((self.run_dir / "job.json").read_text())["job_id"])

    def processes(self) -> list[int]:
        """All living processes that carry the job's mark."""
        return list(filter(is_alive, find_marked(job_marker(self.job_id))))

    def result(self, timeout: float = TIME_LIMIT) -> Result:
        out, err = self.process.communicate(timeout=timeout)
        return Result(self.process.returncode, out, err, self.run_dir)

    def end(self) -> Result:
        """The same, and no process of the job is left."""
        result = self.result()
        if (self.run_dir / "job.json").exists():
            assert self.processes() == [], result
        return result


def write_fake_runtime(folder: Path, fork: str | None = None) -> dict[str, str]:
    """A package `jaxrun_runtime` in this folder, without jax, and the variable by which all Pythons find it.

    Its workers are by hand (worker_by_hand.py): of `jaxrun by_hand.py CODE…`, in this folder, each rank runs its CODE.
    They are started in interpreters of their own, or `fork` says what their fork server does.
    """
    (folder / "by_hand.py").write_text("" if fork else "# jaxrun: no-fork\n")
    package = folder / "fake" / "jaxrun_runtime"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(_FAKE_RUNTIME)
    (package / "forkserver").mkdir()
    serve = f"{_FAKE_IMPORTS}import worker_by_hand\nworker_by_hand.serve({fork!r})\n"
    (package / "forkserver" / "__main__.py").write_text(serve)
    return {"PYTHONPATH": str(package.parent)}


def make_environment(folder: Path) -> str:
    """A small virtual environment with what this one has, which stays where it is; returns its Python."""
    venv.EnvBuilder(symlinks=True).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    top = HERE.parents[1]
    lines = (sysconfig.get_path("purelib"), str(top / "launcher"), str(top / "runtime"), "")
    (folder / "lib" / version / "site-packages" / "elsewhere.pth").write_text("\n".join(lines))
    return str(folder / "bin" / "python")


_FAKE_IMPORTS = f"import os, sys\nsys.path.insert(0, {str(HERE)!r})\n"
_FAKE_RUNTIME = f"""{_FAKE_IMPORTS}import worker_by_hand
from jaxrun.protocol.env import WorkerEnv
env = WorkerEnv.from_env(os.environ)
worker_by_hand.live(env, sys.argv[2 + env.rank])
"""


@contextmanager
def seconds_of_daemons() -> Iterator[str]:
    """An argument for daemons.py that is nobody else's; none of its processes is left in the end."""
    seconds = f"600.{os.getpid()}"
    try:
        yield seconds
    finally:
        kill(daemons(seconds))


def daemons(seconds: str) -> list[int]:
    """What daemons.py has started with this argument, and still lives."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path(f"/proc/{name}/cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(name))
    return found


@contextmanager
def started(
    tmp_path: Path, *arguments: str, command: Sequence[str] = (), env: Mapping[str, str] | None = None, **popen: object
) -> Iterator[Job]:
    """`jaxrun ARGUMENTS` in a directory of its own; whatever the test does, nothing survives it.

    command: what to run instead, with the run directory `run`
    """
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [*(command or (sys.executable, "-m", "jaxrun", "--run-dir", str(run_dir))), *arguments],
        cwd=tmp_path,
        env={**os.environ, **(env or {})},
        text=True,
        start_new_session=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},  # type: ignore[call-overload]
    )
    job = Job(process, run_dir)
    try:
        yield job
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


def jaxrun(tmp_path: Path, *arguments: str, env: Mapping[str, str] | None = None, **popen: object) -> Result:
    """Run a job to its end, and check that it has left no process."""
    with started(tmp_path, *arguments, env=env, **popen) as job:
        return job.end()


# ---- processes, and waiting


def wait_until(condition: Callable[[], Found], what: object = "") -> Found:
    """Until it holds; returns what it returned."""
    deadline = time.monotonic() + TIME_LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what or condition} in {TIME_LIMIT} s"
        time.sleep(0.01)
    return found


def process_state(pid: int) -> str:
    """The letter of /proc; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """One that nobody has fetched yet is dead."""
    return process_state(pid) not in ("Z", "X", "")


def wait_until_dead(*pids: int) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}")


def wait_until_gone(job_id: str) -> None:
    """Until no process of the job is left."""
    wait_until(lambda: not list(find_marked(job_marker(job_id))), "end of the job")


def kill(pids: Iterable[int]) -> None:
    """Kill those that have not ended meanwhile."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_dropped(connection: socket.socket) -> bool:
    """Whether the other end has closed it, after what it has sent."""
    connection.setblocking(False)
    with suppress(ConnectionError):
        while True:
            try:
                if not connection.recv(4096):
                    return True
            except BlockingIOError:
                return False
    return True
