"""Entry into the supervisor: prepares a planned job, and starts first what takes longest.

Importing jax takes longest, so the fork server, which does so, is started before the rest of the launcher is imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.agent.guard import Guard, job_marker
from jaxrun.forkserver import early
from jaxrun.forkserver.early import EarlyServer
from jaxrun.job.plan import Plan
from jaxrun.job.standard_input import resolve_stdin
from jaxrun.rundir import rundir
from jaxrun.supervisor.resource_limits import check_limits

if TYPE_CHECKING:
    from jaxrun.supervisor.remote import Endpoint


def run(
    plan: Plan,
    environ: Mapping[str, str],
    early_server: EarlyServer | None = None,
    endpoint: Endpoint | None = None,
) -> int:
    """Run the job to its end; returns the exit status of `jaxrun`. `endpoint` is where remote agents connect."""
    started = time.time()
    plan = replace(plan, job=resolve_stdin(plan.job, plan.launch_command))
    check_limits(plan)
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
    guard = Guard(term_first=True)  # only for the launch command: each agent has a guard of its own

    from jaxrun.supervisor.remote import RemoteAgents
    from jaxrun.supervisor.supervise import supervise

    agents = RemoteAgents(plan, environ, directory, interfaces, endpoint)
    return supervise(plan, environ, directory, guard, agents, started)


def _open_run_dir(plan: Plan) -> rundir.RunDir:
    job = plan.job
    if job.no_run_dir:
        return rundir.RunDir(None)
    return rundir.create(job.run_dir, base=Path.cwd(), name=job.name, now=datetime.now())
