"""Starts a job's fork server before the command line is read, which saves 60 ms of every job, a tenth of a small one.

The server imports what no setting can change, and waits. Once the plan is made, the server is configured for it; where
the plan wants another interpreter or none, the server is dropped and ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrun.errors import UnavailableError
from jaxrun.node.forkserver import client
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.protocol.names import JOB_ID, RESERVED_PREFIX, SUBCOMMANDS, WORDS_OF_OTHERS
from jaxrun.protocol.worker_command import program_of
from jaxrun.spec.job.environment import interpreter_variables

# Words of a command line with which nothing is forked; where one belongs to the program, only the time is lost.
_WORDS_WITHOUT_FORK = frozenset(
    (
        *("-h", "--help", "--help-all", "-V", "--version", "--dry-run"),
        *("--no-fork", "--wrap", "--stage", "--backend", "--host-rank"),
    )
)


class PrestartedServer(NamedTuple):  # dataclasses would cost 6 ms before the server is started
    """A fork server that waits for a plan; the job must be called `job_id`."""

    job_id: str
    server: ForkServer


def start(arguments: Sequence[str], environ: Mapping[str, str]) -> PrestartedServer | None:
    """Start the server, if `arguments`, the words after `jaxrun`, look like a job that forks."""
    if (
        not arguments
        or arguments[0] in SUBCOMMANDS
        or WORDS_OF_OTHERS.get(arguments[0])
        or _WORDS_WITHOUT_FORK & {word.partition("=")[0] for word in arguments}
        or "_JAXRUN_COMPLETE" in environ
    ):
        return None
    job_id = os.urandom(16).hex()
    own = {name: value for name, value in environ.items() if not name.startswith(RESERVED_PREFIX)}
    own |= interpreter_variables(own) | {JOB_ID: job_id}
    try:
        return PrestartedServer(job_id, client.start(sys.executable, own))
    except (OSError, UnavailableError):  # making the plan will say what is missing
        return None


def preload(server: ForkServer, choice: str, argv: Sequence[str], *, torch_env: bool) -> None:
    """Have `server`, which imports jax meanwhile, import what --preload `choice` means for this command afterwards."""
    from jaxrun.protocol.env import WorkerEnv
    from jaxrun.spec.job.leading_imports import preload_order

    with contextlib.suppress(OSError):  # it has gone, which its channel says; or there are too many names
        order = preload_order(choice, program_of(argv), os.getcwd(), WorkerEnv.names_by_rank(torch_env=torch_env))
        if order is not None:
            server.preload(order)


def server_for(
    argv: Sequence[str], environ: Mapping[str, str], prestarted: PrestartedServer | None = None, *, fork: bool = True
) -> ForkServer | None:
    """A fork server for workers with this command and environment: the prestarted one if it fits, else a new one.

    None if it cannot be started, or nothing is to `fork`; the prestarted one ends then.
    """
    program = program_of(argv)
    if prestarted is not None:
        with contextlib.suppress(OSError):  # it has died, or the command line is too long for it
            if fork and argv[0] == sys.executable and prestarted.server.configure(program, environ):
                return prestarted.server
        prestarted.server.close()
    if fork:
        with contextlib.suppress(OSError):  # to start the workers afresh will fail too, and say why
            server = client.start(argv[0], environ)
            server.configure(program, environ)
            return server
    return None
