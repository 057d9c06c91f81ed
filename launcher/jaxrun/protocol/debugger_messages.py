"""The messages between a rank that is being debugged and the process that has the terminal.

rank                                     head, or the process that runs pytest
DebuggerRequest      ──────────▶                           (it wants to be debugged)
                     ◀──────────    DebuggerDecision       (when it is the rank's turn, or at once if refused)
DebuggerOutput       ──────────▶
DebuggerReadRequest  ──────────▶
                     ◀──────────    DebuggerInput
DebuggerClosed       ──────────▶                           (the next rank may have the terminal)
"""

from __future__ import annotations

from jaxrun.protocol.codec import Message


class DebuggerRequest(Message, frozen=True):
    """A breakpoint was reached at `place`, "train.py:88 step"."""

    rank: int
    place: str


class DebuggerDecision(Message, frozen=True):
    """Whether the rank is debugged, and the reason if it is not."""

    granted: bool
    reason: str = ""


class DebuggerOutput(Message, frozen=True):
    """Text that a debugger writes."""

    rank: int
    text: str


class DebuggerReadRequest(Message, frozen=True):
    """A debugger reads a line."""

    rank: int


class DebuggerInput(Message, frozen=True):
    """The line that was typed; empty at the end of the input."""

    line: str


class DebuggerClosed(Message, frozen=True):
    """The program continues, until it reaches another breakpoint."""

    rank: int


DebuggerMessage = DebuggerRequest | DebuggerOutput | DebuggerReadRequest | DebuggerClosed
DebuggerAnswer = DebuggerDecision | DebuggerInput
