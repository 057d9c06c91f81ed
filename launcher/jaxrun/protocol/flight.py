"""The content of a rank's flight recorder, as values and as the text in which an agent sends it to the head.

Times are seconds since the epoch. A group is the text of the ranks that take part, "0-3"; its calls count from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import EVERY_CALL, NOTHING
from jaxrun.text import parse_ranks


# A tuple, not a dataclass: a head may read a hundred thousand of them at once.
class DispatchedCall(NamedTuple):
    """A dispatched call; equal chains at equal numbers of a group mean an equal history.

    `entered` is 0.0 if unknown, for example in what an agent has sent: there the timings have it.
    """

    time: float
    group: str
    number: int
    chain: int
    program: int
    site: int
    entered: float = 0.0


class CallTiming(NamedTuple):
    """When a rank entered a call, and when the call had been dispatched: until then the rank could do nothing else."""

    group: str
    number: int
    entered: float
    dispatched: float
    site: int


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that was entered and not dispatched yet."""

    group: str
    number: int
    program: int
    site: int
    since: float


AnyCall = DispatchedCall | PendingCall


class JointWait(NamedTuple):
    """A wait in a joint function of jaxrun, until all ranks have made the call of this number."""

    function: str
    number: int
    since: float
    site: int


class ProgramInfo(NamedTuple):
    """The compared properties of a program: `key` and `code` as in flight_file.py, empty if unknown."""

    name: str
    key: str
    code: str
    source: str = ""


class CompilationStage(NamedTuple):
    """A finished stage of a compilation; `stage` is one of flight_file.STAGES."""

    stage: str
    name: str
    since: float
    until: float


UNKNOWN_PROGRAM = ProgramInfo("", "", "")
_US_PER_S = 1e6
Arrays = tuple[tuple[str, str, str], ...]  # name, "float32[32,128]" and sharding of each


@dataclass(frozen=True, slots=True)
class ProgramDetails:
    """Further properties of a program that the recorder has, under these names; empty if it does not have them.

    text:  the lowered program, packed
    """

    source: str = ""
    arguments: Arrays = ()
    results: Arrays = ()
    mesh: str = ""
    text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Flight:
    """The calls of one rank, oldest first.

    compiling:         name and start time of the current compilation
    compiling_ranks:   as a group, the ranks whose devices the program being compiled uses; empty if only its own, or if
                       unknown
    compiled_for:      the call that this compilation is for, and that will be entered after it; None if there is none,
                       or if this is uncertain
    timings:           of its last calls, more than are in `calls`
    entered:           when it entered the call that it seems to be in; 0.0 if it is in none, or if unknown
    standing:          the site at which its main thread was inside JAX's C++ dispatch when its stacks were last
                       written, and when that was; None if it was not
    marks:             for each group, chains by number at some earlier calls
    call_counts:       the number of calls made so far in each group
    sites:             "file.py:88 train_step", innermost first
    unknown_programs:  how many of all its programs lack a key or a code
    trouble:           why less is recorded than possible
    joint_calls:       the number of calls of each joint function of jaxrun that it has called
    joint_wait:        its wait for other ranks in one of these
    """

    level: int = NOTHING
    strict: bool = False
    compiling: tuple[str, float] | None = None
    compiling_ranks: str = ""
    compiled_for: PendingCall | None = None
    pending: PendingCall | None = None
    calls: tuple[DispatchedCall, ...] = ()
    timings: tuple[CallTiming, ...] = ()
    entered: float = 0.0
    standing: tuple[int, float] | None = None
    marks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    call_counts: Mapping[str, int] = field(default_factory=dict)
    programs: Mapping[int, ProgramInfo] = field(default_factory=dict)
    sites: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    unknown_programs: int = 0
    trouble: str = ""
    joint_calls: Mapping[str, int] = field(default_factory=dict)
    joint_wait: JointWait | None = None

    @property
    def complete(self) -> bool:
        """Whether every call is recorded: only then do numbers and chains of two ranks compare."""
        return self.level == EVERY_CALL

    @property
    def last_call(self) -> DispatchedCall | None:
        return self.calls[-1] if self.calls else None

    @property
    def known_calls(self) -> tuple[AnyCall, ...]:
        """All known calls, and last the one that was entered."""
        return (*self.calls, self.pending) if self.pending else self.calls

    @property
    def places(self) -> frozenset[str]:
        """The lines of the program with the known calls, `train.py:88 train_step`."""
        return frozenset(strip_directory(stack[0]) for stack in self.sites.values() if stack)

    @property
    def coming_calls(self) -> tuple[AnyCall, ...]:
        """All known calls, and last the one that was entered or for which a program is being compiled."""
        return (*self.known_calls, self.compiled_for) if self.compiled_for else self.known_calls

    def calls_of(self, group: str) -> tuple[DispatchedCall, ...]:
        return tuple(call for call in self.calls if call.group == group)

    def last_number(self, group: str) -> int:
        """Return the number of the group's last call that was made or entered; 0 if there is none."""
        pending = self.pending
        return pending.number if pending and pending.group == group else self.call_counts.get(group, 0)

    def program(self, call: AnyCall) -> ProgramInfo:
        return self.programs.get(call.program, UNKNOWN_PROGRAM)

    def place(self, call: AnyCall | JointWait) -> str:
        """Return the line of the user's program that made the call, `train.py:88 train_step`; empty if unknown."""
        stack = self.sites.get(call.site, ())
        return strip_directory(stack[0]) if stack else ""

    def to_content(self) -> dict[str, Any]:
        """Return the content for a message: lists, numbers and texts, as few as possible."""
        numbered = {group: place for place, group in enumerate(self.call_counts)}
        content = {
            "level": self.level,
            "strict": int(self.strict),
            "compiling": self.compiling,
            "compiling_ranks": self.compiling_ranks,
            "compiled_for": self.compiled_for and astuple(self.compiled_for),
            "pending": self.pending and astuple(self.pending),
            "groups": list(self.call_counts.items()),
            "calls": [(call[0], numbered[call[1]], *call[2:6]) for call in self.calls],
            "timings": _pack_timings(self.timings, numbered),
            "entered": self.entered,
            "standing": self.standing,
            "marks": [(numbered[group], list(marks.items())) for group, marks in self.marks.items()],
            "programs": list(self.programs.items()),
            "sites": list(self.sites.items()),
            "unknown": self.unknown_programs,
            "trouble": self.trouble,
            "joint": list(self.joint_calls.items()),
            "joint_wait": self.joint_wait,
        }
        return {name: value for name, value in content.items() if value}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Flight:
        """Build a flight from the result of `to_content`, also after JSON; {} means that there is no recorder.

        Raises ValueError if `content` is anything else.
        """
        try:
            return _from_content(content)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"no flight: {error!r}") from None


