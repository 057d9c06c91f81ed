"""Describes a plan for people: in one line, and in full for --dry-run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.names import COORDINATOR_ADDRESS, JOB_ID, MASTER_ADDR, MASTER_PORT, TOKEN, TORCH_VARIABLES
from jaxrun.spec.job.env_options import mask_secret
from jaxrun.spec.job.fault_spec import CHAOS_OPTION
from jaxrun.spec.job.option_checks import PRELOAD_NONE
from jaxrun.spec.job.plan import LaunchCommand, Plan, Worker
from jaxrun.spec.job.rank_placement import describe_left_out
from jaxrun.text import UNKNOWN_HOST, format_columns, format_ranges, plural

_UNKNOWN_YET = "?"
_NOT_PRELOADED = ", so --preload imports nothing"
_COLUMNS = ("rank", "host", "local rank", "devices", "cores")


def plan_summary(plan: Plan) -> str:
    """Return the job's shape in one line, "4 processes x 2 devices (cpu) on this machine", and its --chaos."""
    count = len(plan.workers)
    shape = f"{count} process{'es' if count != 1 else ''}"
    if plan.local_devices is not None:
        shape += f" x {plural(plan.local_devices, 'device')}"
    elif plan.job.devices_per_process is not None:
        shape += f" x {plural(plan.job.devices_per_process, 'device')}"
    platform = f" ({plan.job.platform})" if plan.job.platform != "auto" else ""
    chaos = f" · {CHAOS_OPTION} {','.join(map(str, plan.job.chaos))}" if plan.job.chaos else ""
    return f"{shape}{platform} {_where(plan)}{chaos}"


def _enumerate(names: Sequence[str]) -> str:
    """Write `jax, optax and flax`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _where(plan: Plan) -> str:
    command = plan.launch_command
    if plan.job.host_rank is not None:
        return f"on {plural(plan.job.hosts or 1, 'host')}, with a command on each"
    if command is None:
        hosts = plan.job.simulated_hosts
        return f"on {plural(hosts, 'simulated host') if hosts else 'this machine'}"
    if command.attached:
        return f"attached to {command.engine.title}"
    known = [host for host in plan.hosts if host != UNKNOWN_HOST]
    on = f"on {plural(len(known), 'host')} " if known else ""
    return f"{on}by {command.title}"


def render_plan(plan: Plan, environ: Mapping[str, str], preloaded: Sequence[str] = ()) -> str:
    """Return the pasteable command, the workers as a table, and the changes to `environ`.

    preloaded:  the modules that --preload has imported before a fork
    """
    if plan.launch_command is not None:
        return _render_remote_plan(plan, plan.launch_command)
    common, own, later = _worker_variables(plan)
    changed = {name: value for name, value in plan.set_env.items() if environ.get(name) != value}
    method = f"one import of {_enumerate(('jax', *preloaded))}, then fork"
    if not plan.fork:
        method = f"a fresh interpreter each{_NOT_PRELOADED if plan.job.preload != PRELOAD_NONE else ''}"
    lines = [shlex.join((*plan.job.wrap, *plan.argv)), ""]
    lines += [f"{plan_summary(plan)}; {method}", *_notes(plan), ""]
    lines += format_columns([_COLUMNS, *(_row(plan, worker) for worker in plan.workers)])
    lines += ["", "variables that jaxrun sets in every worker:"]
    lines += [f"  {_assignment(name, value)}" for name, value in sorted((changed | common).items())]
    if own:
        lines += ["", "those that differ between ranks:"]
        lines += ["  " + " ".join(_assignment(*pair) for pair in sorted(table.items())) for table in own]
    lines += ["", f"variables whose values are known only at the start: {', '.join(later)}"]
    if plan.unset_env:
        lines += ["", f"variables that jaxrun removes: {', '.join(plan.unset_env)}"]
    return "\n".join(lines) + "\n"


def _render_remote_plan(plan: Plan, command: LaunchCommand) -> str:
    """Return the same for a job whose agents on other hosts start the workers and make each host's decisions."""
    later = ", ".join(name for name in AgentEnv.variable_names() if name not in (JOB_ID, TOKEN))
    lines = [shlex.join(command.argv), ""]
    lines += [f"{plan_summary(plan)}; each agent starts its worker: {shlex.join((*plan.job.wrap, *plan.argv))}"]
    if not plan.job.why_no_fork and plan.job.preload != PRELOAD_NONE:
        where = "once for all attempts" if plan.job.max_restarts else "on hosts where one agent starts several workers"
        lines += [f"--preload {plan.job.preload}: {where}, by forks"]
    lines += [*_notes(plan), ""]
    lines += format_columns([_COLUMNS, *(_row(plan, worker) for worker in plan.workers)])
    lines += ["", f"variables that jaxrun sets for {command.title}:"]
    values = {**plan.set_env, **command.set_env, JOB_ID: plan.job_id, TOKEN: "-"}
    lines += [f"  {_assignment(name, value)}" for name, value in sorted(values.items())]
    lines += ["", f"variables whose values are known only at the start: {later}"]
    if plan.job.torch_env:
        lines += ["", f"variables that each agent sets for its worker, as torchrun does: {', '.join(TORCH_VARIABLES)}"]
    if removed := (*plan.unset_env, *command.unset_env):
        lines += ["", f"variables that jaxrun removes: {', '.join(removed)}"]
    lines += [
        "",
        "devices, cores, threads and the coordinator's address are decided when all agents have reported.",
    ]
    return "\n".join(lines) + "\n"


