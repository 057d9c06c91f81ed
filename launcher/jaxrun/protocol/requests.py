"""What other processes of this host may ask the launcher of a running job, and how it answers.

    jaxrun stacks, …                               launcher
    requests/ID.request, REQUEST_SIGNAL  ──────▶   one of the messages below
                                         ◀──────   requests/ID.answer, an Answer: it may be replaced until it is final

Both are files in the job's run directory. A request is a frame (codec.py), an answer the JSON of its fields.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

REQUESTS_DIR = "requests"


@dataclass(frozen=True, slots=True)
class StacksRequest:
    """Where are all ranks now? Answered by the fields of a Snapshot; `native`: with C frames."""

    native: bool = False


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Take a JAX profile of the next `steps` steps on all ranks. Answered once it is planned, and when it is written.

    directory, session:  as in worker_messages.ProfileCalls
    lead_s:              how long the order may take to all ranks, in seconds; ranks that it reaches later are late
    """

    steps: int
    directory: str
    session: str
    lead_s: float


@dataclass(frozen=True, slots=True)
class OverviewRequest:
    """How far has each rank come, and what does it use? Answered by the fields of an Overview; no rank notices."""


Request = StacksRequest | ProfileRequest | OverviewRequest


class AnswerState(enum.StrEnum):
    """How far a request has come; after the first it is answered again."""

    PROGRESS = "progress"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a launcher answers: `text` for people, `content` as the request says, anything that JSON can express."""

    state: AnswerState
    text: str = ""
    content: Any = None
