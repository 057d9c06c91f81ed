"""Parses lists of hosts as mpirun and Slurm write them, and places ranks on hosts.

The rules are those of mpirun: a host that is named again gets more slots, a name alone counts for one slot where others
have a number, and ranks fill the hosts block by block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.errors import UsageError
from jaxrun.text import plural

if TYPE_CHECKING:
    from jaxrun.spec.job.job import Job

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_ADDRESS = r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?"
_HOST = re.compile(rf"(?:(?P<name>{_NAME})|\[(?P<address>{_ADDRESS})\])(?::(?P<slots>[0-9]{{1,6}}))?")
_SETTING = re.compile(r"(?P<key>slots|max[_-]slots)=(?P<value>[0-9]{1,6})")
_NODE = re.compile(r"(?:[A-Za-z0-9_.-]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([1-9][0-9]{0,5})\))?")
_MAX_NODES = 1 << 16  # Slurm's own limit; a longer list is a typing error
_MAX_HOSTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class HostSlots:
    """A host (an IPv6 address without brackets) and how many processes it can take; None where nothing was said."""

    name: str
    slots: int | None


def count_without_spares(job: Job, there: int) -> int:
    """How many of the hosts that are there the job runs on, beside its --spares. Raises UsageError if too few are."""
    wanted = job.hosts or there - job.spares
    if wanted < 1 or wanted + job.spares > there:
        jobs = f"-N {job.hosts} and " if job.hosts else ""
        raise UsageError(
            f"{jobs}--spares {job.spares} {'take' if jobs else 'leave'} "
            + (f"{wanted + job.spares} hosts" if jobs else "no host for the job")
            + f", but there {'is' if there == 1 else 'are'} {plural(there, 'host')}; name more, or give fewer spares"
        )
    return wanted


def parse_host_list(text: str) -> tuple[HostSlots, ...]:
    """Parse -H: "h1:4,h2:4", "h1,h2", "[fd00::1]:2". Raises UsageError that names the part that is wrong."""
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
        raise UsageError(f"--hostfile {path} is no text; expected lines such as 'h1 slots=4' or 'h1:4'") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, name: str) -> tuple[HostSlots, ...]:
    """Parse lines such as these. Raises UsageError that names the line of the file `name` that is wrong.

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
            raise ValueError(f"{text!r} names a user, which not every mpirun takes; name the user in ~/.ssh/config")
        if text.count(":") > 1 and "[" not in text:
            raise ValueError(f"{text!r} is ambiguous; write an IPv6 address in brackets, as in [fd00::1]:4")
        raise ValueError(f"{text!r} is not a host")
    return HostSlots(match["name"] or match["address"], _at_least_one(text, match["slots"]))


def _with_settings(host: HostSlots, words: Iterable[str]) -> HostSlots:
    """Apply Open MPI's `slots` and `max_slots` to `host`; as in Open MPI, the limit alone is also the number."""
    given: dict[str, int | None] = {} if host.slots is None else {"slots": host.slots}
    for word in words:
        match = _SETTING.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is neither slots=NUMBER nor max_slots=NUMBER")
        key = match["key"].replace("-", "_")
        if key in given:
            raise ValueError(f"{key} is given twice")
        given[key] = _at_least_one(word, match["value"])
    limit, slots = given.get("max_slots"), given.get("slots")
    if limit is not None and slots is not None and limit < slots:
        raise ValueError(f"max_slots={limit} is less than its {plural(slots, 'slot')}")
    return HostSlots(host.name, limit if slots is None else slots)


def _at_least_one(text: str, number: str | None) -> int | None:
    if number is not None and int(number) < 1:
        raise ValueError(f"{text!r} has no slot; leave the host out if you do not want to use it")
    return None if number is None else int(number)


def _merge_duplicates(found: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    """Return each host once, in the order of their first naming, with the sum of its slots."""
    hosts: dict[str, HostSlots] = {}
    for host in found:
        before = hosts.get(host.name)
        hosts[host.name] = HostSlots(host.name, (before.slots or 1) + (host.slots or 1)) if before else host
    return tuple(hosts.values())


def place_ranks(hosts: Sequence[HostSlots], processes: int | None, per_host: int | None) -> tuple[str, ...]:
    """Return the host of each rank. Raises UsageError if the processes do not fit.

    Ranks fill all slots of the first host, then those of the next; hosts that are left over stay idle. With `per_host`,
    of which `processes` is a multiple, each host that is used gets exactly so many. Where no host has a number, all
    have an equal share, and the first ones one more if that does not come out even. With `processes` None, every slot
    is used, or every host once.
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


def expand_node_list(text: str) -> tuple[str, ...]:
    """Expand Slurm's "rack[1-2]n[01-16],login1", the last bracket fastest. Raises UsageError if it is no list."""
    nodes: list[str] = []
    for name in re.split(r",(?![^\[\]]*\])", text):
        if not _NODE.fullmatch(name):
            raise UsageError(f"{text!r} is not a list of Slurm nodes such as rack[1-2]n[01-16],login1: see {name!r}")
        parts = [
            _numbers(part[1:-1], text) if part[0] == "[" else [part] for part in re.findall(r"\[.*?\]|[^\[]+", name)
        ]
        if len(nodes) + prod(map(len, parts)) > _MAX_NODES:
            raise UsageError(f"{text!r} names more than {_MAX_NODES} nodes")
        nodes += map("".join, product(*parts))
    return tuple(nodes)


def _numbers(ranges: str, text: str) -> list[str]:
    """Expand "1,07-11" to 1, 07, 08, 09, 10, 11: each number as wide as the first of its range."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(
                f"{text!r} is not a list of Slurm nodes: [{ranges}] needs numbers such as 1,3-5, see {part!r}"
            )
        span = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(numbers) + len(span) > _MAX_NODES:
            raise UsageError(f"{text!r} names more than {_MAX_NODES} nodes")
        numbers += [f"{number:0{len(match[1])}}" for number in span]
    return numbers


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand Slurm's "2(x3),1" to 2, 2, 2, 1. Raises UsageError if it is no list of counts."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise UsageError(f"{text!r} is not a list of counts by Slurm, such as 2(x3),1: see {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
