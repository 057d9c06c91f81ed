"""Starts frontends that show the job beside the launcher: the screen of --live, the server of --metrics.

They use the job's socket as `jaxrun top` does, and end by themselves once the job is over.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from msgspec import Struct

from jaxrun.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from jaxrun.records.output.screen import HeldScreen
    from jaxrun.records.rundir.rundir import RunDir
    from jaxrun.spec.job.job import Job


class Sidecar(Struct, frozen=True):
    """A frontend in a process of its own: `python -m MODULE WORDS`, and further words that its caller adds.

    has_stdin:  whether it gets the launcher's standard input, as a screen does
    """

    module: str
    words: tuple[str, ...] = ()
    has_stdin: bool = False


# The supervisor imports no frontend: these are all that it starts, by the option that asks for each.
SIDECARS = {
    "--live": Sidecar("jaxrun", ("top", "--launcher"), has_stdin=True),
    "--metrics": Sidecar("jaxrun.frontends.metrics"),
}

# In the background of a shell that ends at once, the process is no descendant of the launcher, which kills all of
# those. The shell gives it no standard input, unless the screen needs the launcher's.
_BACKGROUND = '"$@" &'
_WITH_STDIN = 'exec 3<&0; "$@" 0<&3 3<&- &'
_BACKLOG = 128  # connections that wait to be accepted, strangers' included
_STREAMS = ("standard input", "stdout", "stderr")


def start_sidecar(option: str, words: Sequence[str], fd: int) -> None:
    """Start the sidecar of this option, which outlives the launcher; it inherits the descriptor `fd`, by its number.

    To be called before the guard exists, which would end it.
    """
    import subprocess  # takes 5 ms

    sidecar = SIDECARS[option]
    assert not (sidecar.has_stdin and fd == 3)  # which the shell uses
    script = _WITH_STDIN if sidecar.has_stdin else _BACKGROUND
    command = (sys.executable, "-m", sidecar.module, *sidecar.words, *words)
    subprocess.run(["/bin/sh", "-c", script, "jaxrun", *command], pass_fds=(fd,), check=False)


def check_live() -> None:
    """Raise UsageError if there is no terminal to show the screen on."""
    for fd, name in enumerate(_STREAMS):
        if not os.isatty(fd):
            raise UsageError(f"--live needs a terminal, and {name} is not one; leave --live out")


def start_screen(directory: RunDir) -> HeldScreen:
    """Start the screen of --live; to be called before the guard exists, which would end it with the launcher."""
    from jaxrun.records.output.screen import HeldScreen

    ended, holds = os.pipe()
    try:
        start_sidecar("--live", (str(os.getpid()), directory.name), holds)
    finally:
        os.close(holds)
    return HeldScreen(ended)


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
        start_sidecar("--metrics", (directory.name, str(os.getpid()), str(listener.fileno())), listener.fileno())
    return f"http://{host}:{port}/metrics"
