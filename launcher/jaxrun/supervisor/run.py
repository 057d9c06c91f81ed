"""Carries out a plan: makes the run directory, starts what takes longest, and has the job conducted.

Importing jax takes longest, so its process is started before the rest of the launcher is imported, in its shadow.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.agent.guard import Guard, job_marker
from jaxrun.errors import UsageError
from jaxrun.forkserver import early
from jaxrun.forkserver.early import EarlyServer
from jaxrun.job.plan import Plan
from jaxrun.rundir import rundir

if TYPE_CHECKING:
    from jaxrun.supervisor.remote import Endpoint

_FILES_PER_WORKER = 12  # two pipes, a channel, stacks and two logs, and twice the first while it is being started
_FILES_PER_AGENT = 3  # a connection, and two logs where its host cannot write them
_FILES_OF_OURS = 64


def run(
    plan: Plan,
    environ: Mapping[str, str],
    early_server: EarlyServer | None = None,
    meeting: Endpoint | None = None,
) -> int:
    """Run the job to its end; returns the exit status of `jaxrun`. `meeting` is where agents on other hosts come to."""
    started = time.time()
    if plan.launch_command is not None:
        from jaxrun.channel import addresses

        addresses.select_interfaces(addresses.list_interfaces(), plan.job.interface)  # before anything is made
    _allow_open_files(plan)
    directory = _open_run_dir(plan)
    if plan.launch_command is not None:
        from jaxrun.supervisor import remote as far

        return far.run_remote(
            plan, environ, directory, Guard(), started, meeting
        )  # the agents have guards of their own
    guard = Guard(job_marker(plan.job_id))  # forks, so it comes before any thread
    server = early.server_for(plan, environ, early_server)

    from jaxrun.supervisor import local

    return local.run_local(plan, environ, directory, guard, server, started)


def _open_run_dir(plan: Plan) -> rundir.RunDir:
    job = plan.job
    if job.no_run_dir:
        return rundir.RunDir(None)
    return rundir.create(job.run_dir, base=Path.cwd(), name=job.name, now=datetime.now())


def _allow_open_files(plan: Plan) -> None:
    """Raise this process's limit of open files where the job needs more. UsageError where a far job cannot do so."""
    each = _FILES_PER_WORKER if plan.launch_command is None else _FILES_PER_AGENT
    count = _FILES_OF_OURS + each * len(plan.workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if plan.launch_command is not None and hard != resource.RLIM_INFINITY and hard < count:
        raise UsageError(
            f"{len(plan.workers)} agents need {count} open files here, but only {hard} are allowed; "
            "raise the limit: ulimit -Hn, or ask for it in /etc/security/limits.conf"
        )
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
