"""The limits of the operating system and of the scheduler: open files, processes, memory, cores."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrun.frontends.doctor.finding import Finding, failure, group_hosts, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.text import format_bytes, plural

_FEW_FILES, _TOO_FEW_FILES = 1024, 256  # a JAX process opens about a hundred, and one for each rank that it talks to
_FEW_PROCESSES = 1024  # a limit of the user, and threads count
_LITTLE_MEMORY = 2**30  # for each process
_UNLIMITED = -1
_LIMITS_FILE = "/etc/security/limits.conf"


def check_limits(seen: Observation) -> Iterator[Finding]:
    found = [finding for host, facts in seen.hosts.items() for finding in _check_host(host, facts)]
    found += _check_memory(seen)
    yield from found
    if seen.hosts and not found:
        limits = group_hosts({host: _describe(facts) for host, facts in seen.hosts.items()})
        yield ok("; ".join(text if len(limits) == 1 else f"{text} on {hosts}" for text, hosts in limits.items()))


def check_cores(seen: Observation) -> Iterator[Finding]:
    """Whether processes are bound to few of the cores that are there."""
    found = False
    for host, facts in seen.hosts.items():
        if facts.cores * len(seen.ranks_on(host)) < facts.all_cores and facts.cores <= 2:
            found = True
            cores = "one core" if facts.cores == 1 else f"{facts.cores} cores"
            text = f"{host}: each process may use {cores} of {facts.all_cores}, on which JAX computes and sends"
            yield warning(text, "jaxrun --cpus-per-process N with Slurm; no --bind-to core for mpirun")
    if seen.hosts and not found:
        texts = group_hosts({host: f"{facts.cores} of {facts.all_cores}" for host, facts in seen.hosts.items()})
        shown = "; ".join(text if len(texts) == 1 else f"{text} on {hosts}" for text, hosts in texts.items())
        yield ok(f"each process may use {shown} cores")


def _check_host(host: str, facts: HostFacts) -> Iterator[Finding]:
    files, processes, locked = (facts.limits.get(name, _UNLIMITED) for name in ("nofile", "nproc", "memlock"))
    if _UNLIMITED < files < _FEW_FILES:
        level = failure if files < _TOO_FEW_FILES else warning
        hard = facts.limits.get("nofile hard", _UNLIMITED)
        how = f"nofile in {_LIMITS_FILE} there (ulimit -Hn)"
        if hard == _UNLIMITED or hard > files:
            how = f"ulimit -n {hard if _UNLIMITED < hard < 65536 else 65536} there, before jaxrun; or {how}"
        yield level(f"{host}: a process may open {files} files", how)
    if _UNLIMITED < processes < _FEW_PROCESSES:
        text = f"{host}: the user may have {processes} processes and threads; each JAX process takes dozens"
        yield warning(text, f"nproc in {_LIMITS_FILE} there (ulimit -u)")
    if facts.rdma and locked != _UNLIMITED:
        text = f"{host}: a process may lock {format_bytes(locked)} of memory, and InfiniBand wants no limit"
        yield warning(text, f"memlock in {_LIMITS_FILE} there (ulimit -l), or in the unit of Slurm's daemon")


def _check_memory(seen: Observation) -> Iterator[Finding]:
    for host, facts in seen.hosts.items():
        ranks = len(seen.ranks_on(host))
        available, limit = facts.memory.get("available", 0), facts.memory.get("limit", _UNLIMITED)
        room = available if limit == _UNLIMITED else min(available, limit)
        if room < _LITTLE_MEMORY * ranks:
            of = f" (the limit of its cgroup is {format_bytes(limit)})" if limit == room else ""
            text = f"{host}: {format_bytes(room)} of memory for {plural(ranks, 'process')}{of}"
            yield warning(text, "sbatch --mem=0 or a larger container; fewer processes on each host")


def _describe(facts: HostFacts) -> str:
    limit = facts.memory.get("limit", _UNLIMITED)
    of_cgroup = "" if limit == _UNLIMITED else f" (its cgroup: {format_bytes(limit)})"
    files, processes = (_number(facts.limits.get(name, _UNLIMITED)) for name in ("nofile", "nproc"))
    memory = format_bytes(facts.memory.get("total", 0))
    return f"{files} open files, {processes} processes, {memory} of memory{of_cgroup}"


def _number(limit: int) -> str:
    return "any number of" if limit == _UNLIMITED else str(limit)
