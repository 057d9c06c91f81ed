"""Checks whether the job has started, what Slurm has allocated, and whether all hosts have compatible versions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxrun.analysis.diagnosis.findings import Finding, failure, group_hosts, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.text import format_seconds, plural

_MAX_LINES = 12
_MISSING = "missing"
_FIXED_FAULT_HANDLERS = {12: 8, 13: 1}  # by Python 3's minor version, the micro version with the fix; 3.11 has none
_CAN_REACH = "there: jaxrun attach --check HOST:PORT, with the address of the head"


def check_start(seen: Observation) -> Iterator[Finding]:
    """Report the job's own verdict."""
    verdict = seen.verdict
    if verdict is not None and verdict.is_ok:
        by = f", started by {seen.started_by}" if seen.started_by else ""
        joined = f" in {format_seconds(verdict.startup)}" if verdict.startup is not None else ""
        yield ok(f"{plural(len(verdict.hosts), 'process')} joined{joined}{by}")
        return
    for host, reason in seen.unreachable.items():
        yield failure(
            f"{host} cannot be reached from here: {reason}", f"getent hosts {host}; ssh {host} true; is it on?"
        )
    explained = {*seen.unreachable, *_named_hosts(verdict.headline if verdict is not None else "")}
    silent = [host for host in seen.silent_hosts if host not in explained]
    if seen.facts and silent:
        yield failure(f"nothing has started on {', '.join(silent)}", _CAN_REACH)
    if verdict is None:
        yield failure(_clip(seen.output) or "the job has left no verdict", "jaxrun with the same options shows more")
        return
    yield failure(_clip(verdict.headline), verdict.advice or _last_line(verdict.traceback))


def _named_hosts(headline: str) -> Iterator[str]:
    """The hosts whose failures a verdict lists in lines of their own, as `h1, h2: Connection refused`."""
    for line in headline.splitlines():
        names, separator, _ = line.partition(": ")
        if separator and not line.startswith(" "):
            yield from names.split(", ")


def check_slurm(seen: Observation) -> Iterator[Finding]:
    """Report the allocation, and the part of it that the job uses."""
    allocation = seen.allocation
    if allocation is None:
        return
    idle = [node for node in allocation.nodes if seen.facts and node not in seen.hosts]
    least, most = min(allocation.cpus), max(allocation.cpus)
    cpus = plural(least, "CPU") if least == most else f"{least} to {most} CPUs"
    gpus = f", {allocation.gpus} GPUs" if allocation.gpus else ""
    text = f"Slurm job {allocation.job_id}: {plural(len(allocation.nodes), 'node')}, {cpus} each{gpus}"
    if idle and seen.verdict is not None and seen.verdict.is_ok:
        advice = f"jaxrun --backend slurm -N {len(allocation.nodes)}"
        yield warning(f"{text}; {', '.join(idle)} would stay idle", advice)
    else:
        yield ok(text)


def check_versions(seen: Observation) -> Iterator[Finding]:
    """Check whether all hosts have the same versions, and whether these are compatible."""
    hosts = seen.hosts
    if not hosts:
        return
    names = dict.fromkeys(name for facts in hosts.values() for name in facts.versions)
    same = []
    for name in names:
        groups = group_hosts({host: facts.versions.get(name, _MISSING) for host, facts in hosts.items()})
        usual = next(iter(groups))
        if len(groups) > 1:
            found = "; ".join(f"{version} on {where}" for version, where in groups.items())
            yield failure(f"{name} differs: {found}", _install(name, usual))
        elif usual == _MISSING:
            yield failure(f"{name} is not installed", _install(name, ""))
        else:
            same.append(f"{name} {usual}")
    yield from _check_plugins(seen)
    if same:
        yield ok(f"{', '.join(same)}{' on all hosts' if len(hosts) > 1 else ''}")
    yield from _check_fault_handlers(seen)


def _check_fault_handlers(seen: Observation) -> Iterator[Finding]:
    """Check for Pythons whose fault handler can crash a rank whose stacks it writes (gh-123967)."""
    hosts = seen.hosts
    groups = group_hosts({host: facts.versions.get("Python", _MISSING) for host, facts in hosts.items()})
    for version, where in groups.items():
        fixed = fixed_fault_handler(version)
        if fixed:
            at = f" on {where}" if len(hosts) > 1 else ""
            yield warning(
                f"Python {version}{at}: its fault handler, which writes the stacks of a rank whose C code holds the "
                "GIL, can crash that rank (gh-123967)",
                f"use Python {fixed} or later",
            )


def fixed_fault_handler(version: str) -> str:
    """Return the first Python that does not have the crash of gh-123967; empty if `version` does not have it."""
    found = re.match(r"3\.([0-9]+)\.([0-9]+)", version)
    if found is None:
        return ""
    minor, micro = int(found[1]), int(found[2])
    if minor < min(_FIXED_FAULT_HANDLERS):
        return "3.12.8"
    first = _FIXED_FAULT_HANDLERS.get(minor, 0)
    return f"3.{minor}.{first}" if micro < first else ""


def _check_plugins(seen: Observation) -> Iterator[Finding]:
    """Check the plugins' versions: JAX ignores a plugin whose version is not jaxlib's."""
    for host, facts in seen.hosts.items():
        jaxlib = facts.versions.get("jaxlib", "")
        for name, version in facts.versions.items():
            if name.endswith("-plugin") and not _goes_with(version, jaxlib):
                yield warning(f"{host}: {name} {version} does not fit jaxlib {jaxlib}", _install(name, jaxlib))


def _goes_with(plugin: str, jaxlib: str) -> bool:
    return plugin.split(".")[:3] == jaxlib.split(".")[:3]


def _install(name: str, version: str) -> str:
    if name == "Python":
        return f"start jaxrun with a Python {version} that all hosts have at the same path"
    wanted = f"{name}=={version}" if version not in ("", _MISSING) else name
    return f"pip install {wanted} there, or share one environment"


def _clip(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:_MAX_LINES])


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]
