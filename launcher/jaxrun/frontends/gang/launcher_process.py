"""The launcher of a gang's job, seen from outside: its output, end and verdict, and the connection for requests."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.job_client.running_job import RunningJob
from jaxrun.node.forkserver.launcher_pool import LauncherPool
from jaxrun.protocol.job_messages import EndOrder
from jaxrun.records.rundir.recorded_files import read_verdict

_READ_BYTES = 65536
_MAX_OUTPUT_CHARS = 100_000
_STOP_TIMEOUT_S = 3.0  # for a job to end after it was told to


class LauncherProcess:
    """A launcher that a `pool` starts with `words`; `output_fd` and `pidfd` (readable at its end) can be waited for.

    job:  the connection to its job, over an inherited socket; closing it ends the job
    """

    def __init__(self, pool: LauncherPool, words: Sequence[str], environ: Mapping[str, str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.output_fd, theirs = os.pipe()
        os.set_blocking(self.output_fd, False)
        link, control = socket.socketpair()
        try:
            self.pid, self.pidfd = pool.start(words, environ, theirs, control.fileno())
        except BaseException:
            os.close(self.output_fd)
            link.close()
            raise
        finally:
            os.close(theirs)
            control.close()
        self.job = RunningJob(run_dir, link, self.pid)
        self._output = ""
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        return self._has_ended or self.wait(0)

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for its end; returns whether it has ended."""
        if not self._has_ended:
            # Not select.select, which takes no descriptors above 1023.
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            self._has_ended = bool(poll.poll(max(0.0, timeout) * 1000))
        return self._has_ended

    def read_output(self) -> str:
        """Return its output since the last call."""
        if self.output_fd < 0:
            return ""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.output_fd, _READ_BYTES):
                data += piece
        text = data.decode(errors="replace")
        self._output = (self._output + text)[-_MAX_OUTPUT_CHARS:]
        return text

    def forget_output(self) -> None:
        """Leave out of `all_output` what has been read so far."""
        self._output = ""

    @property
    def all_output(self) -> str:
        self.read_output()
        return self._output.strip()

    def wait_for_verdict(self, timeout: float) -> Verdict | None:
        """Return the verdict; None if there is none within `timeout` seconds, or at the launcher's end."""
        self.job.wait_until_over(timeout)
        return read_verdict(self.run_dir)

    def stop(self) -> None:
        """Stop the job, and wait until nothing of it is left. May be called again."""
        if self.output_fd < 0:
            return
        self.job.send(EndOrder())
        self.job.shut_down()
        if not self.wait(_STOP_TIMEOUT_S):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # its guard kills the rest
            self.wait(_STOP_TIMEOUT_S)
        self.read_output()
        os.close(self.output_fd)
        os.close(self.pidfd)
        self.job.close()
        self.output_fd = -1
        self._has_ended = True
