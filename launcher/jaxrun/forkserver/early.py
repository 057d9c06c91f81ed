"""A head start: the interpreter that is to import jax is started before the command line is even read.

It imports what no setting can change, and waits. The plan then tells it the rest; or, where the plan wants another
interpreter or none, it is dropped and ends by itself. Worth 60 ms of every job, a tenth of a small one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxrun.forkserver import client
from jaxrun.job import interpreter
from jaxrun.protocol.names import JOB_ID, RESERVED_PREFIX

if TYPE_CHECKING:
    from jaxrun.job.plan import Plan

# With one of these nothing is forked; where it belongs to the program, only the head start is lost.
_WORDS_WITHOUT_FORK = frozenset(("--help", "--help-all", "--version", "--dry-run", "--no-fork", "--backend"))
# What an interpreter reads when it starts, or its C library; to change them takes another one.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ")
# The same for jax and numpy; these the fork server makes up for, or they matter little.
READ_AT_IMPORT = ("JAX_", "NPY_", "NUMPY_")
APPLIED_AFTER_IMPORT = frozenset(("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"))


class EarlyStart:
    """An interpreter that waits, in `environ`; `job_id` is what its job must be called.

    With a `directory`, which is where its workers are to run, jax has been imported in it.
    """

    def __init__(self, job_id: str, environ: Mapping[str, str], server: client.ForkServer, directory: str = "") -> None:
        self.job_id = job_id
        self._environ = environ
        self._server = server
        self._directory = directory

    def server_for(self, plan: Plan, environ: Mapping[str, str]) -> client.ForkServer | None:
        """The server, set up for `plan`; None if it does not fit. `environ` is the launcher's own environment."""
        wanted = plan.base_env(environ)
        values = {name: value for name, value in wanted.items() if self._environ.get(name) != value}
        unset = sorted(self._environ.keys() - wanted.keys())
        try:
            if plan.fork and not any(map(self._too_late, (*values, *unset))):
                self._server.set_up(client.program_of(plan.argv), values, unset, self._directory)
                return self._server
        except OSError:
            pass  # it has died, or the command line is too long for it
        self._server.channel.close()
        return None

    def _too_late(self, name: str) -> bool:
        """Whether it can no longer be changed."""
        if name.startswith(READ_AT_START):
            return True
        return bool(self._directory) and name.startswith(READ_AT_IMPORT) and name not in APPLIED_AFTER_IMPORT


def start(arguments: Sequence[str], environ: Mapping[str, str]) -> EarlyStart | None:
    """Start the interpreter, if `arguments` look like a job that forks."""
    if (
        not arguments
        or arguments[0] in ("explain", "attach", "stacks")
        or _WORDS_WITHOUT_FORK & {word.partition("=")[0] for word in arguments}
        or "_JAXRUN_COMPLETE" in environ
    ):
        return None
    job_id = os.urandom(16).hex()
    own = {name: value for name, value in environ.items() if not name.startswith(RESERVED_PREFIX)}
    own |= interpreter.interpreter_settings(own) | {JOB_ID: job_id}
    try:
        return EarlyStart(job_id, own, client.start((sys.executable,), (), own))
    except OSError:
        return None
