"""What outlives a launcher or an agent that dies by kill -9: a small process that kills what it has started.

Workers end with their agent on their own accord; what they have started does not, nor does an mpirun or srun. The guard
waits on a pipe that only its master holds: a dot says that it is not needed any more, the end that the master is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from jaxrun.protocol.names import JOB_ID

_SWEEPS_AT_MOST = 50
_PAUSE = 0.02
_DISARM = b"."


class Guard:
    """Its master's handle on it."""

    def __init__(self, *marks: str) -> None:
        """Forks: to be called while the master has one thread and has started nothing.

        `marks` are variables, "NAME=value", that what is to be killed has all been started with; without any, only what
        `add` names is killed.
        """
        watched, self._held = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._held)
            _watch(watched, marks)
        os.close(watched)

    def add(self, group: int) -> None:
        """Kill this process group, too."""
        os.write(self._held, b"%d\n" % group)

    def disarm(self) -> None:
        """End the guard; it does nothing any more. May be called again."""
        if self._held < 0:
            return
        with contextlib.suppress(OSError):
            os.write(self._held, _DISARM)
        os.close(self._held)
        self._held = -1
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def job_marker(job_id: str) -> str:
    """What every process of the job carries in its environment."""
    return f"{JOB_ID}={job_id}"


def find_marked(*marks: str) -> Iterable[int]:
    """The processes of this user that carry all these marks in the environment they were started with."""
    wanted = {mark.encode() for mark in marks}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted <= set(file.read().split(b"\0")):
                    yield int(name)


def _watch(pipe: int, marks: tuple[str, ...]) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C is the master's business
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Or whoever reads the master's output would wait for the guard's copy of it.
        os.dup2(pipe, 0)
        os.closerange(1, 4096)
        told = b""
        while data := os.read(0, 4096):
            told += data
            if data.endswith(_DISARM):
                os._exit(0)
        for group in map(int, told.split()):
            _kill(os.killpg, group)
        if marks:
            _sweep(marks)
    finally:
        os._exit(0)


def _sweep(marks: tuple[str, ...]) -> None:
    for _ in range(_SWEEPS_AT_MOST):
        found = [pid for pid in find_marked(*marks) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            _kill(os.kill, pid)
        time.sleep(_PAUSE)


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(number, signal.SIGKILL)
