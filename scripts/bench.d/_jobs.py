"""Starts one launcher, measures its end to the millisecond, and ends everything that it started.

A job's processes are found by a variable in their environment, even if they have left their session or lost their
parent. Nothing outlives `started`, however its block ends.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = "BENCH_JOB"
START_LIMIT_S = 60.0
_FOREIGN = ("JAX_", "JAXRUN_", "XLA_", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC_")


class Job:
    """A running launcher in `directory`, with the processes that it started."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, mark: str) -> None:
        self.began = time.time()
        self.directory = directory
        self._process = process
        self._mark = mark

    def wait(self, seconds: float) -> float | None:
        """Return when the launcher ended (seconds since the epoch); None if it still runs after `seconds`."""
        # Popen.wait with a limit polls, at intervals of up to 50 ms.
        pidfd = os.pidfd_open(self._process.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            ended = bool(poll.poll(seconds * 1000))
        finally:
            os.close(pidfd)
        return time.time() if ended else None

    def wait_for_all(self, seconds: float) -> float | None:
        """Return when no process of the job was left; None if there still is one after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            if not marked(self._mark):
                return time.time()
            if time.monotonic() > deadline:
                return None
            time.sleep(0.001)

    def status(self) -> int:
        """Return the launcher's exit status as a shell shows it: 128 + n for signal n."""
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def signal(self, signum: signal.Signals) -> float:
        """Signal the launcher, and for Ctrl-C its group, as a terminal does. Returns when that was."""
        now = time.time()
        if signum == signal.SIGINT:
            os.killpg(self._process.pid, signum)
        else:
            os.kill(self._process.pid, signum)
        return now

    def processes(self) -> list[int]:
        return marked(self._mark)

    def last_words(self) -> str:
        return " | ".join(self.output().strip().splitlines()[-3:])


def wait_for_fault(job: Job) -> float | None:
    """Return when the rank failed, from its note; None if the launcher ends, or takes very long, without a note."""
    note = job.directory / "fault"
    for _ in range(int(START_LIMIT_S / 0.01)):
        ended = job.wait(0.01)
        if note.exists():
            return float(note.read_text())
        if ended is not None:
            return None
    return None


@contextmanager
def started(command: Sequence[str], environ: Mapping[str, str], extra: Mapping[str, str]) -> Iterator[Job]:
    """Run `command` in a new directory until the block ends.

    Its environment is `extra` on top of `environ`, without variables of launchers or of a user's flags.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        own = {key: value for key, value in environ.items() if not key.startswith(_FOREIGN)}
        own |= {**extra, "BENCH_DIR": name, "TMPDIR": name, _MARK: mark, "JAX_PLATFORMS": "cpu"}
        process: subprocess.Popen[bytes] | None = None
        try:
            with open(directory / "output", "wb") as output:
                process = subprocess.Popen(
                    command,
                    env=own,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            yield Job(process, directory, mark)
        finally:
            while left := marked(mark):
                for pid in left:
                    _kill(pid, mark)
                time.sleep(0.001)
            if process is not None:
                process.wait()


def marked(mark: str) -> list[int]:
    """Return the living processes with this mark. A zombie has no environment, so it does not count."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(entry))
    return found


def _kill(pid: int, mark: str) -> None:
    """Kill a process, through a pidfd that is opened before the mark is checked: the number may be reused."""
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
