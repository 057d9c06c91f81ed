"""Parses lists of hosts in mpirun's syntax, and places ranks on hosts.

The rules are mpirun's: a host that is named again gets more slots, a host without a number counts for one slot if
others have numbers, and ranks fill the hosts block by block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.spec.backends.remote_plan import count_without_spares
from jaxrun.spec.backends.slurm_allocation import Allocation, spread_tasks
from jaxrun.text import UNKNOWN_HOST, plural

if TYPE_CHECKING:
    from jaxrun.spec.job.job import Job

_ADDRESS = r"\[(?P<address>[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]"  # of IPv6
_HOST = re.compile(rf"(?:(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)|{_ADDRESS})(?::(?P<slots>[0-9]{{1,6}}))?")
_SETTING = re.compile(r"(?P<key>slots|max[_-]slots)=(?P<value>[0-9]{1,6})")
_MAX_HOSTS_SHOWN = 8


class HostSlots(Struct, frozen=True):
    """A host and its number of slots, which is None if none was given."""

    name: str
    slots: int | None


def parse_host_list(text: str) -> tuple[HostSlots, ...]:
    """Parse -H: "h1:4,h2:4", "h1,h2". Raises UsageError that names the part that is wrong."""
    try:
        return _merge_duplicates([_parse_host(part.strip()) for part in text.split(",")])
    except ValueError as reason:
        raise UsageError(f"--host {text!r}: {reason}; expected hosts such as h1:4,h2:4 or h1,h2") from None


def read_hostfile(path: Path) -> tuple[HostSlots, ...]:
    """Read the hosts of a hostfile. Raises UsageError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"--hostfile {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--hostfile {path} is not text; expected lines such as 'h1 slots=4' or 'h1:4'") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str) -> tuple[HostSlots, ...]:
    """Parse lines such as the following. Raises UsageError that names the wrong line of the file `name`.

    # Open MPI's spelling, Hydra's (also Intel MPI's machinefile), and a name alone
    h1 slots=4 max_slots=8
    h2:4
    h3
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        try:
            found.append(_with_settings(_parse_host(words[0]), words[1:]))
        except ValueError as reason:
            expected = "expected 'h1 slots=4', 'h1:4' or 'h1'"
            raise UsageError(f"{name}:{number}: {reason}; {expected}, not {line.strip()!r}") from None
    if not found:
        raise UsageError(f"{name} names no host; expected lines such as 'h1 slots=4', 'h1:4' or 'h1'")
    return _merge_duplicates(found)


def _parse_host(text: str) -> HostSlots:
    """Parse one host as -H and Hydra write it. Raises ValueError that says what is wrong."""
    match = _HOST.fullmatch(text)
    if match is None:
        if "@" in text:
            raise ValueError(f"{text!r} names a user, which not every mpirun accepts; name the user in ~/.ssh/config")
        if text.count(":") > 1 and "[" not in text:
            raise ValueError(f"{text!r} is not a host; an IPv6 address needs brackets, [fd00::2]:4")
        raise ValueError(f"{text!r} is not a host")
    return HostSlots(match["name"] or match["address"], _at_least_one(text, match["slots"]))


def _with_settings(host: HostSlots, words: Iterable[str]) -> HostSlots:
    """Apply Open MPI's `slots` and `max_slots` to `host`; as in Open MPI, max_slots alone also sets the slots."""
    given: dict[str, int | None] = {}
    for word in words:
        match = _SETTING.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is neither slots=NUMBER nor max_slots=NUMBER")
        given[match["key"].replace("-", "_")] = _at_least_one(word, match["value"])
    return HostSlots(host.name, host.slots or given.get("slots") or given.get("max_slots"))


def _at_least_one(text: str, number: str | None) -> int | None:
    if number is not None and int(number) < 1:
        raise ValueError(f"{text!r} has no slot; leave the host out if you do not want to use it")
    return None if number is None else int(number)


