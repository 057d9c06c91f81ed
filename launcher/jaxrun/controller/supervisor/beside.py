"""Starts processes that look at the job from beside the launcher: the screen of --live, the server of --metrics.

They stand on the job's socket as `jaxrun top` does, and end by themselves once the job is over.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from jaxrun.errors import UnavailableError
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.job import Job

# In the background of a shell that ends at once, the process is no descendant of the launcher, which kills all of
# those. The shell gives it no standard input, unless the screen needs the launcher's.
_BACKGROUND = '"$@" &'
_WITH_STDIN = 'exec 3<&0; "$@" 0<&3 3<&- &'
_BACKLOG = 128  # connections that wait to be accepted, strangers' included


def start_beside(command: Sequence[str], fd: int, *, has_stdin: bool = False) -> None:
    """Start a process that the end of the launcher does not end; it inherits the descriptor `fd`, by its number.

    To be called before the guard exists, which would end it.
    """
    import subprocess  # takes 5 ms

    assert not (has_stdin and fd == 3)  # which the shell uses
    script = _WITH_STDIN if has_stdin else _BACKGROUND
    subprocess.run(["/bin/sh", "-c", script, "jaxrun", *command], pass_fds=(fd,), check=False)


def listen_for_metrics(job: Job) -> socket.socket | None:
    """Open the port of --metrics; None without the option.

    Raises UnavailableError if it cannot be opened or served.
    """
    if not job.metrics:
        return None
    if find_spec("prometheus_client") is None:
        raise UnavailableError("--metrics needs prometheus_client; install it: pip install 'jaxrun[metrics]'")
    address, _, port = job.metrics.rpartition(":")
    try:
        return socket.create_server((address or "127.0.0.1", int(port)), backlog=_BACKLOG)
    except OSError as error:
        raise UnavailableError(
            f"--metrics {job.metrics} cannot listen there: {error.strerror or error}; name another port"
        ) from None


def serve_metrics(listener: socket.socket, directory: RunDir) -> str:
    """Start the process that serves the metrics at this socket, which is closed here; returns their address."""
    with listener:
        host, port = listener.getsockname()[:2]
        words = ("-m", "jaxrun.frontends.metrics", directory.name, str(os.getpid()), str(listener.fileno()))
        start_beside((sys.executable, *words), listener.fileno())
    return f"http://{host}:{port}/metrics"
