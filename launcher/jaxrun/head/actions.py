"""What the head wants done, and how the job ended in its view. All are values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.diagnosis.snapshot import Snapshot
from jaxrun.diagnosis.straggler import Straggler
from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.job.fault_spec import FaultSpec
from jaxrun.lockstep.divergence import Divergence
from jaxrun.protocol.agent_messages import ClockProbe, InjectFault, NextAttempt, Shutdown, StartWorker
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.probe_messages import MeasurePeers
from jaxrun.protocol.requests import Answer
from jaxrun.protocol.snapshot_messages import CallAim, ProgramDetailsRequest, SnapshotPurpose
from jaxrun.protocol.worker_messages import AgentToWorker

MessageToRank = MeasurePeers | StartWorker | InjectFault | ProgramDetailsRequest | ClockProbe | AgentToWorker


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the workers of these ranks, or to their agents."""

    ranks: tuple[int, ...]
    message: MessageToRank


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Send a signal to the workers of these ranks."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Ask what these ranks are doing; answered by one SnapshotReply with the same purpose.

    aim:  at which moment, for SnapshotPurpose.STRAGGLER
    """

    ranks: tuple[int, ...]
    purpose: SnapshotPurpose
    aim: CallAim | None = None


@dataclass(frozen=True, slots=True)
class PrintLine:
    """Print a line of jaxrun's own; `status`: only until the next line, and none at all if the text is empty."""

    text: str
    status: bool = False


@dataclass(frozen=True, slots=True)
class PrintSnapshot:
    """Print where the ranks are; `heading` precedes it on the same line."""

    snapshot: Snapshot
    heading: str = ""


@dataclass(frozen=True, slots=True)
class PrintStallNotice:
    """Print in one line who waits for whom; the job has made no progress for so many seconds."""

    snapshot: Snapshot
    idle_s: float


@dataclass(frozen=True, slots=True)
class AnswerRequests:
    """Answer the requests of these numbers."""

    numbers: tuple[str, ...]
    answer: Answer


@dataclass(frozen=True, slots=True)
class RecordStraggler:
    """Log that one rank, or one host, holds the others up."""

    straggler: Straggler


@dataclass(frozen=True, slots=True)
class RecordClock:
    """Log what is to be added to times of this rank's clock, in seconds, and how wrong that may be."""

    rank: int
    offset_s: float
    error_s: float


@dataclass(frozen=True, slots=True)
class ShowTerminalText:
    """Write the text of a debugger to the terminal, as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ReadTerminalLine:
    """Read a line from the terminal; answered by one TerminalLine."""


class EndReason(enum.StrEnum):
    """Why a job ended."""

    OK = "ok"
    FAILED = "failed"  # a worker failed
    REFUSED = "refused"  # the processes are not those that were asked for, or not alike
    USAGE = "usage"  # what was asked for is not possible on the platform that the agents have found
    UNAVAILABLE = "unavailable"  # something that the job needs could not be started or reached
    TIMEOUT = "timeout"
    STALL = "stall"
    EARLY_EXIT = "early-exit"  # some ranks have finished, and the others wait for them
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"  # told to stop, and all ranks ended well after it; with --requeue, or were killed


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How the job ended: the head's last word, from which the verdict is made.

    workers:                         how each of them ended
    text, traceback:                 what is to be said about `reason`
    stacks, kernel_waits, flights:   by rank, what the snapshot showed that led to the end
    fork_places:                     by rank, where its program had forked
    decided_at, run_at:              when the end was decided, and when the program was started
    divergences:                     the calls in which the ranks were seen out of step, the first one first
    unheard:                         nobody in the job listens to the signal that ended it
    unanswered:                      the ranks that were killed, but whose end nobody has reported in time
    shown_divergences:               those of them that have been printed already
    straggler:                       the rank or host that held the others up, if one did
    stop_requested:                  somebody has asked for the end, too
    faults_left:                     the faults of --chaos that were not injected
    saved_step:                      the last step of which the program has said that its checkpoint is complete
    """

    reason: EndReason
    workers: tuple[WorkerOutcome, ...] = ()
    text: str = ""
    traceback: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)
    kernel_waits: Mapping[int, str] = field(default_factory=dict)
    flights: Mapping[int, Flight] = field(default_factory=dict)
    fork_places: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    signum: int = 0
    decided_at: float | None = None
    run_at: float | None = None
    divergences: tuple[Divergence, ...] = ()
    unheard: bool = False
    unanswered: tuple[int, ...] = ()
    shown_divergences: tuple[Divergence, ...] = ()
    straggler: Straggler | None = None
    stop_requested: bool = False
    faults_left: tuple[FaultSpec, ...] = ()
    saved_step: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over."""

    outcome: JobOutcome


# An agent on another host also executes NextAttempt and Shutdown, which the supervisor sends it at the end.
Action = (
    Send
    | SignalRanks
    | TakeSnapshot
    | PrintLine
    | PrintSnapshot
    | PrintStallNotice
    | AnswerRequests
    | RecordClock
    | RecordStraggler
    | ShowTerminalText
    | ReadTerminalLine
    | Finish
    | NextAttempt
    | Shutdown
)
