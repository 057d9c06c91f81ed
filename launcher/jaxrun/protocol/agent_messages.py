"""What agent and head say to each other over the network, besides what the worker behind the agent says.

    agent                           head
                 ◀──────────  Challenge   (the head's half of the proof is yet to come)
    Answer       ──────────▶              (rank, and the proof that it knows the token)
                 ◀──────────  Welcome | Refused   (the head proves itself, and says what the report is to answer)
    Report       ──────────▶
                 ◀──────────  Begin       (once all have reported)
    Spawned, the worker's messages, Chunk, FirstOutput, Exited … ──────────▶
                 ◀──────────  messages to the worker, SignalWorker, Inflict, ShowStacks, Describe, Taken
                 ◀──────────  Dismiss     (it is over)

Times are seconds since the epoch on the sender's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxrun.head.events import (
    AgentReport,
    AgentSignalled,
    FaultNotInjected,
    InjectFault,
    ProgramDetails,
    ProgramDetailsRequest,
    RecorderSnapshot,
    Shutdown,
    SnapshotReply,
    StartFailed,
    StartWorker,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol import (
    Call,
    CallMismatch,
    CoordinatorReady,
    DeviceReport,
    Done,
    Exit,
    Failed,
    Hello,
    Join,
    Proceed,
    Run,
    StartCoordinator,
    ThreadFailed,
)


@dataclass(frozen=True, slots=True)
class Challenge:
    """The head's first word to anybody who connects; `version` is that of these messages."""

    version: int
    nonce: str


@dataclass(frozen=True, slots=True)
class ChallengeResponse:
    """Who connects; `proof` can only be made by one who knows the token."""

    rank: int
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The head has accepted, and proves itself. Nothing follows before the agent's Report.

    run_dir:    the job's; empty where it leaves no files
    platforms:  those to look for, best first
    """

    proof: str
    run_dir: str
    platforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why the head will not have this peer."""

    reason: str


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """What a worker wrote to its "out" or "err"."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A worker's "out" or "err" has ended."""

    rank: int
    stream: str


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """The worker has written for the first time."""

    rank: int


@dataclass(frozen=True, slots=True)
class OutputCredit:
    """So many bytes of the agent's chunks have been shown or kept: it may send as many more."""

    bytes: int


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Send this signal to the agent's worker."""

    signum: int


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Ask the worker's fault handler; answered by StacksTaken with the same purpose."""

    purpose: str


AgentHandshake = ChallengeResponse
HeadHandshake = Challenge | Welcome | Rejected
AgentToHead = (
    AgentReport
    | WorkerSpawned
    | WorkerExited
    | FaultNotInjected
    | SnapshotReply
    | RecorderSnapshot
    | ProgramDetails
    | StartFailed
    | AgentSignalled
    | OutputChunk
    | StreamEnded
    | FirstOutput
    | Hello
    | CoordinatorReady
    | DeviceReport
    | Call
    | ThreadFailed
    | Failed
    | Done
)
HeadToAgent = (
    StartWorker
    | SignalWorker
    | InjectFault
    | SnapshotRequest
    | ProgramDetailsRequest
    | OutputCredit
    | Shutdown
    | StartCoordinator
    | Join
    | Run
    | Proceed
    | CallMismatch
    | Exit
)
