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

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DebuggerRequest:
    """A breakpoint was reached at `place`, "train.py:88 step"."""

    rank: int
    place: str


@dataclass(frozen=True, slots=True)
class DebuggerDecision:
    """Whether the rank is debugged, and the reason if it is not."""

    granted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DebuggerOutput:
    """Text that a debugger writes."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class DebuggerReadRequest:
    """A debugger reads a line."""

    rank: int


@dataclass(frozen=True, slots=True)
class DebuggerInput:
    """The line that was typed; empty at the end of the input."""

    line: str


@dataclass(frozen=True, slots=True)
class DebuggerClosed:
    """The program continues, until it reaches another breakpoint."""

    rank: int


DebuggerMessage = DebuggerRequest | DebuggerOutput | DebuggerReadRequest | DebuggerClosed
DebuggerAnswer = DebuggerDecision | DebuggerInput
