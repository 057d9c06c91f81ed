"""The messages that carry the bytes of debugpy between a rank and `jaxrun debug`, through the head.

rank                                     head                        jaxrun debug (job_messages.py)
                     ◀──────────    DebugpyStart    ◀──────────    DebugRequest
DebugpyStarted       ──────────▶                    ──────────▶    (an answer, or a refusal)
DebugpyOutput        ──────────▶                    ──────────▶    (an answer with these bytes)
                     ◀──────────    DebugpyInput    ◀──────────    RequestInput
DebugpyReady         ──────────▶                                   (the editor has set its breakpoints)
                     ◀──────────    DebugpyStop     ◀──────────    RequestEnd, or its end
DebugpyStopped       ──────────▶                    ──────────▶    (the last answer)

A rank has one session at a time. Its number tells messages of an earlier session apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from jaxrun.protocol.codec import Message


class DebugpyStart(Message, frozen=True):
    """Import debugpy, and connect it."""

    session: int


class DebugpyStarted(Message, frozen=True):
    """Debugpy is connected; or it is not, for the reason `error`, and the session is over.

    staged:  directories that --stage has copied, and their copies, where the rank's files are
    """

    rank: int
    session: int
    error: str = ""
    staged: Mapping[str, str] = field(default_factory=dict)


class DebugpyReady(Message, frozen=True):
    """The editor has set its breakpoints (configurationDone)."""

    rank: int
    session: int


class DebugpyOutput(Message, frozen=True):
    """Bytes of debugpy for the editor."""

    rank: int
    session: int
    data: bytes


class DebugpyInput(Message, frozen=True):
    """Bytes of the editor for debugpy."""

    session: int
    data: bytes


class DebugpyStop(Message, frozen=True):
    """The session is over: let the program continue."""

    session: int


class DebugpyStopped(Message, frozen=True):
    """Debugpy has let go of the rank."""

    rank: int
    session: int


DebugpyFromRank = DebugpyStarted | DebugpyReady | DebugpyOutput | DebugpyStopped
DebugpyToRank = DebugpyStart | DebugpyInput | DebugpyStop
