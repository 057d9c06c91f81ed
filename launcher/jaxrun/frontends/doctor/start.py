"""Whether the job has started, and with what; what Slurm has given it."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrun.frontends.doctor.finding import Finding, failure, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.text import format_seconds, plural

_MAX_LINES = 12
_CAN_REACH = "there: jaxrun attach --check HOST:PORT, with the address of the head"


def check_start(seen: Observation) -> Iterator[Finding]:
    """The job's own verdict."""
    verdict = seen.verdict
    if verdict is not None and verdict.outcome == "ok":
        by = f", started by {seen.started_by}" if seen.started_by else ""
        joined = f" in {format_seconds(verdict.startup)}" if verdict.startup is not None else ""
        yield ok(f"{plural(len(verdict.hosts), 'process')} joined{joined}{by}")
        return
    for host, reason in seen.unreachable.items():
        yield failure(
            f"{host} cannot be reached from here: {reason}", f"getent hosts {host}; ssh {host} true; is it on?"
        )
    silent = [host for host in seen.silent_hosts if host not in seen.unreachable]
    if seen.facts and silent:
        yield failure(f"nothing has been heard from {', '.join(silent)}", _CAN_REACH)
    if verdict is None:
        yield failure(_clip(seen.output) or "the job has left no verdict", "jaxrun with the same options shows more")
        return
    yield failure(_clip(verdict.headline), verdict.advice or _last_line(verdict.traceback))


def check_slurm(seen: Observation) -> Iterator[Finding]:
    """The allocation, and what of it the job uses."""
    allocation = seen.allocation
    if allocation is None:
        return
    idle = [node for node in allocation.nodes if seen.facts and node not in seen.hosts]
    least, most = min(allocation.cpus), max(allocation.cpus)
    cpus = plural(least, "CPU") if least == most else f"{least} to {most} CPUs"
    gpus = f", {allocation.gpus} GPUs" if allocation.gpus else ""
    text = f"Slurm job {allocation.job_id}: {plural(len(allocation.nodes), 'node')}, {cpus} each{gpus}"
    if idle and seen.verdict is not None and seen.verdict.outcome == "ok":
        advice = f"jaxrun --backend slurm -N {len(allocation.nodes)}"
        yield warning(f"{text}; {', '.join(idle)} would stay idle", advice)
    else:
        yield ok(text)


def _clip(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:_MAX_LINES])


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]