def _merge_duplicates(found: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    """Return each host once, in order of first appearance, with the sum of its slots."""
    hosts: dict[str, HostSlots] = {}
    for host in found:
        before = hosts.get(host.name)
        hosts[host.name] = HostSlots(host.name, (before.slots or 1) + (host.slots or 1)) if before else host
    return tuple(hosts.values())


def place_ranks(hosts: Sequence[HostSlots], processes: int | None, per_host: int | None) -> tuple[str, ...]:
    """Return the host of each rank. Raises UsageError if the processes do not fit.

    Ranks fill all slots of the first host, then of the next; remaining hosts stay idle. With `per_host`, of which
    `processes` is a multiple, each host that is used gets exactly that many. If no host has a number of slots, all get
    an equal share, and the first ones one more if there is a remainder. If `processes` is None, every slot is used, or
    every host once.
    """
    if not hosts:
        raise UsageError("there is no host to start processes on; name hosts with -H or --hostfile")
    if per_host is not None:
        room = [_check_slots(host, per_host) for host in hosts]
    elif processes is not None and all(host.slots is None for host in hosts):
        share, more = divmod(processes, len(hosts))
        room = [share + (index < more) for index in range(len(hosts))]
    else:
        room = [host.slots or 1 for host in hosts]
    slots = [host.name for host, count in zip(hosts, room, strict=True) for _ in range(count)]
    if processes is not None and processes > len(slots):
        raise UsageError(_too_many(hosts, room, processes, per_host))
    return tuple(slots[:processes])


def _check_slots(host: HostSlots, per_host: int) -> int:
    if host.slots is not None and host.slots < per_host:
        remedy = f"lower it to {host.slots}, or give {host.name} more slots"
        raise UsageError(f"--processes-per-host {per_host}, but {host.name} has {plural(host.slots, 'slot')}; {remedy}")
    return per_host


def _too_many(hosts: Sequence[HostSlots], room: Sequence[int], processes: int, per_host: int | None) -> str:
    there = f"{plural(len(hosts), 'host')} {'has' if len(hosts) == 1 else 'have'} room for {sum(room)}"
    if per_host is not None:
        return f"-n {processes}, but {there} with --processes-per-host {per_host}; lower -n, or name more hosts"
    listed = [f"{host.name}:{count}" for host, count in zip(hosts[:_MAX_HOSTS_SHOWN], room, strict=False)]
    names = ", ".join(listed + ["..."] * (len(hosts) > _MAX_HOSTS_SHOWN))
    more = f"{hosts[0].name}:{room[0] + processes - sum(room)}"
    return f"-n {processes}, but {there} ({names}); lower -n, name more hosts, or give them more slots, such as {more}"


# ---- under mpirun: hosts from -H or --hostfile, from Slurm's allocation, or known to mpirun alone


def named_hosts(job: Job) -> tuple[HostSlots, ...]:
    """Return the hosts of -H or --hostfile."""
    return read_hostfile(job.hostfile) if job.hostfile else parse_host_list(job.host_list) if job.host_list else ()


def place_on_hosts(job: Job, named: Sequence[HostSlots], allocation: Allocation | None) -> tuple[str, ...]:
    """Return each rank's host, UNKNOWN_HOST if only mpirun knows it. Raises UsageError if the numbers do not fit."""
    hosts = named or (_allocated_hosts(job, allocation) if allocation else ())
    if not hosts:
        return (UNKNOWN_HOST,) * _process_count(job)
    if job.spares:
        job = replace(job, hosts=count_without_spares(job, len(hosts)))
    if job.hosts is None:
        return place_ranks(hosts, job.processes, job.processes_per_host)
    if job.hosts > len(hosts):
        there = f"there {'is' if len(hosts) == 1 else 'are'} {plural(len(hosts), 'host')}"
        raise UsageError(f"-N {job.hosts}, but {there}; lower -N, or name more hosts")
    return _place_on_each(job, hosts[: job.hosts])


def spare_hosts(job: Job, named: Sequence[HostSlots], allocation: Allocation | None) -> tuple[str, ...]:
    """Return the hosts beyond the job's own, which wait to replace one of them."""
    if not job.spares:
        return ()
    names = [host.name for host in named] or list(allocation.nodes if allocation else ())
    used = count_without_spares(job, len(names)) if names else 0
    return tuple(names[used : used + job.spares])


def _allocated_hosts(job: Job, allocation: Allocation) -> tuple[HostSlots, ...]:
    """Return the allocation's nodes, with a slot for each task that srun would put there, unless all are alike."""
    alike = job.processes_per_host or (job.hosts and job.processes)
    processes = None if alike else job.processes or allocation.tasks
    if processes is None:
        return tuple(HostSlots(node, None) for node in allocation.nodes)
    counts = spread_tasks(processes, [cpus // (allocation.cpus_per_task or 1) for cpus in allocation.cpus])
    return tuple(HostSlots(node, count) for node, count in zip(allocation.nodes, counts, strict=True) if count)


def _place_on_each(job: Job, hosts: Sequence[HostSlots]) -> tuple[str, ...]:
    """Place at least one rank on each host of -N."""
    processes, each = job.processes, job.processes_per_host
    if processes is None or each is not None:
        return place_ranks(hosts, processes, each)
    place_ranks(hosts, processes, None)  # raises if there are more processes than slots
    unlimited = all(host.slots is None for host in hosts)
    counts = spread_tasks(processes, [processes if unlimited else host.slots or 1 for host in hosts])
    return tuple(host.name for host, count in zip(hosts, counts, strict=True) for _ in range(count))


def _process_count(job: Job) -> int:
    """Return the number of processes if only mpirun knows the hosts. Raises UsageError if it is not given."""
    if job.hosts is not None:
        raise UsageError(f"-N {job.hosts} needs the names of the hosts; give them with -H or --hostfile")
    if job.processes is None:
        raise UsageError(
            "--backend mpirun cannot tell how many processes you want: give the number with -n, or the hosts with "
            "-H h1:4,h2:4 or --hostfile FILE"
        )
    return job.processes
