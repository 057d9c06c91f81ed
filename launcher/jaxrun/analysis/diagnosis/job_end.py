"""Why a job ended: one class for each way, with what only this way has. A JobOutcome adds the facts of the run.

The head decides it while the job runs (`HeadState.decide`). As the job is concluded, a success may turn out to be one
of Grown, Preempted, OutOfStep and Diverged, and EndedBySignal to be Preempted.
`reason` is the word for it, which a verdict has unless it names a failure more precisely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.job_stacks import JobStacks


class Completed(Struct, frozen=True):
    """All programs have ended with status 0."""

    reason: ClassVar[str] = "ok"


class RankFailed(Struct, frozen=True):
    """A rank has failed. Which one, and why, follows from how the workers ended."""

    reason: ClassVar[str] = "failed"


class Refused(Struct, frozen=True):
    """The processes differ from each other, or from what was asked for; `text` says how."""

    reason: ClassVar[str] = "refused"
    text: str


class Unsupported(Struct, frozen=True):
    """The platform that the agents found does not allow what was asked for; `text` says what."""

    reason: ClassVar[str] = "usage"
    text: str


class Unavailable(Struct, frozen=True):
    """Something that the job needs could not be started or reached.

    text:       what, in words
    traceback:  of an agent that could not start its worker, if it has one
    """

    reason: ClassVar[str] = "unavailable"
    text: str
    traceback: str = ""


class HostCheckFailed(Unavailable, frozen=True, kw_only=True):
    """Hosts have failed --host-check; `failed` has the reason, by the rank that checked its host."""

    failed: Mapping[int, str]


class HostsNotBack(Unavailable, frozen=True, kw_only=True):
    """The attempt has waited in vain for lost hosts (--wait-hosts); `ranks` are theirs."""

    ranks: tuple[int, ...]


class LostAtStart(Unavailable, frozen=True, kw_only=True):
    """All agents had reported, and one was lost before it had started its workers; `lost` has the reason, by rank."""

    lost: Mapping[int, str]


class TimedOut(Struct, frozen=True):
    """The time of --timeout was over.

    stacks:        where the ranks were
    is_explained:  a notice has told who waits for whom, as these stacks show it
    """

    reason: ClassVar[str] = "timeout"
    stacks: JobStacks
    is_explained: bool = False


class Stalled(Struct, frozen=True):
    """No rank has made progress for as long as --stall-timeout allows.

    stacks, is_explained:  see TimedOut
    text:                  how long that was, if the limit was learned
    """

    reason: ClassVar[str] = "stall"
    stacks: JobStacks
    is_explained: bool = False
    text: str = ""


class EarlyExit(Struct, frozen=True):
    """Some ranks have finished, and the others wait for them; `stacks` shows where."""

    reason: ClassVar[str] = "early-exit"
    stacks: JobStacks


class Diverged(Struct, frozen=True):
    """The job was ended because its ranks were found out of step; `text` adds why, where it was not --lockstep fail."""

    reason: ClassVar[str] = "diverged"
    text: str = ""


class OutOfStep(Struct, frozen=True):
    """All programs have ended with status 0, but the ranks were found out of step."""

    reason: ClassVar[str] = "out-of-step"


class EndedBySignal(Struct, frozen=True):
    """The launcher got a signal that ends the job, or an order that counts as one.

    text:          who gave the order; empty for a signal
    stacks:        where the ranks were as the signal came; None if they were not asked, or have not answered yet
    is_explained:  the screen has shown who waits for whom, or the error that a late rank handles
    unheard:       no rank listens to the signal
    late_stacks, late_waits:  by rank, the stack and the kernel function of ranks that had not ended in time
    """

    reason: ClassVar[str] = "interrupted"
    signum: int
    text: str = ""
    stacks: JobStacks | None = None
    is_explained: bool = False
    unheard: bool = False
    late_stacks: Mapping[int, str] = field(default_factory=dict)
    late_waits: Mapping[int, str] = field(default_factory=dict)


class Preempted(Struct, frozen=True):
    """The job was told to stop, and all ranks ended well afterwards; with --requeue, or were killed.

    asked:   why should_stop has asked the program to stop; empty if no rank has seen it
    signal:  the signal that ended the job; None if the program has ended by itself before
    """

    reason: ClassVar[str] = "preempted"
    asked: str = ""
    signal: EndedBySignal | None = None


class Grown(Struct, frozen=True):
    """The program has stopped by itself, to continue on more hosts; `asked` is why should_stop has asked for it."""

    reason: ClassVar[str] = "grown"
    asked: str


End = (
    Completed
    | RankFailed
    | Refused
    | Unsupported
    | Unavailable
    | TimedOut
    | Stalled
    | EarlyExit
    | Diverged
    | OutOfStep
    | EndedBySignal
    | Preempted
    | Grown
)


def stacks_at(end: End) -> JobStacks | None:
    """Return where the ranks were when it was decided that the job ends; None if that was not asked."""
    match end:
        case TimedOut() | Stalled() | EarlyExit() | EndedBySignal():
            return end.stacks
        case Preempted(signal=EndedBySignal() as by_signal):
            return by_signal.stacks
    return None
