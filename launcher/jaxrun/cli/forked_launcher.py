"""A launcher that is a fork of a process which has imported it: the start of a gang costs no imports.

The fork server of a Python process with gangs imports this module once, and with it what every job needs.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from typing import NoReturn

from jaxrun.cli.main import run_and_exit
from jaxrun.controller.supervisor import attempts, local_job, run_job  # noqa: F401 - else each launcher would import them
from jaxrun.node.early_signals import clear_mask
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.node.forkserver.prestart import PrestartedServer
from jaxrun.protocol.forkserver_messages import StartLauncher
from jaxrun.protocol.names import CONTROL_FD, RESERVED_PREFIX
from jaxrun.records.rundir import rundir  # noqa: F401
from jaxrun.spec.backends import local, planning, quarantine, slurm_allocation  # noqa: F401
from jaxrun.spec.job import devices, layout, leading_imports, program_check  # noqa: F401
from jaxrun.spec.job.environment import interpreter_variables


def run_order(order: StartLauncher, stderr: int, control: int, server: tuple[int, socket.socket] | None) -> NoReturn:
    """Run the command line of `order`, in its environment and directory.

    stderr:   the descriptor for what the launcher prints
    control:  the descriptor of the socket by which the Python process gives orders
    server:   process id and channel of the launcher's own fork server, a child of this process
    """
    clear_mask()
    os.dup2(stderr, 2)
    os.close(stderr)
    os.set_inheritable(control, False)
    hang_up = select.poll()
    hang_up.register(control, select.POLLHUP)
    if hang_up.poll(0):  # a Ctrl-C has ended the gang's start already, and the run directory's parent may be gone
        os._exit(0)
    prestarted = _prestarted_server(*server, order.directory) if server is not None else None
    os.environ.update(order.environment)
    for name in order.unset:
        os.environ.pop(name, None)
    os.environ[CONTROL_FD] = str(control)
    try:
        os.chdir(order.directory)
    except OSError as error:
        print(f"jaxrun: {order.directory}: {error.strerror}", file=sys.stderr)
        os._exit(1)
    run_and_exit(order.argv, prestarted)


def _prestarted_server(pid: int, channel: socket.socket, directory: str) -> PrestartedServer:
    # The fork server has the environment that this process has got from the same fork.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(RESERVED_PREFIX)}
    environ |= interpreter_variables(environ)
    return PrestartedServer(os.urandom(16).hex(), ForkServer(pid, channel, environ, directory))
