"""The values of `@pytest.mark.processes(...)`. The mark is parsed when tests are collected.

Every pytest session loads this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_MODES, LOCKSTEP_RECORD
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.text import plural

MARK_NAME = "processes"
MARK_USAGE = "processes(n, devices=1, hosts=1, timeout=300, fresh=False, env={}, dies=(), lockstep='record')"
PARAMETER = "process_count"  # the fixture that processes([2, 4]) parametrizes
_KNOWN = ("n", "devices", "hosts", "timeout", "fresh", "env", "dies", "lockstep")
_SPEC = pytest.StashKey["MarkSpec | str"]()
_NODEID = pytest.StashKey[str]()


class GangKey(HidesFields, frozen=True):
    """The required properties of a gang for a test; tests with equal keys share one."""

    hidden = frozenset({"env"})

    processes: int
    devices: int | None = None
    hosts: int | None = None
    env: tuple[tuple[str, str], ...] = ()
    lockstep: str = LOCKSTEP_RECORD

    def __str__(self) -> str:
        """`4 processes x 2 devices`."""
        text = plural(self.processes, "process")
        text += f" x {plural(self.devices, 'device')}" if self.devices is not None else ""
        text += f" on {plural(self.hosts, 'host')}" if self.hosts is not None else ""
        text += f", lockstep {self.lockstep}" if self.lockstep != LOCKSTEP_RECORD else ""
        return text + (" with variables of its own" if self.env else "")

    @property
    def label(self) -> str:
        """A short name, different for different keys: `4p-2d-1h`, followed by the variables."""
        parts = [f"{self.processes}p"]
        parts += [f"{self.devices}d"] if self.devices is not None else []
        parts += [f"{self.hosts}h"] if self.hosts is not None else []
        parts += [self.lockstep] if self.lockstep != LOCKSTEP_RECORD else []
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.env)])


class MarkSpec(Struct, frozen=True):
    """The parsed mark of one test.

    timeout:  seconds; None for the default
    fresh:    whether the test gets new processes
    dies:     the ranks that the test expects to die
    """

    gang: GangKey
    timeout: float | None = None
    fresh: bool = False
    dies: frozenset[int] = frozenset()


# ---- the mark of a collected test


def read_mark(item: pytest.Item) -> None:
    """Parse the test's mark, if it has one. An error in the mark is kept, and reported when the test is run."""
    mark = item.get_closest_marker(MARK_NAME)
    if mark is None:
        return
    item.stash[_NODEID] = item.nodeid  # pytest-xdist changes item.nodeid later
    try:
        counts = parse_counts(mark.args, mark.kwargs)
        if is_parametrized(mark.args, mark.kwargs):
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            if PARAMETER not in parameters:
                raise UsageError(f"@pytest.mark.processes({list(counts)}): this kind of test takes one number only")
            counts = (parameters[PARAMETER],)
        item.stash[_SPEC] = parse_mark(mark.args, mark.kwargs, counts[0])
    except UsageError as error:
        item.stash[_SPEC] = str(error)


def mark_spec(item: pytest.Item) -> MarkSpec | str | None:
    """The parsed mark of a test; a str that says what is wrong with the mark; None without a mark."""
    return item.stash.get(_SPEC, None)


def rank_nodeid(item: pytest.Item) -> str:
    """The test's node id in the sessions of the ranks."""
    return item.stash[_NODEID]


# ---- parsing


def parse_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of processes in the mark: one, or several that parametrize the test. Raises UsageError."""
    if len(args) > 1 or (args and "n" in kwargs):
        raise UsageError(
            f"@pytest.mark.processes takes one number of processes; name all other arguments: {MARK_USAGE}"
        )
    n = args[0] if args else kwargs.get("n")
    if n is None:
        raise UsageError("@pytest.mark.processes needs a number of processes: @pytest.mark.processes(4)")
    counts = tuple(n) if is_parametrized(args, kwargs) else (n,)
    if not counts or not all(map(_is_count, counts)):
        raise UsageError(
            f"@pytest.mark.processes({n!r}): processes are counted from 1: processes(4), processes([2, 4])"
        )
    return counts


def is_parametrized(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the mark names a list of numbers of processes."""
    return isinstance(args[0] if args else kwargs.get("n"), (list, tuple))


def parse_mark(args: Sequence[Any], kwargs: Mapping[str, Any], processes: int) -> MarkSpec:
    """The mark of a test that is run by `processes` processes. Raises UsageError."""
    unknown = sorted(kwargs.keys() - set(_KNOWN))
    if unknown:
        raise UsageError(f"@pytest.mark.processes does not know {', '.join(unknown)}; it takes {MARK_USAGE}")
    for name in ("devices", "hosts"):
        if kwargs.get(name) is not None and not _is_count(kwargs[name]):
            raise UsageError(f"@pytest.mark.processes({name}={kwargs[name]!r}): must be a whole number from 1")
    timeout = kwargs.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise UsageError(f"@pytest.mark.processes(timeout={timeout!r}): must be a number of seconds above 0")
    env = kwargs.get("env") or {}
    if not isinstance(env, Mapping) or not all(isinstance(part, str) for pair in env.items() for part in pair):
        raise UsageError(f"@pytest.mark.processes(env={env!r}): must map names of variables to strings")
    lockstep = kwargs.get("lockstep") or LOCKSTEP_RECORD
    if lockstep not in LOCKSTEP_MODES:
        raise UsageError(f"@pytest.mark.processes(lockstep={lockstep!r}): must be one of {', '.join(LOCKSTEP_MODES)}")
    gang = GangKey(processes, kwargs.get("devices"), kwargs.get("hosts"), tuple(sorted(env.items())), lockstep)
    return MarkSpec(gang, timeout, bool(kwargs.get("fresh", False)), _parse_dies(kwargs.get("dies", ()), processes))


def _parse_dies(given: Any, processes: int) -> frozenset[int]:
    ranks = given if isinstance(given, (list, tuple, set, frozenset)) else (given,)
    if not all(isinstance(rank, int) and 0 <= rank < processes for rank in ranks):
        raise UsageError(
            f"@pytest.mark.processes(dies={given!r}): must be a rank or several, of 0 to {processes - 1}: dies=1"
        )
    return frozenset(ranks)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
