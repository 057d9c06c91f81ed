"""A launcher that waits for its command line: `python -m jaxrun.standby CHANNEL [SERVER]`, started by a gang's nursery.

It has imported what a job needs before there is one, so that the start of a gang costs a fork and the joining.
CHANNEL is where its order comes; SERVER the fork server that it has as its child, which has imported jax.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from jaxrun.job import interpreter
from jaxrun.protocol.names import CONTROL_FD, RESERVED_PREFIX

if TYPE_CHECKING:
    from jaxrun.forkserver.early import EarlyStart

_MAX_ORDER = 2**18
_OF_EVERY_JOB = (
    "jaxrun.cli.main",
    "jaxrun.supervisor.local",
    "jaxrun.supervisor.run",
    "jaxrun.backends.local",
    "jaxrun.protocol.worker_messages",
    "jaxrun.job.layout",
    "jaxrun.job.machine",
    "jaxrun.job.program",
    "jaxrun.job.settings",
    "jaxrun.rundir.rundir",
)


def main() -> NoReturn:
    from jaxrun.forkserver import client
    from jaxrun.forkserver.early import EarlyStart
    from jaxrun.protocol import LAUNCHER_DESCRIPTORS, StartLauncher, WorkerMessageDecoder

    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    server = client.from_descriptor(sys.argv[2]) if len(sys.argv) > 2 else None
    for name in _OF_EVERY_JOB:
        import_module(name)
    frame, descriptors, _, _ = socket.recv_fds(channel, _MAX_ORDER, len(LAUNCHER_DESCRIPTORS))
    channel.close()
    if not frame:
        os._exit(0)
    (order,) = WorkerMessageDecoder().feed(frame)
    assert isinstance(order, StartLauncher)
    stderr, control = descriptors
    os.dup2(stderr, 2)
    os.close(stderr)
    os.set_inheritable(control, False)
    hung_up = select.poll()
    hung_up.register(control, select.POLLHUP)
    if hung_up.poll(0):  # by a Ctrl-C, and the run directory's place may be gone
        os._exit(0)
    # The fork server has the environment that we were started with; what the order changes there, it is told.
    before = {name: value for name, value in os.environ.items() if not name.startswith(RESERVED_PREFIX)}
    os.environ.update(order.environment)
    for name in order.unset:
        os.environ.pop(name, None)
    os.environ[CONTROL_FD] = str(control)
    head_start = None
    if server is not None:
        before |= interpreter.interpreter_settings(before)
        head_start = EarlyStart(os.urandom(16).hex(), before, server, directory=order.directory)
    _run(order.argv, order.directory, head_start)


def _run(argv: tuple[str, ...], directory: str, head_start: EarlyStart | None) -> NoReturn:
    from jaxrun.cli import main

    try:
        os.chdir(directory)
    except OSError as error:
        print(f"jaxrun: {directory}: {error.strerror}", file=sys.stderr)
        os._exit(1)
    status = main.main(argv, head_start=head_start)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
