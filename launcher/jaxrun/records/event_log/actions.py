"""The head's actions, as values."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.diagnosis.snapshot import Snapshot
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentOrder, NextAttempt, RankOrder, Shutdown
from jaxrun.protocol.job_messages import Answer


@dataclass(frozen=True, slots=True)
class Send:
    """Send an order to the workers of these ranks, or to their agents about them."""

    ranks: tuple[int, ...]
    message: RankOrder


@dataclass(frozen=True, slots=True)
class SendToAgents:
    """Send an order to these agents."""

    agents: tuple[AgentId, ...]
    message: AgentOrder


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Send a signal to the workers of these ranks."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class PrintLine:
    """Print a line of jaxrun's own; `status`: only until the next line, and an empty text shows no line."""

    text: str
    status: bool = False


@dataclass(frozen=True, slots=True)
class PrintSnapshot:
    """Print where the ranks are; `heading` precedes it on the same line."""

    snapshot: Snapshot
    heading: str = ""


@dataclass(frozen=True, slots=True)
class PrintStallNotice:
    """Print in one line who waits for whom; the job has made no progress for `idle_s` seconds."""

    snapshot: Snapshot
    idle_s: float


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Answer the request of this number."""

    number: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class RecordDivergence:
    """The ranks fell out of step; `text` describes it for people."""

    text: str


@dataclass(frozen=True, slots=True)
class RecordStraggler:
    """Log that one rank, or one host, slows the others down."""

    straggler: Straggler


@dataclass(frozen=True, slots=True)
class RecordClock:
    """Log the offset to add to times of this rank's clock, in seconds, and its error.

    It applies to the times in the rank's flight recorder, its WorkerExited and its ProfileEnded; the last one counts.
    error_s: 0.0 if it comes from a single message in one direction, so the error is unknown
    """

    rank: int
    offset_s: float
    error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ShowTerminalText:
    """Write a debugger's text to the terminal unchanged."""

    text: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Stop until SIGCONT, as a shell expects after Ctrl-Z; answered by one Resumed."""


@dataclass(frozen=True, slots=True)
class LookForHosts:
    """Check whether hosts that the job lacks are back; answered by one HostsFound.

    agents:  those for which the attempt waits, which are started where their host is found; empty if a smaller job
             looks for any host
    """

    agents: tuple[AgentId, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadTerminalLine:
    """Read a line from the terminal; answered by one TerminalLine."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over."""

    outcome: JobOutcome


# An agent on another host also executes NextAttempt and Shutdown, which the supervisor sends at the end.
Action = (
    Send
    | SendToAgents
    | SignalRanks
    | PrintLine
    | PrintSnapshot
    | PrintStallNotice
    | AnswerRequest
    | RecordClock
    | RecordDivergence
    | RecordStraggler
    | ShowTerminalText
    | LookForHosts
    | ReadTerminalLine
    | Suspend
    | Finish
    | NextAttempt
    | Shutdown
)