def _notes(plan: Plan) -> list[str]:
    check = f"before each attempt each host runs --host-check: {plan.job.host_check}" if plan.job.host_check else ""
    excluded = describe_left_out(plan.placement.left_out, plan.job.quarantine)
    return [f"note: {note}" for note in (check, excluded, *plan.notes) if note]


def _worker_variables(plan: Plan) -> tuple[dict[str, str], list[dict[str, str]], list[str]]:
    """Return (variables that are the same in all workers, each worker's others, names without a value yet)."""
    tables: list[dict[str, str]] = []
    later = {COORDINATOR_ADDRESS, *((MASTER_ADDR, MASTER_PORT) if plan.job.torch_env else ())}
    for worker in plan.workers:
        values = plan.worker_env(worker, run_dir=_UNKNOWN_YET).to_env()
        later |= {name for name, value in values.items() if value in (_UNKNOWN_YET, "-1")}
        tables.append({name: value for name, value in values.items() if value and name not in later})
    common = {name: value for name, value in tables[0].items() if all(table.get(name) == value for table in tables)}
    own = [{name: value for name, value in table.items() if name not in common} for table in tables]
    return common, [table for table in own if table], sorted(later)


def _row(plan: Plan, worker: Worker) -> tuple[str, ...]:
    """Return the row of a worker; devices and cores are unknown until its agent has reported."""
    place = (str(worker.rank), worker.host, f"{worker.local_rank} of {worker.local_size}")
    if plan.launch_command is not None:
        return (*place, _UNKNOWN_YET, _UNKNOWN_YET)
    if worker.local_device_ids:
        devices = ", ".join(f"{plan.job.platform}:{ordinal}" for ordinal in worker.local_device_ids)
        names = dict.fromkeys(plan.device_names[ordinal] for ordinal in worker.local_device_ids)
        devices += f" ({', '.join(names)})"
    else:
        devices = f"{plan.job.platform} x {plan.local_devices or 'all'}"
    cores = format_ranges(worker.cpus, ",") or "all"
    return (*place, devices, cores)


def _assignment(name: str, value: str) -> str:
    shown = mask_secret(name, value)
    return f"{name}={shown if shown != value else shlex.quote(value)}"
