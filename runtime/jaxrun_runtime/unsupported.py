"""Explains features that a program has under `python` and not in a rank, when the program uses them.

os.exec… is refused, because the new program would run alone, as process 0 of 1. The workers of pytest-xdist are refused
for the same reason. mpi4py does not know the other ranks unless an MPI has started them, and one line says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import MpiImported
from jaxrun_runtime import jax_private
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.import_watch import call_after_import

_EXEC_CALLS = ("execv", "execve")  # the other exec functions of `os` call these
# Set by an MPI, or by Slurm for an MPI: Open MPI, MPICH and Intel MPI, PMIx.
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_FD", "PMIX_RANK")


class ExecError(RuntimeError):
    """Raised when the program calls os.exec… in a rank."""


class UsedTooEarlyError(RuntimeError):
    """Something has used JAX in this process before it could join the job."""


def check_unused() -> None:
    """Raise UsedTooEarlyError where JAX has a backend already: whatever is computed would be by this process alone."""
    if not jax_private.was_used():
        return
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize"))
    found = " or ".join(file for file in files if file) or "a .pth file of its environment"
    raise UsedTooEarlyError(
        f"something has used JAX before this process could join the job: {found}, which Python runs at its start; it "
        "may import jax, but not ask for devices or compute with it"
    )


def explain(env: WorkerEnv, channel: AgentChannel) -> None:
    """Refuse or explain these features from now on."""
    _refuse_exec()
    watch_mpi(env, channel)
    if env.size > 1:
        call_after_import("execnet", _refuse_xdist)  # xdist starts its workers with execnet


def _refuse_xdist(execnet: ModuleType) -> None:
    """Raise pytest's error about its command line when xdist is about to start workers."""
    original = execnet.Group.makegateway

    @functools.wraps(original)
    def makegateway(*args: Any, **kwargs: Any) -> Any:
        if "xdist.dsession" in sys.modules:
            _raise_usage_error()
        return original(*args, **kwargs)

    execnet.Group.makegateway = makegateway


def _raise_usage_error() -> NoReturn:
    import pytest

    raise pytest.UsageError(
        "the workers of pytest-xdist (-n) would be no ranks of this job: each would run its tests alone, as process 0 "
        "of 1. Add -n 0; or run pytest by itself, with @pytest.mark.processes(N) at the tests."
    )


def _refuse_exec() -> None:
    """Let os.exec… raise ExecError in this process. Processes that the program has forked may call it."""
    owner = os.getpid()
    for name in _EXEC_CALLS:
        setattr(os, name, _guard(getattr(os, name), owner))


def _guard(original: Callable[..., NoReturn], owner: int) -> Callable[..., NoReturn]:
    @functools.wraps(original)
    def execute(path: Any, *args: Any) -> NoReturn:
        if os.getpid() == owner:
            raise ExecError(
                f"os.{original.__name__} would replace this process by {os.fsdecode(path)}, which is not part of the "
                "job and would run alone, as process 0 of 1. For variables that must be set before the start: "
                "jaxrun --env NAME=VALUE; for another program: jaxrun PROGRAM, or subprocess.run."
            )
        original(path, *args)

    return execute


def watch_mpi(env: WorkerEnv, channel: AgentChannel) -> None:
    """When the program imports mpi4py.MPI, report it to the head; without an MPI, rank 0 prints a line instead."""

    def report(module: ModuleType) -> None:
        with contextlib.suppress(AgentDisconnected):  # as in a process that the program has forked
            channel.send(MpiImported(env.rank))

    if any(name in os.environ for name in _MPI_VARIABLES):
        call_after_import("mpi4py.MPI", report)
    elif env.rank == 0 and env.size > 1:
        call_after_import("mpi4py.MPI", _warn_of_singleton)


def _warn_of_singleton(module: ModuleType) -> None:
    print(
        "jaxrun: mpi4py sees rank 0 of 1 in every process, because no MPI started them; "
        "jaxrun --backend mpirun makes them the ranks of one MPI job",
        file=sys.stderr,
    )
