"""Reads which host of a job this is from the variables of the first engine that numbers hosts (--hosts auto).

On each host one command runs; engines that number processes are for rank_info.py. jaxrun's own variables (JAXRUN_HOSTS,
JAXRUN_HOST_RANK, JAXRUN_HEAD) override them, and add what a platform does not set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.protocol.names import HEAD, HOST_RANK, HOSTS, RANK
from jaxrun.spec.engines.engine import Engine
from jaxrun.spec.engines.host_variables import HEAD_PORT, HostVariables, Source
from jaxrun.spec.engines.lookup import all_engines, marked_engines
from jaxrun.spec.job.options import HOSTS_AUTO
from jaxrun.text import format_columns

COUNT, INDEX = HOSTS, HOST_RANK
_NUMBER = re.compile(r"[0-9]{1,9}")
_NAMED_COUNTS = (HOSTS_AUTO, "gpu", "cpu")  # words for numbers of processes, as torchrun accepts them: jaxrun decides


class HostInfo(Struct, frozen=True):
    """The place of this host in its job.

    index:      the number of this host, from 0
    count:      the number of hosts in the job
    head:       "host:port" where host 0 listens; empty if there is only one host
    processes:  the number of processes per host; None if jaxrun decides
    """

    index: int
    count: int
    head: str = ""
    processes: int | None = None


class Platform(Struct, frozen=True):
    """An engine that numbers hosts: its name for people, and its variables."""

    title: str
    variables: HostVariables


def platforms(engines: Iterable[Engine]) -> Iterator[Platform]:
    """Yield the engines that number hosts."""
    return (Platform(engine.title, engine.hosts) for engine in engines if engine.hosts is not None)


def find_host_info(environ: Mapping[str, str]) -> HostInfo:
    """Read the place of this host from the variables of the first platform that has set any.

    Raises UsageError if no platform has, or if variables are missing, contradict each other or make no sense.
    """
    if RANK in environ:
        raise UsageError(
            f"--hosts auto: this process is rank {environ[RANK]} of a jaxrun job already ({RANK} is set), and is not a "
            "host of another; leave out --hosts auto"
        )
    platform = find_platform(environ)
    if platform is None and not environ.get(INDEX):
        raise UsageError(_nothing_found())
    index, of_index = _read_number(platform, "index", INDEX, environ, "which host this is")
    title = f"this is host {index} by the variables of {platform.title}" if platform else f"{INDEX} is {index}"
    count, of_count = _read_number(platform, "count", COUNT, environ, f"{title}; how many hosts there are")
    if index >= count:
        names = " and ".join(dict.fromkeys((of_index, of_count)))
        raise UsageError(f"--hosts auto: {title}, but there are {count} hosts, numbered from 0; check {names}")
    if platform is not None and platform.variables.is_sure and INDEX not in environ:
        _refuse_contradiction(platform, environ, f"host {index} of {count} by {of_index} and {of_count}", index, count)
    head = _read_head(platform, environ, title) if count > 1 else ""
    return HostInfo(index, count, head, _read_processes(platform, environ))


def find_platform(environ: Mapping[str, str]) -> Platform | None:
    """Return the first platform of the table that has set one of its variables; None if there is none."""
    found = next((each for each in platforms(marked_engines(environ)) if each.variables.are_set(environ)), None)
    wrong = next((name for name in found.variables.excluded if name in environ), "") if found else ""
    if found and wrong:
        raise UsageError(
            f"--hosts auto: {wrong} is set, so {' and '.join(found.variables.index.names)} numbers a torchrun process "
            "here, not a host; start jaxrun where torchrun was started"
        )
    return found


def _refuse_contradiction(platform: Platform, environ: Mapping[str, str], shown: str, index: int, count: int) -> None:
    """Raise UsageError if the variables of another platform say that this is another host."""
    for other in platforms(marked_engines(environ)):
        of_index, of_count = other.variables.index, other.variables.count
        if not other.variables.is_sure or other == platform or of_count is None:
            continue
        theirs = of_index.read(environ, other.title), of_count.read(environ, other.title)
        if all(theirs) and theirs != (str(index), str(count)):
            names = " and ".join((*of_index.names, *of_count.names))
            raise UsageError(
                f"--hosts auto: this is {shown} ({platform.title}), but host {theirs[0]} of {theirs[1]} by {names} "
                f"({other.title}); unset the ones that are left over, or set {INDEX}, {COUNT} and {HEAD}"
            )


def _read(
    platform: Platform | None, attribute: str, own: str, environ: Mapping[str, str], what: str
) -> tuple[str, str]:
    """Return a value and the names of its variables. Raises UsageError that says where to set a missing `what`."""
    if environ.get(own, HOSTS_AUTO) not in ("", HOSTS_AUTO):
        return environ[own], own
    source: Source | None = getattr(platform.variables, attribute) if platform else None
    if platform and source and (value := source.read(environ, platform.title)):
        return value, " and ".join(source.names)
    lacking = [name for name in source.names if not environ.get(name)] if source else []
    unset = f" ({', '.join(lacking)} of {platform.title})" if platform and lacking else ""
    raise UsageError(f"--hosts auto: {what} is not set{unset}; set {own} on all hosts, as in {_EXAMPLES[own]}")


_EXAMPLES = {COUNT: f"{COUNT}=4", INDEX: f"{INDEX}=2", HEAD: f"{HEAD}=train-0.train:{HEAD_PORT}"}


def _read_number(
    platform: Platform | None, attribute: str, own: str, environ: Mapping[str, str], what: str
) -> tuple[int, str]:
    """Return a number and the names of its variables. Raises the errors of `_read`."""
    value, names = _read(platform, attribute, own, environ, what)
    if not _NUMBER.fullmatch(value):
        raise UsageError(f"--hosts auto: {names} must be a whole number, not {value!r}")
    return int(value), names


def _read_head(platform: Platform | None, environ: Mapping[str, str], title: str) -> str:
    value, names = _read(platform, "head", HEAD, environ, f"{title}; the address of host 0")
    if "$(" in value:
        raise UsageError(f"--hosts auto: {names}={value!r} names a variable that was not replaced; is that one set?")
    host, _, port = value.rpartition(":")
    if host and port.isdecimal() and (":" not in host or host.endswith("]")):
        return value
    source = platform.variables.port if platform and names != HEAD else None
    given = source.read(environ, platform.title) if platform and source else ""
    if source and given and not given.isdecimal():
        raise UsageError(f"--hosts auto: {source.names[0]} must be the number of a port, not {given!r}")
    return f"{f'[{value}]' if ':' in value and not value.startswith('[') else value}:{given or HEAD_PORT}"


def _read_processes(platform: Platform | None, environ: Mapping[str, str]) -> int | None:
    source = platform.variables.processes if platform else None
    value = source.read(environ, platform.title) if platform and source else ""
    if not source or value in ("", *_NAMED_COUNTS):
        return None
    if not _NUMBER.fullmatch(value) or not int(value):
        raise UsageError(f"--hosts auto: {source.names[0]} must be a number of processes, not {value!r}")
    return int(value)


def _nothing_found() -> str:
    rows = [(f"  {each.title}", ", ".join(each.variables.markers)) for each in platforms(all_engines())]
    return "\n".join(
        [
            "--hosts auto: nothing says which host this is; looked for the variables of",
            *format_columns(rows),
            f"Set {INDEX}, {COUNT} and {HEAD}, or say it: jaxrun --hosts 4 --host-rank 2 --head h1:{HEAD_PORT} PROGRAM",
        ]
    )
