"""Runs the `jaxrun` command as a user does, and sees to it that nothing of the job is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxrun.node.agent.guard import find_marked, job_marker

HERE = Path(__file__).parent
MISBEHAVE = str(HERE / "misbehave.py")
DAEMONS = str(HERE / "daemons.py")
MADE_NVML = HERE.parent / "nvml"  # for PYTHONPATH: a machine with a GPU
TIME_LIMIT = 90


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
    text = (run_dir / "events.jsonl").read_text()
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

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Until `condition` holds; an error where it does not come about, or the job has ended."""
        deadline = time.monotonic() + TIME_LIMIT
        while time.monotonic() < deadline:
            if condition():
                return
            assert self.process.poll() is None, (what, self.process.communicate())
            time.sleep(0.01)
        raise AssertionError(f"no {what} in {TIME_LIMIT} s")

    def wait_for_output(self, text: str, count: int = 1) -> None:
        """Until `count` ranks have written whole lines with `text` to their stdout; a print may come in pieces."""

        def is_written() -> bool:
            logs = [path.read_text(errors="replace").rpartition("\n")[0] for path in self.run_dir.glob("rank-*.out")]
            return sum(text in log for log in logs) >= count

        self.wait_until(is_written, f"{text!r} from {count} ranks")

    def wait_for_event(self, name: str, count: int = 1) -> None:
        """Until so many events of this name have been noted."""

        def is_noted() -> bool:
            return (self.run_dir / "events.jsonl").exists() and len(self.events(name)) >= count

        self.wait_until(is_noted, f"{count} events {name!r}")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The messages of this type, or all, that have been noted so far."""
        return read_events(self.run_dir, name)

    def processes(self) -> list[int]:
        """All living processes that carry the job's mark."""
        job_id = json.loads((self.run_dir / "job.json").read_text())["job_id"]
        return [pid for pid in find_marked(job_marker(job_id)) if _state(pid) not in ("Z", "")]

    def result(self, timeout: float = TIME_LIMIT) -> Result:
        out, err = self.process.communicate(timeout=timeout)
        return Result(self.process.returncode, out, err, self.run_dir)


def write_fake_runtime(folder: Path) -> dict[str, str]:
    """A package `jaxrun_runtime` in this folder, without jax, and the variable by which all Pythons find it.

    Its workers are by hand (worker_by_hand.py): of `jaxrun by_hand.py CODE…`, in this folder, each rank runs its CODE.
    """
    (folder / "by_hand.py").write_text("# jaxrun: no-fork\n")
    package = folder / "fake" / "jaxrun_runtime"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(_FAKE_RUNTIME)
    return {"PYTHONPATH": str(package.parent)}


_FAKE_RUNTIME = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import worker_by_hand
env = worker_by_hand.WorkerEnv.from_env(os.environ)
worker_by_hand.live(env, sys.argv[2 + env.rank])
"""


@contextmanager
def seconds_of_daemons() -> Iterator[str]:
    """An argument for daemons.py that is nobody else's; none of its processes is left in the end."""
    seconds = f"600.{os.getpid()}"
    try:
        yield seconds
    finally:
        for pid in daemons(seconds):
            os.kill(pid, signal.SIGKILL)


def daemons(seconds: str) -> list[int]:
    """What daemons.py has started with this argument, and still lives."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path(f"/proc/{name}/cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(name))
    return found


@contextmanager
def started(tmp_path: Path, *arguments: str, env: Mapping[str, str] | None = None, **popen: object) -> Iterator[Job]:
    """`jaxrun ARGUMENTS` in a directory of its own; whatever the test does, nothing survives it."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "jaxrun", "--run-dir", str(run_dir), *arguments]
    process = subprocess.Popen(
        command,
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
        result = job.result()
        if (job.run_dir / "job.json").exists():
            assert job.processes() == [], result
        return result


def wait_until_dead(*pids: int) -> None:
    """Until none of these processes lives; one that nobody has fetched yet is dead."""
    deadline = time.monotonic() + TIME_LIMIT
    while living := [pid for pid in pids if _state(pid) not in ("Z", "X", "")]:
        assert time.monotonic() < deadline, f"still alive: {living}"
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def start_command(words: Sequence[str], directory: Path, env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    """Start `jaxrun WORDS` in a session of its own, with a pipe for each of its streams."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrun", *words],
        cwd=directory,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each command."""
    outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, outputs, strict=True)]


def end_commands(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kill what is left of them."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
