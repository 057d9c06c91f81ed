"""What outlives a launcher that dies by kill -9: a small process that kills all that carries the job's mark.

Workers end with their agent on their own accord; what they have started does not. The guard waits on a pipe
that only the launcher holds: a byte says that it is not needed any more, the end that the launcher is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import NoReturn

from jaxrun.contract.names import JOB_ID

_SWEEPS_AT_MOST = 50
_PAUSE = 0.02


class Guard:
    """The launcher's handle on its guard."""

    def __init__(self, job_id: str) -> None:
        """Forks: to be called while the launcher has one thread and has started nothing."""
        watched, self._held = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._held)
            _watch(watched, job_id)
        os.close(watched)

    def dismiss(self) -> None:
        """End the guard; it does nothing any more. May be called again."""
        if self._held < 0:
            return
        with contextlib.suppress(OSError):
            os.write(self._held, b".")
        os.close(self._held)
        self._held = -1
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def marked(job_id: str) -> Iterable[int]:
    """The processes of this user that carry the job's mark in the environment they were started with."""
    mark = f"{JOB_ID}={job_id}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    yield int(name)


def _watch(pipe: int, job_id: str) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C is the launcher's business
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Or whoever reads the launcher's output would wait for the guard's copy of it.
        os.dup2(pipe, 0)
        os.closerange(1, 4096)
        if not os.read(0, 1):
            _sweep(job_id)
    finally:
        os._exit(0)


def _sweep(job_id: str) -> None:
    for _ in range(_SWEEPS_AT_MOST):
        found = [pid for pid in marked(job_id) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)
