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
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DebugpyStart:
    """Import debugpy, and connect it."""

    session: int


@dataclass(frozen=True, slots=True)
class DebugpyStarted:
    """Debugpy is connected; or it is not, for the reason `error`, and the session is over.

    staged:  directories that --stage has copied, and their copies, where the rank's files are
    """

    rank: int
    session: int
    error: str = ""
    staged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DebugpyReady:
    """The editor has set its breakpoints (configurationDone)."""

    rank: int
    session: int


@dataclass(frozen=True, slots=True)
class DebugpyOutput:
    """Bytes of debugpy for the editor."""

    rank: int
    session: int
    data: bytes


@dataclass(frozen=True, slots=True)
class DebugpyInput:
    """Bytes of the editor for debugpy."""

    session: int
    data: bytes


@dataclass(frozen=True, slots=True)
class DebugpyStop:
    """The session is over: let the program continue."""

    session: int


@dataclass(frozen=True, slots=True)
class DebugpyStopped:
    """Debugpy has let go of the rank."""

    rank: int
    session: int


DebugpyFromRank = DebugpyStarted | DebugpyReady | DebugpyOutput | DebugpyStopped
DebugpyToRank = DebugpyStart | DebugpyInput | DebugpyStop
