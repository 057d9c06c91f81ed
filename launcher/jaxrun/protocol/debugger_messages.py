"""The messages between a rank that is being debugged and the process that has the terminal.

rank                                     head, or the process that runs pytest
DebuggerRequest      ──────────▶                           (it is at a breakpoint)
                     ◀──────────    TerminalDecision       (when it is the rank's turn, or at once if refused)
DebuggerOutput       ──────────▶
DebuggerReadRequest  ──────────▶
                     ◀──────────    DebuggerInput
DebuggerClosed       ──────────▶                           (the next rank may have the terminal)

A rank whose program has failed, and that may be debugged then, waits for a DebuggerDecision before all of that.

An exception, such as one that a signal handler raises, may end a wait for an answer, which then comes too late. So
requests have numbers, which count up in the process of the rank, and their answers repeat them.
"""

from __future__ import annotations

from jaxrun.protocol.codec import Message


class DebuggerRequest(Message, frozen=True):
    """A breakpoint was reached at `place`, "train.py:88 step"."""

    rank: int
    place: str
    number: int


class TerminalDecision(Message, frozen=True):
    """Whether the rank of the DebuggerRequest `number` has the terminal, and the reason if it has not."""

    number: int
    granted: bool
    reason: str = ""


class DebuggerDecision(Message, frozen=True):
    """Whether a rank whose program has failed is debugged."""

    granted: bool


class DebuggerOutput(Message, frozen=True):
    """Text that a debugger writes."""

    rank: int
    text: str


class DebuggerReadRequest(Message, frozen=True):
    """A debugger reads a line."""

    rank: int
    number: int


class DebuggerInput(Message, frozen=True):
    """The line that was typed, for the DebuggerReadRequest `number`; empty at the end of the input."""

    number: int
    line: str


class DebuggerClosed(Message, frozen=True):
    """The program continues, until it reaches another breakpoint. The rank waits for no answer any more."""

    rank: int


DebuggerMessage = DebuggerRequest | DebuggerOutput | DebuggerReadRequest | DebuggerClosed
DebuggerAnswer = TerminalDecision | DebuggerDecision | DebuggerInput
