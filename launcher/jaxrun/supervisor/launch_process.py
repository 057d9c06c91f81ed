"""The process that starts the agents, an mpirun or srun: its words, its end, and how it is made to end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrun.text import format_signal

LOG_NAME = "starter.log"
_PIECE = 65536
_TAIL = 4096
_LINES = 12


class LaunchProcess:
    """It runs in a session of its own, with our stdin; what it writes goes to a file, and its last lines are kept."""

    def __init__(self, title: str, argv: Sequence[str], environ: Mapping[str, str], directory: Path | None) -> None:
        """Starts it. OSError."""
        self.title = title
        self.status: int | None = None
        self._tail = b""
        self._log = _open_log(directory)
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        streams = [(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_DUP2, writing, 2)]
        try:
            self.pid = os.posix_spawn(argv[0], list(argv), environ, file_actions=streams, setsid=True)
        finally:
            os.close(writing)

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> bytes | None:
        """What it has written since, which is kept; None once nobody holds the pipe any more."""
        try:
            data = os.read(self._pipe, _PIECE)
        except BlockingIOError:
            return b""
        if not data:
            return None
        self._tail = (self._tail + data)[-_TAIL:]
        if self._log is not None:
            with contextlib.suppress(OSError):
                os.write(self._log, data)
        return data

    def reap(self) -> bool:
        """Whether it has ended, by now."""
        if self.status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.status = os.waitstatus_to_exitcode(status)
                    while self.read():
                        pass
        return self.status is not None

    def stop(self, signum: signal.Signals) -> None:
        """Send the signal to all of its session's group."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)

    @property
    def was_killed(self) -> bool:
        return self.status is not None and self.status < 0

    def describe_end(self) -> str:
        """`srun (Slurm 22.05.8) ended with status 1`."""
        assert self.status is not None
        how = f"was killed by {format_signal(-self.status)}" if self.status < 0 else f"ended with status {self.status}"
        return f"{self.title} {how}"

    def last_lines(self) -> str:
        """The last lines that it wrote, indented; empty if it was silent."""
        lines = [line.rstrip() for line in self._tail.decode(errors="replace").splitlines()]
        return "\n".join(f"  {line}" for line in [line for line in lines if line.strip(" -")][-_LINES:])

    def close(self) -> None:
        os.close(self._pipe)
        if self._log is not None:
            os.close(self._log)


def _open_log(directory: Path | None) -> int | None:
    if directory is None:
        return None
    with contextlib.suppress(OSError):
        return os.open(directory / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    return None
