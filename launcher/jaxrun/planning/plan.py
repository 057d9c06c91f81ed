"""What will be started: a Plan is a frozen value, made by a backend from a Job; --dry-run prints it.

Whatever is known before the first process starts stands here; a worker's descriptors are known at its spawn.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from jaxrun.contract.names import COORDINATOR_ADDRESS, JOB_ID
from jaxrun.contract.variables import WorkerEnv
from jaxrun.planning.environment import masked
from jaxrun.planning.job import Job
from jaxrun.planning.starter import Starter
from jaxrun.wording import columns, plural

_NOT_YET = "?"
_COLUMNS = ("rank", "host", "local rank", "devices", "cores")


@dataclass(frozen=True, slots=True)
class Worker:
    """One process: its place in the job and the devices and cores that it takes.

    local_device_ids:  ordinals among the accelerators that its host shows; empty for all of them
    cpus:              the cores that it stays on; empty for all of them
    """

    rank: int
    local_rank: int
    local_size: int
    host: str
    local_device_ids: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    simulated_boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is decided before anything starts.

    job:            the request, with its processes and platform decided
    job_id:         32 hex digits
    workers:        by rank
    argv:           the command of every worker
    set_env:        variables to set in all workers, besides each one's own
    unset_env:      names that must not reach a worker
    local_devices:  devices that every process must show; None where only JAX can tell
    device_names:   what the host's accelerators are called, by ordinal; empty on CPU
    fork:           start the workers by forking one process that has imported jax
    notes:          remarks on these decisions that the user should see
    job_size:       the processes of the whole job, where `workers` are not all of them
    starter:        the command that starts an agent for each worker; None where the launcher starts the workers
    """

    job: Job
    job_id: str
    workers: tuple[Worker, ...]
    argv: tuple[str, ...]
    set_env: Mapping[str, str]
    unset_env: tuple[str, ...]
    local_devices: int | None
    device_names: tuple[str, ...]
    fork: bool
    notes: tuple[str, ...] = ()
    job_size: int = 0
    starter: Starter | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host once, in the order of their first ranks."""
        return tuple(dict.fromkeys(worker.host for worker in self.workers))

    @property
    def host_of(self) -> dict[int, str]:
        """The host of each rank."""
        return {worker.rank: worker.host for worker in self.workers}

    def base_env(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment that all workers share, made from the launcher's own `environ`, with the job's mark."""
        kept = {name: value for name, value in environ.items() if name not in self.unset_env}
        return {**kept, **self.set_env, JOB_ID: self.job_id}

    def worker_env(self, worker: Worker, *, run_dir: str, channel_fd: int, stacks_fd: int) -> WorkerEnv:
        """What `worker` is told at its start."""
        return WorkerEnv(
            job_id=self.job_id,
            rank=worker.rank,
            size=self.job_size or len(self.workers),
            local_rank=worker.local_rank,
            local_size=worker.local_size,
            host=worker.host,
            channel_fd=channel_fd,
            stacks_fd=stacks_fd,
            init_timeout=self.job.init_timeout,
            run_dir=run_dir,
            simulated_boot_id=worker.simulated_boot_id,
            local_device_ids=worker.local_device_ids,
            cpus=worker.cpus,
        )


def summary(plan: Plan) -> str:
    """The job's shape in one line: "4 processes x 2 devices (cpu) on this machine"."""
    count = len(plan.workers)
    shape = f"{count} process{'es' if count != 1 else ''}"
    if plan.local_devices is not None:
        shape += f" x {plural(plan.local_devices, 'device')}"
    hosts = plan.job.simulated_hosts
    where = plural(hosts, "simulated host") if hosts else "this machine"
    return f"{shape} ({plan.job.platform}) on {where}"


def render(plan: Plan, environ: Mapping[str, str]) -> str:
    """The plan for people: the command, pasteable; the workers as a table; what changes in `environ`."""
    common, own, later = _worker_variables(plan)
    changed = {name: value for name, value in plan.set_env.items() if environ.get(name) != value}
    lines = [shlex.join(plan.argv), ""]
    lines += [f"{summary(plan)}; {_how(plan)}", *(f"note: {note}" for note in plan.notes), ""]
    lines += columns([_COLUMNS, *(_row(plan, worker) for worker in plan.workers)])
    lines += ["", "variables that jaxrun sets in every worker:"]
    lines += [f"  {_assignment(name, value)}" for name, value in sorted((changed | common).items())]
    if own:
        lines += ["", "those that differ, rank by rank:"]
        lines += ["  " + " ".join(_assignment(*pair) for pair in sorted(table.items())) for table in own]
    lines += ["", f"those whose values are known only at the start: {', '.join(later)}"]
    if plan.unset_env:
        lines += ["", f"variables that jaxrun takes away: {', '.join(plan.unset_env)}"]
    return "\n".join(lines) + "\n"


def to_json(plan: Plan) -> str:
    """The text of job.json: the plan as data, with every secret masked."""
    job = plan.job
    content = {
        "job_id": plan.job_id,
        "program": list(job.program),
        "module": job.module,
        "tag": job.tag,
        "backend": job.backend,
        "platform": job.platform,
        "processes": len(plan.workers),
        "local_devices": plan.local_devices,
        "simulated_hosts": job.simulated_hosts,
        "hosts": list(plan.hosts),
        "timeout": job.timeout,
        "init_timeout": job.init_timeout,
        "grace": job.grace,
        "fork": plan.fork,
        "argv": list(plan.argv),
        "set_env": {name: masked(name, value) for name, value in sorted(plan.set_env.items())},
        "unset_env": list(plan.unset_env),
        "notes": list(plan.notes),
        "workers": [
            {
                "rank": worker.rank,
                "host": worker.host,
                "local_rank": worker.local_rank,
                "local_device_ids": list(worker.local_device_ids),
                "cpus": list(worker.cpus),
            }
            for worker in plan.workers
        ],
    }
    return json.dumps(content, indent=2) + "\n"


def _worker_variables(plan: Plan) -> tuple[dict[str, str], list[dict[str, str]], list[str]]:
    """The contract's variables: alike in all workers; each worker's others; names without a value yet."""
    tables: list[dict[str, str]] = []
    later = {COORDINATOR_ADDRESS}
    for worker in plan.workers:
        told = plan.worker_env(worker, run_dir=_NOT_YET, channel_fd=-1, stacks_fd=-1).to_env()
        later |= {name for name, value in told.items() if value in (_NOT_YET, "-1")}
        tables.append({name: value for name, value in told.items() if value and name not in later})
    common = {name: value for name, value in tables[0].items() if all(table.get(name) == value for table in tables)}
    own = [{name: value for name, value in table.items() if name not in common} for table in tables]
    return common, [table for table in own if table], sorted(later)


def _row(plan: Plan, worker: Worker) -> tuple[str, ...]:
    if worker.local_device_ids:
        devices = ", ".join(f"{plan.job.platform}:{ordinal}" for ordinal in worker.local_device_ids)
        names = dict.fromkeys(plan.device_names[ordinal] for ordinal in worker.local_device_ids)
        devices += f" ({', '.join(names)})"
    else:
        devices = f"{plan.job.platform} x {plan.local_devices or 'all'}"
    cores = ",".join(map(str, worker.cpus)) or "all"
    return str(worker.rank), worker.host, f"{worker.local_rank} of {worker.local_size}", devices, cores


def _how(plan: Plan) -> str:
    return "one import of jax, then fork" if plan.fork else "a fresh interpreter each"


def _assignment(name: str, value: str) -> str:
    shown = masked(name, value)
    return f"{name}={shown if shown != value else shlex.quote(value)}"
