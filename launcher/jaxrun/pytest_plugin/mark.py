"""What `@pytest.mark.processes(…)` asks for, as values; the mark is checked when tests are collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_MODES, LOCKSTEP_RECORD

MARK_NAME = "processes"
MARK_USAGE = "processes(n, devices=1, hosts=1, timeout=300, fresh=False, env={}, dies=(), lockstep='record')"
_KNOWN = ("n", "devices", "hosts", "timeout", "fresh", "env", "dies", "lockstep")


@dataclass(frozen=True, slots=True)
class GangKey:
    """What makes two tests use the same gang."""

    processes: int
    devices: int | None = None
    hosts: int | None = None
    env: tuple[tuple[str, str], ...] = ()
    lockstep: str = LOCKSTEP_RECORD

    def __str__(self) -> str:
        """`4 processes x 2 devices`."""
        text = "1 process" if self.processes == 1 else f"{self.processes} processes"
        if self.devices is not None:
            text += " x 1 device" if self.devices == 1 else f" x {self.devices} devices"
        if self.hosts is not None:
            text += " on 1 host" if self.hosts == 1 else f" on {self.hosts} hosts"
        text += f", lockstep {self.lockstep}" if self.lockstep != LOCKSTEP_RECORD else ""
        return text + (" with variables of its own" if self.env else "")

    @property
    def label(self) -> str:
        """A name that is the same for equal shapes only: `4p-2d-1h`, and its variables."""
        parts = [f"{self.processes}p"]
        parts += [f"{self.devices}d"] if self.devices is not None else []
        parts += [f"{self.hosts}h"] if self.hosts is not None else []
        parts += [self.lockstep] if self.lockstep != LOCKSTEP_RECORD else []
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.env)])


@dataclass(frozen=True, slots=True)
class MarkSpec:
    """What one test asks for.

    timeout:  seconds; None: the default
    fresh:    it gets a gang of its own
    dies:     the ranks whose death belongs to the test
    """

    gang: GangKey
    timeout: float | None = None
    fresh: bool = False
    dies: frozenset[int] = frozenset()


def parse_counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of processes that the mark names: one, or several that parametrize the test. UsageError."""
    if len(args) > 1 or (args and "n" in kwargs):
        raise UsageError(f"@pytest.mark.processes takes one number of processes; the rest goes by name: {MARK_USAGE}")
    n = args[0] if args else kwargs.get("n")
    if n is None:
        raise UsageError("@pytest.mark.processes needs a number of processes: @pytest.mark.processes(4)")
    several = isinstance(n, (list, tuple))
    found = tuple(n) if several else (n,)
    if not found or not all(_is_count(one) for one in found):
        raise UsageError(
            f"@pytest.mark.processes({n!r}): processes are counted from 1: processes(4), processes([2, 4])"
        )
    return found


def is_parametrized(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the mark parametrizes the test."""
    return isinstance(args[0] if args else kwargs.get("n"), (list, tuple))


def parse_mark(args: Sequence[Any], kwargs: Mapping[str, Any], processes: int) -> MarkSpec:
    """What the mark asks for with so many processes. UsageError."""
    unknown = sorted(kwargs.keys() - set(_KNOWN))
    if unknown:
        raise UsageError(f"@pytest.mark.processes does not know {', '.join(unknown)}; it takes {MARK_USAGE}")
    for name in ("devices", "hosts"):
        if kwargs.get(name) is not None and not _is_count(kwargs[name]):
            raise UsageError(f"@pytest.mark.processes({name}={kwargs[name]!r}): must be a whole number from 1")
    timeout = kwargs.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0):
        raise UsageError(f"@pytest.mark.processes(timeout={timeout!r}): must be a number of seconds above 0")
    env = kwargs.get("env") or {}
    if not isinstance(env, Mapping) or not all(isinstance(part, str) for pair in env.items() for part in pair):
        raise UsageError(f"@pytest.mark.processes(env={env!r}): must map names of variables to strings")
    lockstep = kwargs.get("lockstep") or LOCKSTEP_RECORD
    if lockstep not in LOCKSTEP_MODES:
        raise UsageError(f"@pytest.mark.processes(lockstep={lockstep!r}): must be one of {', '.join(LOCKSTEP_MODES)}")
    shape = GangKey(processes, kwargs.get("devices"), kwargs.get("hosts"), tuple(sorted(env.items())), lockstep)
    return MarkSpec(shape, timeout, bool(kwargs.get("fresh", False)), _dies(kwargs.get("dies", ()), processes))


def _dies(given: Any, processes: int) -> frozenset[int]:
    ranks = given if isinstance(given, (list, tuple, set, frozenset)) else (given,)
    if not all(isinstance(rank, int) and 0 <= rank < processes for rank in ranks):
        raise UsageError(
            f"@pytest.mark.processes(dies={given!r}): must be a rank or several, of 0 to {processes - 1}: dies=1"
        )
    return frozenset(ranks)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
