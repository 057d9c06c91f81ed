"""The messages on the socket of a running job, over which other processes follow it, query it and give it orders.

    jaxrun top, stacks, profile; tools ──── Unix socket that job.json names ────┐
                                                                                ├──▶ launcher
    the Python process of a gang ────────── inherited socket (CONTROL_FD) ──────┘

Frames of codec.py go both ways. The first frame of both ends is a Greeting. docs/event-log.md describes the socket for
other tools; SOCKET_VERSION changes when a message there loses a field or changes its meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from jaxrun.protocol.codec import ANY_MESSAGE

SOCKET_VERSION = 1
MAX_CLIENT_FRAME_BYTES = 2**16
MAX_ANSWER_FRAME_BYTES = 2**26  # the stacks of thousands of ranks


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first frame of each end: the version of these messages, and the job's id; empty from a client."""

    version: int
    job_id: str = ""


# ---- requests


@dataclass(frozen=True, slots=True)
class StacksRequest:
    """Where are all ranks now? Answered by the fields of a Snapshot; `native`: with C frames."""

    native: bool = False


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Take a JAX profile of the next `steps` steps on all ranks. Answered once it is planned, and when it is written.

    directory, session:  as in worker_messages.ProfileCalls
    lead_s:              seconds that the order may take to reach all ranks; ranks that it reaches later are late
    """

    steps: int
    directory: str
    session: str
    lead_s: float


@dataclass(frozen=True, slots=True)
class OverviewRequest:
    """How far has each rank come, and what does it use? Answered by the fields of an Overview."""


@dataclass(frozen=True, slots=True)
class DebugRequest:
    """Connect debugpy in this rank. Answered when it is connected, with each of its outputs, and at its end.

    The content of an answer has the fields `staged` of DebugpyStarted, or `data`, bytes in base64.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class GoRequest:
    """Start the programs of a job that waits for an editor (--debug)."""


Request = StacksRequest | ProfileRequest | OverviewRequest | DebugRequest | GoRequest


class AnswerState(enum.StrEnum):
    """The progress of a request; after the first state, it is answered again."""

    PROGRESS = "progress"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """A launcher's answer: `text` for people, `content` according to the request, as any JSON value."""

    state: AnswerState
    text: str = ""
    content: Any = None


# ---- from a client to the launcher


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; the answers repeat `number`, which the client chooses."""

    number: int
    request: Request = field(metadata=ANY_MESSAGE)


@dataclass(frozen=True, slots=True)
class Input:
    """Bytes for the request `number`, a DebugRequest."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the request `number`, a DebugRequest; its last answer follows."""

    number: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Send a JobEvent for each event from now on."""


@dataclass(frozen=True, slots=True)
class SignalOrder:
    """Send this signal to all workers: SIGINT, SIGUSR1 or SIGUSR2."""

    signum: int


@dataclass(frozen=True, slots=True)
class FaultOrder:
    """Inject this fault into these ranks, like --chaos; `kind` is "kill" or "pause"."""

    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndOrder:
    """End the job, at once."""


# ---- from the launcher to a client


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to the request of this number; further answers follow while its state is "progress"."""

    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event: `line` is its line in events.jsonl, without the newline."""

    line: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over: `verdict` is the text of verdict.json. It is the last frame."""

    verdict: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The launcher closes this connection, for this reason. This is the last frame."""

    reason: str


FromClient = Greeting | Ask | Input | Cancel | Follow | SignalOrder | FaultOrder | EndOrder
ToClient = Greeting | Answered | JobEvent | JobEnded | Dropped
