"""The messages on the socket of a running job, over which other processes follow it, query it and give it orders.

    jaxrun top, stacks, profile; tools ──── Unix socket that job.json names ────┐
                                                                                ├──▶ launcher
    the Python process of a gang, ───────── inherited socket (CONTROL_FD) ──────┘
    or of jaxrun.run

Frames of codec.py, with JSON in them, go both ways. The first frame of both ends is a Greeting. docs/event-log.md
describes the socket for other tools; SOCKET_VERSION changes when a message there loses a field or changes its meaning.

All versions can read two messages of any other, a Greeting and a Dropped, so that each end can say why it cannot go on.
They have a field `v`, which version 1 wants in all frames, and the fields that a version does not know are ignored.
"""

from __future__ import annotations

import enum
import signal
from typing import Any

from msgspec import Struct

from jaxrun.protocol.bounds import AbsolutePath, FaultKind, FileName, LeadTime, ProfiledSteps, Rank, RequestNumber
from jaxrun.protocol.codec import Message

SOCKET_VERSION = 2
_FORM = 2  # of frames, as version 1 of the socket calls it
MAX_CLIENT_FRAME_BYTES = 2**16
MAX_ANSWER_FRAME_BYTES = 2**26  # the stacks of thousands of ranks


class Greeting(Message, frozen=True, forbid_unknown_fields=False):
    """The first frame of each end: the version of these messages, and the job's id; empty from a client."""

    version: int
    job_id: str = ""
    v: int = _FORM


# ---- requests


class StacksRequest(Message, frozen=True):
    """Where are all ranks now? Answered by the fields of a JobStacks; `native`: with C frames."""

    native: bool = False


class ProfileRequest(Message, frozen=True):
    """Take a JAX profile of the next `steps` steps on all ranks. Answered once it is planned, and when it is written.

    directory, session:  as in worker_messages.ProfileCalls
    lead_s:              seconds that the order may take to reach all ranks; ranks that it reaches later are late
    """

    steps: ProfiledSteps
    directory: AbsolutePath
    session: FileName
    lead_s: LeadTime


class OverviewRequest(Message, frozen=True):
    """How far has each rank come, and what does it use? Answered by the fields of an Overview."""


class DebugRequest(Message, frozen=True):
    """Connect debugpy in this rank. Answered when it is connected, with each of its outputs, and at its end.

    The content of an answer has the fields `staged` of DebugpyStarted, or `data`, bytes in base64.
    """

    rank: Rank


class GoRequest(Message, frozen=True):
    """Start the programs of a job that waits for an editor (--debug)."""


Request = StacksRequest | ProfileRequest | OverviewRequest | DebugRequest | GoRequest


class AnswerState(enum.StrEnum):
    """The progress of a request; after the first state, it is answered again."""

    PROGRESS = "progress"
    DONE = "done"
    REFUSED = "refused"


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher's answer: `text` for people, `content` according to the request, as any JSON value."""

    state: AnswerState
    text: str = ""
    content: Any = None


# ---- from a client to the launcher


class Ask(Message, frozen=True):
    """A request; the answers repeat `number`, which the client chooses, and uses for one request at a time."""

    number: RequestNumber
    request: Request


class Input(Message, frozen=True):
    """Bytes for the request `number`, a DebugRequest."""

    number: RequestNumber
    data: bytes


class Cancel(Message, frozen=True):
    """End the request `number`, a DebugRequest; its last answer follows."""

    number: RequestNumber


class Follow(Message, frozen=True):
    """Send a JobEvent for each event from now on."""


class OrderedSignal(enum.IntEnum):
    """A signal that a client may send to all workers."""

    SIGINT = signal.SIGINT
    SIGUSR1 = signal.SIGUSR1
    SIGUSR2 = signal.SIGUSR2


class SignalOrder(Message, frozen=True):
    """Send this signal to all workers."""

    signum: OrderedSignal


class FaultOrder(Message, frozen=True):
    """Inject this fault into these ranks, like --chaos."""

    kind: FaultKind
    ranks: tuple[Rank, ...]


class EndOrder(Message, frozen=True):
    """End the job: at once, or as SIGTERM to its launcher would."""

    gracefully: bool = False


# ---- from the launcher to a client


class JobBegan(Message, frozen=True):
    """To the process that started jaxrun: the job has begun; `run_dir` is empty without a run directory."""

    run_dir: str


class NotStarted(Message, frozen=True):
    """To the process that started jaxrun: there is no job, for this reason, which is not printed. The last frame."""

    error: str
    exit_code: int


class Answered(Message, frozen=True):
    """An answer to the request of this number; further answers follow while its state is "progress"."""

    number: int
    answer: Answer


class JobEvent(Message, frozen=True):
    """An event: `line` is its line in events.jsonl, without the newline."""

    line: str


class JobEnded(Message, frozen=True):
    """The job is over: `verdict` is the text of verdict.json. It is the last frame."""

    verdict: str


class Dropped(Message, frozen=True, forbid_unknown_fields=False):
    """The launcher closes this connection, for this reason. This is the last frame."""

    reason: str
    v: int = _FORM


FromClient = Greeting | Ask | Input | Cancel | Follow | SignalOrder | FaultOrder | EndOrder
ToClient = Greeting | JobBegan | NotStarted | Answered | JobEvent | JobEnded | Dropped
