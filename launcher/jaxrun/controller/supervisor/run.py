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

from jaxrun.controller.supervisor.resource_limits import check_limits
from jaxrun.errors import UsageError
from jaxrun.node.agent.guard import Guard, job_marker
from jaxrun.node.forkserver import early
from jaxrun.node.forkserver.early import EarlyServer
from jaxrun.protocol.addresses import loopback_address
from jaxrun.protocol.settings import CACHE_OFF
from jaxrun.records.rundir import rundir
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.standard_input import resolve_stdin

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.remote import Endpoint
    from jaxrun.records.output.held_screen import HeldScreen


def run(
    plan: Plan,
    environ: Mapping[str, str],
    early_server: EarlyServer | None = None,
    endpoint: Endpoint | None = None,
) -> int:
    """Run the job to its end; returns the exit status of `jaxrun`. `endpoint` is where remote agents connect."""
    started = time.time()
    if plan.job.live:
        from jaxrun.controller.supervisor.live import check_live

        check_live(plan.job)
    plan = replace(plan, job=resolve_stdin(plan.job, plan.launch_command), ends_at=_find_end(plan, environ, started))
    check_limits(plan)
    if plan.launch_command is None:
        return _run_local(plan, environ, started, early_server)
    return _run_remote(plan, environ, started, endpoint)


def _run_local(plan: Plan, environ: Mapping[str, str], started: float, early_server: EarlyServer | None) -> int:
    loopback_address()  # without one, nothing is made
    _check_compile_cache(plan, environ)
    directory = _open_run_dir(plan)
    held = _start_screen(plan, directory)
    guard = Guard(job_marker(plan.job_id), job_id=plan.job_id)  # forks, so it comes before any thread
    fork_server = early.server_for(plan.argv, plan.base_env(environ), early_server, fork=plan.fork)

    from jaxrun.controller.supervisor.local import LocalAgent
    from jaxrun.controller.supervisor.supervise import supervise

    agents = LocalAgent(environ, directory, fork_server)
    return supervise(plan, environ, directory, guard, agents, started, held)


def _run_remote(plan: Plan, environ: Mapping[str, str], started: float, endpoint: Endpoint | None) -> int:
    from jaxrun.node.channel.host_addresses import list_addresses, select_addresses

    # An --interface that this host lacks is refused before anything is made.
    addresses = select_addresses(list_addresses(), plan.job.interface)
    plan, directory = _continue_in_run_dir(plan)
    held = _start_screen(plan, directory)
    sigterm = plan.launch_command is None or plan.launch_command.sigterm_at_start
    # For no agent: each has a guard of its own.
    guard = Guard(launch_mark=job_marker(plan.job_id), sigterm=sigterm)

    from jaxrun.controller.supervisor.remote import RemoteAgents
    from jaxrun.controller.supervisor.supervise import supervise

    agents = RemoteAgents(plan, environ, directory, addresses, endpoint)
    return supervise(plan, environ, directory, guard, agents, started, held)


def _start_screen(plan: Plan, directory: rundir.RunDir) -> HeldScreen | None:
    """Let `jaxrun top` have the terminal, with --live."""
    if not plan.job.live:
        return None
    from jaxrun.controller.supervisor.live import start_screen

    return start_screen(directory)


def _find_end(plan: Plan, environ: Mapping[str, str], now: float) -> float | None:
    """When Slurm ends the job, where --save-time needs that. Raises UsageError if there is not even that time left."""
    save_time = plan.job.save_time
    if save_time is None:
        return None
    from jaxrun.spec.backends.slurm_job_state import end_of_allocation

    ends_at = end_of_allocation(environ, now)
    if ends_at is not None and ends_at - save_time <= now:
        left = max(0.0, ends_at - now)
        raise UsageError(
            f"--save-time {save_time:g} is more than Slurm leaves this job, {left:.0f} s; ask for more --time"
        )
    return ends_at


def _check_compile_cache(plan: Plan, environ: Mapping[str, str]) -> None:
    """Raise UsageError if this host cannot keep compiled programs where --compile-cache says."""
    if plan.job.compile_cache == CACHE_OFF:
        return
    from jaxrun.protocol.compiled_programs import cache_directory, make_cache_directory

    directory = cache_directory(plan.job.compile_cache, environ)
    try:
        make_cache_directory(directory)
    except OSError as error:
        raise UsageError(f"--compile-cache cannot use {directory}: {error.strerror}; name another directory") from None


def _open_run_dir(plan: Plan) -> rundir.RunDir:
    job = plan.job
    if job.no_run_dir:
        return rundir.RunDir(None)
    return rundir.create(job.run_dir, base=Path.cwd(), name=job.name, now=datetime.now())


def _continue_in_run_dir(plan: Plan) -> tuple[Plan, rundir.RunDir]:
    """The plan of the next attempt, and the run directory, where an earlier launcher has begun the job (--requeue)."""
    if not plan.requeue_id:
        return plan, _open_run_dir(plan)
    from jaxrun.records.rundir.requeued import continue_job, find_requeued

    path = find_requeued(plan.job.run_dir, Path.cwd(), plan.requeue_id)
    if path is None:
        return plan, _open_run_dir(plan)
    directory, attempt = continue_job(path)
    reason = directory.earlier[-1].headline.partition("\n")[0] if directory.earlier else "its launcher was killed"
    return replace(plan, attempt=attempt, restart_reason=reason), directory
