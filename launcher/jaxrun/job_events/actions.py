"""The head's actions, as values."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, WorkerOutcome
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentOrder, NextAttempt, RankOrder, Shutdown
from jaxrun.protocol.codec import Message
from jaxrun.protocol.job_messages import Answer


class Send(Struct, frozen=True):
    """Send an order to the workers of these ranks, or to their agents about them."""

    ranks: tuple[int, ...]
    message: RankOrder


class SendToAgents(Struct, frozen=True):
    """Send an order to these agents."""

    agents: tuple[AgentId, ...]
    message: AgentOrder


class SignalRanks(Message, frozen=True):
    """Send a signal to the workers of these ranks."""

    ranks: tuple[int, ...]
    signum: int


class PrintLine(Struct, frozen=True):
    """Print a line of jaxrun's own; `status`: only until the next line, and an empty text shows no line."""

    text: str
    status: bool = False


class PrintStacks(Struct, frozen=True):
    """Print where the ranks are; `heading` precedes it on the same line."""

    stacks: JobStacks
    heading: str = ""


class PrintStallNotice(Struct, frozen=True):
    """Print in one line who waits for whom; the job has made no progress for `idle_s` seconds.

    limit_s:       --stall-timeout, if half of it is over; else 0
    is_as_before:  the last notice was about the same, so only the time is new
    """

    stacks: JobStacks
    idle_s: float
    limit_s: float = 0.0
    is_as_before: bool = False


class RankLoss(Struct, frozen=True):
    """How a rank has failed without which others go on.

    incarnation:  of the process that has failed
    restart:      how many times ranks have been started again, with this one; 0 if this one is, but does not count, as
                  its pod went away; None if it is not
    """

    worker: WorkerOutcome
    incarnation: int
    restart: int | None = None


class PrintLoss(Struct, frozen=True):
    """Print how a rank, or all ranks of a host, have failed without which these others go on.

    run_at:  when the program started
    most:    how many times ranks are started again in all
    spare:   the spare host on which these are, as their own is lost
    waits:   once their own host is back, or another is in its place
    """

    losses: tuple[RankLoss, ...]
    others: tuple[int, ...]
    run_at: float
    most: int = 0
    spare: str = ""
    waits: bool = False


class AnswerRequest(Struct, frozen=True):
    """Answer the request of this number."""

    number: str
    answer: Answer


class RecordLoss(Message, frozen=True):
    """Log that the others go on without a rank that has failed (--keep-survivors).

    incarnation:  of its process, from 1
    headline:     how it has failed, for people
    restart:      how many times lost ranks have been started again, with this one; 0 if this one is, but does not
                  count; None if it is not
    """

    rank: int
    incarnation: int
    headline: str
    restart: int | None = None


class RecordReturn(Message, frozen=True):
    """Log that a rank takes part again, which was lost and started again (--keep-survivors with --max-restarts).

    incarnation:  of its process, from 2
    seconds:      since its failure
    """

    rank: int
    incarnation: int
    seconds: float


class RecordReplacement(Message, frozen=True):
    """Log that another host takes the place of a lost one while the other ranks go on (--keep-survivors).

    lost, spare:  the hosts
    agents:       the ranks of each agent on the other host
    """

    lost: str
    spare: str
    agents: Mapping[AgentId, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for ranks in self.agents.values() for rank in ranks)


class RecordDivergence(Message, frozen=True):
    """The ranks fell out of step; `text` describes it for people."""

    text: str


class RecordStraggler(Struct, frozen=True):
    """Log that one rank, or one host, slows the others down."""

    straggler: Straggler


class RecordClock(Message, frozen=True):
    """Log the offset to add to times of this rank's clock, in seconds, and its error.

    It applies to the times in the rank's flight recorder, its WorkerExited and its ProfileEnded; the last one counts.
    error_s: 0.0 if it comes from a single message in one direction, so the error is unknown
    """

    rank: int
    offset_s: float
    error_s: float = 0.0


class RecordTime(Message, frozen=True):
    """Log how the time of an attempt was spent, from the program's start until now; each later record replaces it.

    since, until:  seconds since the epoch
    parts:         microseconds by part (analysis/lockstep/time_spent.py); they sum up to all the time
    steps:         how many steps the program has made, as far as known
    first_step, last_step, total_steps:  the numbers that the program has told; -1, -1 and 0 if it has not
    late_rank:     the rank for which the others waited most; -1 if there is no such rank
    """

    since: float
    until: float
    parts: Mapping[str, int]
    steps: int = 0
    first_step: int = -1
    last_step: int = -1
    total_steps: int = 0
    late_rank: int = -1


class ShowTerminalText(Struct, frozen=True):
    """Write a debugger's text to the terminal unchanged."""

    text: str


class Suspend(Struct, frozen=True):
    """Stop until SIGCONT, as a shell expects after Ctrl-Z; answered by one Resumed."""


class LookForHosts(Struct, frozen=True):
    """Check whether hosts that the job lacks are back; answered by one HostsFound.

    agents:  those for which the attempt waits, which are started where their host is found; empty if a smaller job
             looks for any host
    """

    agents: tuple[AgentId, ...] = ()


class ReadTerminalLine(Struct, frozen=True):
    """Read a line from the terminal; answered by one TerminalLine."""


class Finish(Struct, frozen=True):
    """The job is over."""

    outcome: JobOutcome


# An agent on another host also executes NextAttempt and Shutdown, which the supervisor sends at the end.
Action = (
    Send
    | SendToAgents
    | SignalRanks
    | PrintLine
    | PrintStacks
    | PrintStallNotice
    | PrintLoss
    | AnswerRequest
    | RecordClock
    | RecordDivergence
    | RecordReplacement
    | RecordReturn
    | RecordStraggler
    | RecordTime
    | ShowTerminalText
    | LookForHosts
    | ReadTerminalLine
    | Suspend
    | Finish
    | NextAttempt
    | Shutdown
)
