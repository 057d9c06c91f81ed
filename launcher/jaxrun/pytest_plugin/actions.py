"""What a course of events has the parent do; values, which conduct carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxrun.protocol.pytest_messages import FaultRequest, RecordedWarning


@dataclass(frozen=True, slots=True)
class SendToRanks:
    """Send `message` to these ranks."""

    message: Any
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TriggerFault:
    """Let a rank have this fault."""

    fault: FaultRequest


@dataclass(frozen=True, slots=True)
class ShowDebuggerText:
    """Show a debugger's text."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class ReadDebuggerLine:
    """Read a line for a rank's debugger, and send it."""

    rank: int


@dataclass(frozen=True, slots=True)
class RecordWarning:
    """Hand a warning to pytest."""

    warning: RecordedWarning


Action = SendToRanks | TriggerFault | ShowDebuggerText | ReadDebuggerLine | RecordWarning
