"""job.json, and what --dry-run --json prints: a plan as a document, with the values of secrets masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from jaxrun.protocol.codec import format_json
from jaxrun.records.rundir.recorded_files import RecordedLauncher, RecordedPlan
from jaxrun.spec.job.env_options import mask_secret
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.plan import Plan, Worker


class PlannedCommand(Struct, frozen=True, kw_only=True):
    """The mpirun or srun that starts the agents."""

    title: str
    argv: tuple[str, ...]


class PlannedJob(RecordedPlan, frozen=True, kw_only=True):
    """What is started for a job, with all its options."""

    options: Annotated[Mapping[str, Any], Meta(description="the value of each option by its long name, given or not")]
    local_devices: int | None
    hosts: tuple[str, ...]
    spares: tuple[str, ...]
    fork: Annotated[bool, Meta(description="whether ranks are forked from one process that has imported jax")]
    argv: Annotated[tuple[str, ...], Meta(description="the command of each rank")]
    launch_command: Annotated[
        PlannedCommand | None, Meta(description="the mpirun or srun that starts the agents; null on one machine")
    ]
    set_env: Mapping[str, str]
    unset_env: tuple[str, ...]
    notes: tuple[str, ...]
    workers: tuple[Worker, ...]


class JobFile(PlannedJob, frozen=True, kw_only=True, tag="job"):
    """The content of job.json in a run directory: what was started."""


class PlanDocument(PlannedJob, frozen=True, kw_only=True, tag="plan"):
    """What `jaxrun --dry-run --json` prints: what would be started.

    Values of secrets are masked, and no launcher is there yet.
    """

    preloaded: Annotated[tuple[str, ...], Meta(description="what is imported before the fork (--preload)")]


def format_job_file(plan: Plan, launcher: RecordedLauncher) -> str:
    return format_json(JobFile(launcher=launcher, **_content(plan))) + "\n"


def plan_document(plan: Plan, preloaded: Sequence[str]) -> PlanDocument:
    return PlanDocument(preloaded=tuple(preloaded), **_content(plan))


def _content(plan: Plan) -> dict[str, Any]:
    command = plan.launch_command
    return {
        "job_id": plan.job_id,
        "program": plan.job.program,
        "tag": plan.job.tag,
        "requeue_id": plan.requeue_id,
        "processes": len(plan.workers),
        "options": {each.name: option.kind.show(getattr(plan.job, each.name)) for each, option in options_of(plan.job)},
        "local_devices": plan.local_devices,
        "hosts": plan.hosts,
        "spares": plan.placement.spares,
        "fork": plan.fork,
        "argv": plan.argv,
        "launch_command": PlannedCommand(title=command.title, argv=command.argv) if command is not None else None,
        "set_env": {name: mask_secret(name, value) for name, value in sorted(plan.set_env.items())},
        "unset_env": plan.unset_env,
        "notes": plan.notes,
        "workers": plan.workers,
    }