def _from_content(content: Mapping[str, Any]) -> Flight:
    groups = {str(group): int(count) for group, count in content.get("groups", ())}
    names = list(groups)
    pending, compiled_for = content.get("pending"), content.get("compiled_for")
    compiling = content.get("compiling")
    joint_wait = content.get("joint_wait")
    standing = content.get("standing")
    return Flight(
        level=int(content.get("level", NOTHING)),
        strict=bool(content.get("strict", False)),
        compiling=(str(compiling[0]), float(compiling[1])) if compiling else None,
        compiling_ranks=str(content.get("compiling_ranks", "")),
        compiled_for=_pending(*compiled_for) if compiled_for else None,
        pending=_pending(*pending) if pending else None,
        calls=_calls(content.get("calls", ()), names),
        timings=_unpack_timings(content.get("timings", ()), names),
        entered=float(content.get("entered", 0.0)),
        standing=(int(standing[0]), float(standing[1])) if standing else None,
        marks={names[group]: {int(n): int(chain) for n, chain in marks} for group, marks in content.get("marks", ())},
        call_counts=groups,
        programs={int(number): ProgramInfo(*map(str, program)) for number, program in content.get("programs", ())},
        sites={int(number): tuple(map(str, stack)) for number, stack in content.get("sites", ())},
        unknown_programs=int(content.get("unknown", 0)),
        trouble=str(content.get("trouble", "")),
        joint_calls={str(function): int(count) for function, count in content.get("joint", ())},
        joint_wait=_joint_wait(*joint_wait) if joint_wait else None,
    )


def _calls(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> tuple[DispatchedCall, ...]:
    if not set(map(type, chain.from_iterable(rows))) <= {int, float}:  # in one check: there may be a hundred thousand
        raise TypeError("a call is written in numbers")
    return tuple([DispatchedCall(t, names[g], n, c, p, site) for t, g, n, c, p, site in rows])


def _pending(group: str, number: int, program: int, site: int, since: float) -> PendingCall:
    return PendingCall(str(group), int(number), int(program), int(site), float(since))


def _joint_wait(function: str, number: int, since: float, site: int) -> JointWait:
    return JointWait(str(function), int(number), float(since), int(site))


def _pack_timings(timings: Iterable[CallTiming], numbered: Mapping[str, int]) -> list[int]:
    """Return five whole numbers for each call: all except group and site are differences, in microseconds."""
    packed: list[int] = []
    last_number = last_entered = 0
    for timing in timings:
        number, entered = timing.number, round(timing.entered * _US_PER_S)
        duration = round(timing.dispatched * _US_PER_S) - entered
        packed += (numbered[timing.group], number - last_number, entered - last_entered, duration, timing.site)
        last_number, last_entered = number, entered
    return packed


def _unpack_timings(packed: Sequence[int], names: Sequence[str]) -> tuple[CallTiming, ...]:
    timings = []
    number = entered = 0
    for group, more_calls, later, duration, site in zip(*[iter(packed)] * 5, strict=True):
        number, entered = number + more_calls, entered + later
        timing = CallTiming(names[group], int(number), entered / _US_PER_S, (entered + duration) / _US_PER_S, int(site))
        timings.append(timing)
    return tuple(timings)


def strip_directory(place: str) -> str:
    """Write `/home/me/train.py:88 train_step` as `train.py:88 train_step`."""
    return place.rpartition("/")[2]


@lru_cache(maxsize=1024)
def parse_group(group: str, size: int) -> frozenset[int]:
    """Return the ranks of a group such as `0-2, 5` in a job of `size` ranks; empty for any other text."""
    try:
        ranges = parse_ranks(group, "a group")
    except (UsageError, ValueError):  # int() accepts at most 4300 digits
        return frozenset()
    return frozenset().union(*(range(ranks.start, min(ranks.stop, size)) for ranks in ranges))
