"""What a job did over time, as values. Times are seconds since the epoch, on the clock of the launcher's host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    """Something that took a while; `detail` says more in a few words, or is empty."""

    name: str
    start: float
    end: float
    detail: str = ""


class Moment(NamedTuple):
    """Something that happened at one moment; `is_failure`: it is, or leads to, a failure."""

    time: float
    name: str
    detail: str = ""
    is_failure: bool = False


# A tuple, not a dataclass: there may be some hundred thousand.
class TracedCall(NamedTuple):
    """A cross-process call of one rank.

    number:  of the call among those of its group; 0 where that is not known
    entered: 0.0 where that is not known
    left:    when it had been dispatched, or the rank ended
    is_over: whether it was dispatched
    waited:  for how long, from `entered` on, the rank waited for others
    last:    the rank that entered the call last; -1 where that is not known
    missing: the ranks that never entered it, `rank 3`; empty without any
    cost:    of the last rank: for how many seconds the others waited because of it, on average, as the sentence about a
             straggler counts; of all others 0
    """

    group: str
    number: int
    name: str
    place: str
    entered: float
    left: float
    is_over: bool = True
    waited: float = 0.0
    last: int = -1
    missing: str = ""
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank did during one attempt.

    phases:        from the start of its process to its end
    calls:         the last ones that its flight recorder holds, in their order
    calls_made:    how many it has made in all
    compilations:  the stages of its compilations; one may lie within another
    output:        when it wrote how much
    trouble:       why its calls are not, or not all, known; else empty
    awaited:       since when others wait for it in a call that it never entered; None if none do
    """

    rank: int
    host: str = ""
    pid: int = 0
    phases: tuple[Span, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    calls_made: int = 0
    compilations: tuple[Span, ...] = ()
    output: tuple[Span, ...] = ()
    marks: tuple[Moment, ...] = ()
    trouble: str = ""
    awaited: float | None = None

    @property
    def end(self) -> float:
        """When its last phase ended."""
        return max((span.end for span in self.phases), default=0.0)

    @property
    def cost(self) -> float:
        """For how many seconds the others waited for this rank in the calls that are known."""
        return sum(call.cost for call in self.calls)


@dataclass(frozen=True, slots=True)
class AttemptTrace:
    """One attempt to run the job; `run_at` is when its program started, if it did; `outcome`, how it ended."""

    number: int
    start: float
    end: float
    run_at: float | None = None
    ranks: Mapping[int, RankTrace] = field(default_factory=dict)
    marks: tuple[Moment, ...] = ()
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A job: `report` is the verdict as `explain` shows it, `culprits` the ranks that caused its end.

    clock_error:  by how much the times of different hosts may be wrong to each other, in seconds; None if that is
                  not known, or there is one host
    """

    title: str
    attempts: tuple[AttemptTrace, ...]
    headline: str = ""
    report: str = ""
    outcome: str = ""
    culprits: tuple[int, ...] = ()
    clock_error: float | None = None

    @property
    def start(self) -> float:
        return self.attempts[0].start

    @property
    def end(self) -> float:
        return max(attempt.end for attempt in self.attempts)
