"""Lets the backend of a job plan what to start: the first attempt, a later one, or a command on one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from msgspec.structs import replace

from jaxrun.protocol.settings import STDIN_NONE
from jaxrun.spec.backends import backend_of, places_ranks
from jaxrun.spec.engines import HOST_LIST
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV, LaunchCommand, Plan
from jaxrun.spec.job.rank_placement import UNPLACED, Placement


def make_plan(job: Job, environ: Mapping[str, str], job_id: str, placed: Placement = UNPLACED) -> Plan:
    """Let the backend of `job` plan what to start. Raises the exceptions of its `plan`.

    placed:  the host of each rank, if that is decided already
    """
    if (job.exclude_hosts or job.quarantine) and not placed.hosts:
        from jaxrun.spec.backends.quarantine import excluded_hosts

        placed = Placement(left_out=excluded_hosts(job))
    backend = backend_of(job.backend)
    if HOST_LIST in backend.options and not placed.hosts:
        job = _name_hosts(job, environ)
    words = (placed,) if places_ranks(backend) else ()
    plan: Plan = import_module(backend.module).plan(job, environ, job_id, *words)
    return plan


def _name_hosts(job: Job, environ: Mapping[str, str]) -> Job:
    """Name the hosts of the scheduler's job in which this process is, as -H would, if the user names none."""
    from jaxrun.spec.engines.lookup import marked_engines
    from jaxrun.spec.engines.mpirun_words import names_hosts

    if job.host_list or job.hostfile or names_hosts(job.mpi_args):
        return job
    found = next((text for one in marked_engines(environ) if (text := one.slots(environ))), "")
    return replace(job, host_list=found) if found else job


def replan(plan: Plan, placed: Placement, environ: Mapping[str, str]) -> Plan:
    """Return the plan of the same job with these hosts, and the agents that its launch command starts there.

    Raises the exceptions of the backend's `plan`.
    """
    job = replace(plan.job, processes=len(placed.hosts), hosts=None, processes_per_host=None, spares=0)
    made = make_plan(job, environ, plan.job_id, placed)
    return replace(
        plan,
        job=replace(made.job, spares=plan.job.spares),
        workers=made.workers,
        launch_command=made.launch_command,
        placement=replace(placed, agents=made.placement.agents),
    )


def command_on(plan: Plan, host: str, words: Sequence[str], environ: Mapping[str, str]) -> LaunchCommand:
    """Return the engine's command that runs these words on a host. Raises the exceptions of the backend's `plan`."""
    of_job = {"processes": 1, "hosts": None, "processes_per_host": None, "spares": 0, "min_hosts": None, "grow": None}
    of_ranks = {"chaos": (), "quiet_ranks": (), "only_ranks": (), "stdin": STDIN_NONE}
    job = replace(plan.job, **of_job, **of_ranks)
    command = make_plan(job, environ, plan.job_id, Placement((host,))).launch_command
    assert command is not None
    return replace(command, argv=(*command.argv[: -len(AGENT_ARGV)], *words))
