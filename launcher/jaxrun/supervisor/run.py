"""Entry into the supervisor: prepares a planned job, and starts first what takes longest.

Importing jax takes longest, so the fork server, which does so, is started before the rest of the launcher is imported.
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
_FILES_OF_LAUNCHER = 64


def run(
    plan: Plan,
    environ: Mapping[str, str],
    early_server: EarlyServer | None = None,
    endpoint: Endpoint | None = None,
) -> int:
    """Run the job to its end; returns the exit status of `jaxrun`. `endpoint` is where remote agents connect."""
    started = time.time()
    _raise_open_file_limit(plan)
    if plan.launch_command is None:
        return _run_local(plan, environ, started, early_server)
    return _run_remote(plan, environ, started, endpoint)


def _run_local(plan: Plan, environ: Mapping[str, str], started: float, early_server: EarlyServer | None) -> int:
    directory = _open_run_dir(plan)
    guard = Guard(job_marker(plan.job_id))  # forks, so it comes before any thread
    fork_server = early.server_for(plan, environ, early_server)

    from jaxrun.supervisor.local import LocalAgent
    from jaxrun.supervisor.supervise import supervise

    agents = LocalAgent(plan, environ, directory, fork_server)
    return supervise(plan, environ, directory, guard, agents, started)


def _run_remote(plan: Plan, environ: Mapping[str, str], started: float, endpoint: Endpoint | None) -> int:
    from jaxrun.channel.interfaces import list_interfaces, select_interfaces

    # An --interface that this host lacks is refused before anything is made.
    interfaces = select_interfaces(list_interfaces(), plan.job.interface)
    directory = _open_run_dir(plan)
    guard = Guard()  # only for the launch command: each agent has a guard of its own

    from jaxrun.supervisor.remote import RemoteAgents
    from jaxrun.supervisor.supervise import supervise

    agents = RemoteAgents(plan, environ, directory, interfaces, endpoint)
    return supervise(plan, environ, directory, guard, agents, started)


def _open_run_dir(plan: Plan) -> rundir.RunDir:
    job = plan.job
    if job.no_run_dir:
        return rundir.RunDir(None)
    return rundir.create(job.run_dir, base=Path.cwd(), name=job.name, now=datetime.now())


def _raise_open_file_limit(plan: Plan) -> None:
    """Let this process open as many files as the job needs. UsageError where remote agents need too many."""
    each = _FILES_PER_WORKER if plan.launch_command is None else _FILES_PER_AGENT
    count = _FILES_OF_LAUNCHER + each * len(plan.workers)
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
