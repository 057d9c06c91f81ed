"""The content of a rank's flight recorder, as values that an agent sends to the head.

Times are seconds since the epoch. A group is the text of the ranks that take part, "0-3"; its calls count from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct, field

from jaxrun.errors import UsageError
from jaxrun.protocol.flight_file import EVERY_CALL, NOTHING
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.text import parse_ranks


# A head may read a hundred thousand of these at once: they travel as arrays, and nothing in them needs a collector.
class DispatchedCall(Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A dispatched call; equal chains at equal numbers of a group mean an equal history.

    `entered` is 0.0 if unknown.
    """

    time: float
    group: str
    number: int
    chain: int
    program: int
    site: int
    entered: float = 0.0


class CallTiming(Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """When a rank entered a call, and when the call had been dispatched: until then the rank could do nothing else."""

    group: str
    number: int
    entered: float
    dispatched: float
    site: int


class PendingCall(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
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


class ToldStep(NamedTuple):
    """The steps that the program has told: the last one, how many there will be (0 if unknown), and the first one.

    `at` and `first_at` are when it told them.
    """

    step: int
    total: int
    at: float
    first: int
    first_at: float

    @property
    def per_second(self) -> float:
        """Steps per second since the first one; 0.0 if unknown."""
        return (self.step - self.first) / (self.at - self.first_at) if self.at > self.first_at else 0.0

    @property
    def began(self) -> float:
        """When the first step began: it was told at its end, and took about as long as the later ones."""
        return self.first_at - (1.0 / self.per_second if self.per_second > 0.0 else 0.0)


class TimeTotals(NamedTuple):
    """How a rank has spent its time so far, in seconds; no second is in two of these, except in `longest`.

    compiling:  in finished stages of compilations
    saving, restoring:  in finished stages of saving and restoring the program's state
    pausing:    between two calls, if that was far longer than usual, and none of the above
    longest:    the longest time from one call to the next, without what was compiling, saving and restoring
    """

    compiling: float = 0.0
    saving: float = 0.0
    restoring: float = 0.0
    pausing: float = 0.0
    longest: float = 0.0


NO_TIME = TimeTotals()


class CompilationStage(NamedTuple):
    """A finished stage of a compilation; `stage` is one of flight_file.STAGES or STATE_STAGES."""

    stage: str
    name: str
    since: float
    until: float


UNKNOWN_PROGRAM = ProgramInfo("", "", "")
Arrays = tuple[tuple[str, str, str], ...]  # name, "float32[32,128]" and sharding of each


class ProgramDetails(HidesFields, frozen=True, forbid_unknown_fields=True):
    """Further properties of a program that the recorder has, under these names; empty if it does not have them.

    text:  the lowered program, packed
    """

    hidden = frozenset({"text"})

    source: str = ""
    arguments: Arrays = ()
    results: Arrays = ()
    mesh: str = ""
    text: str = ""


class Flight(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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
    nan_search:        from when to when its calls belonged to the last search for a NaN, in which JAX runs a program
                       again, operation by operation (jax_debug_nans); the end is in the far future if it goes on
    marks:             for each group, chains by number at some earlier calls
    call_counts:       the number of calls made so far in each group
    sites:             "file.py:88 train_step", innermost first
    unknown_programs:  how many of all its programs lack a key or a code
    trouble:           why less is recorded than possible
    joint_calls:       the number of calls of each joint function of jaxrun that it has called
    joint_wait:        its wait for other ranks in one of these
    totals:            how it has spent its time so far
    told_step:         the steps that the program has told; None if none
    repeating_since:   when the first of the calls that repeat themselves had been dispatched; 0.0 if none have
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
    nan_search: tuple[float, float] | None = None
    marks: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    call_counts: Mapping[str, int] = field(default_factory=dict)
    programs: Mapping[int, ProgramInfo] = field(default_factory=dict)
    sites: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    unknown_programs: int = 0
    trouble: str = ""
    joint_calls: Mapping[str, int] = field(default_factory=dict)
    joint_wait: JointWait | None = None
    totals: TimeTotals = NO_TIME
    told_step: ToldStep | None = None
    repeating_since: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether every call is recorded: only then do numbers and chains of two ranks compare."""
        return self.level == EVERY_CALL

    @property
    def last_call(self) -> DispatchedCall | None:
        return self.calls[-1] if self.calls else None

    @property
    def came_at(self) -> float:
        """When the rank came to the last call that is known: entered it, or else had made it; 0.0 without a call."""
        if self.pending is not None:
            return self.pending.since
        return self.entered or (self.calls[-1].time if self.calls else 0.0)

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


def strip_directory(place: str) -> str:
    """Write `/home/me/train.py:88 train_step` as `train.py:88 train_step`."""
    return " ".join(place.rpartition("/")[2].splitlines())


@lru_cache(maxsize=1024)
def is_in_group(rank: int, group: str) -> bool:
    """Whether a group such as `0-2, 5` has this rank; false for any other text."""
    return rank in parse_group(group, rank + 1)


def parse_group(group: str, size: int) -> frozenset[int]:
    """Return the ranks of a group such as `0-2, 5` in a job of `size` ranks; empty for any other text."""
    try:
        ranges = parse_ranks(group, "a group")
    except (UsageError, ValueError):  # int() accepts at most 4300 digits
        return frozenset()
    return frozenset().union(*(range(ranks.start, min(ranks.stop, size)) for ranks in ranges))
