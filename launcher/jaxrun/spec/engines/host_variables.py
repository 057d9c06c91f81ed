"""The variables of a platform that numbers the hosts of a job, and starts one process on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.protocol.names import HEAD, HOST_RANK, HOSTS

HEAD_PORT = 7777  # port of host 0 if the platform names no port


class Source(Struct, frozen=True):
    """Variables that yield one value: `make` gets their values in the order of `names`.

    A `*` in a name stands for any text; exactly one variable must match.
    """

    names: tuple[str, ...]
    make: Callable[..., str] = lambda value: str(value)

    def read(self, environ: Mapping[str, str], title: str) -> str:
        """Return the value; empty if a variable is not set. Raises UsageError if the value makes no sense."""
        names = [_find_name(name, environ, title) for name in self.names]
        if not all(environ.get(name) for name in names):
            return ""
        try:
            return self.make(*(environ[name] for name in names))
        except (ValueError, LookupError, TypeError, AttributeError):
            shown = ", ".join(f"{name}={environ[name]!r}" for name in names)
            raise UsageError(f"--hosts auto: {shown}, as {title} has set it, makes no sense here") from None


def source(*names: str, make: Callable[..., str] = lambda value: str(value)) -> Source:
    return Source(names, make)


class HostVariables(Struct, frozen=True, kw_only=True):
    """The variables that a platform sets on each host of a job.

    markers:   any of these shows that the platform has started this process
    index, count, head, port, processes:  the sources of these values (HostInfo); None if there is none
    excluded:  variables that show that the numbers do not mean hosts
    is_sure:   nobody else sets variables of these names, so that two such platforms must agree
    """

    markers: tuple[str, ...]
    index: Source
    count: Source | None = None
    head: Source | None = None
    port: Source | None = None
    processes: Source | None = None
    excluded: tuple[str, ...] = ()
    is_sure: bool = False

    def are_set(self, environ: Mapping[str, str]) -> bool:
        return any(name in environ for name in self.markers)


def _find_name(name: str, environ: Mapping[str, str], title: str) -> str:
    if "*" not in name:
        return name
    fitting = sorted(each for each in environ if fnmatchcase(each, name))
    if len(fitting) > 1:
        raise UsageError(
            f"--hosts auto: {title} has several groups of hosts ({', '.join(fitting)}), and does not number them "
            f"together; set {HOST_RANK}, {HOSTS} and {HEAD}"
        )
    return fitting[0] if fitting else name
