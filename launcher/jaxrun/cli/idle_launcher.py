"""A launcher that waits for its command line: `python -m jaxrun.cli.idle_launcher CHANNEL_FD [SERVER_FD:SERVER_PID]`.

A fork server starts it ahead of time, so that the start of a gang costs no imports. CHANNEL_FD is where the command
line comes; SERVER is the launcher's own fork server, its child, which has imported jax.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from importlib import import_module
from typing import NoReturn

from jaxrun.node.forkserver.client import ForkServer
from jaxrun.node.forkserver.early import EarlyServer
from jaxrun.protocol.forkserver_messages import LAUNCHER_DESCRIPTORS, ForkServerMessageDecoder, StartLauncher
from jaxrun.protocol.names import CONTROL_FD, RESERVED_PREFIX
from jaxrun.spec.job.environment import interpreter_variables

_MAX_REQUEST_BYTES = 2**18
_IMPORTED_BY_EVERY_JOB = (
    "jaxrun.cli.main",
    "jaxrun.controller.supervisor.local_job",
    "jaxrun.controller.supervisor.run_job",
    "jaxrun.controller.supervisor.attempts",
    "jaxrun.spec.backends.local",
    "jaxrun.spec.job.layout",
    "jaxrun.spec.job.devices",
    "jaxrun.spec.job.program_check",
    "jaxrun.records.rundir.rundir",
)


def main() -> NoReturn:
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    for name in _IMPORTED_BY_EVERY_JOB:
        import_module(name)
    frame, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, len(LAUNCHER_DESCRIPTORS))
    channel.close()
    if not frame:
        os._exit(0)
    (order,) = ForkServerMessageDecoder().feed(frame)
    assert isinstance(order, StartLauncher)
    stderr, control = descriptors
    os.dup2(stderr, 2)
    os.close(stderr)
    os.set_inheritable(control, False)
    hang_up = select.poll()
    hang_up.register(control, select.POLLHUP)
    if hang_up.poll(0):  # a Ctrl-C has ended the gang's start already, and the run directory's parent may be gone
        os._exit(0)
    early_server = _fork_server(sys.argv[2], order.directory) if len(sys.argv) > 2 else None
    os.environ.update(order.environment)
    for name in order.unset:
        os.environ.pop(name, None)
    os.environ[CONTROL_FD] = str(control)
    try:
        os.chdir(order.directory)
    except OSError as error:
        print(f"jaxrun: {order.directory}: {error.strerror}", file=sys.stderr)
        os._exit(1)
    from jaxrun.cli.main import run_and_exit

    run_and_exit(order.argv, early_server)


def _fork_server(text: str, directory: str) -> EarlyServer:
    """The fork server that this process has as its child; `text` is "DESCRIPTOR:PID"."""
    descriptor, _, pid = text.partition(":")
    channel = socket.socket(fileno=int(descriptor))
    os.set_inheritable(channel.fileno(), False)
    # The environment that both were started with.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(RESERVED_PREFIX)}
    environ |= interpreter_variables(environ)
    return EarlyServer(os.urandom(16).hex(), ForkServer(int(pid), channel, environ, directory))


if __name__ == "__main__":
    main()
