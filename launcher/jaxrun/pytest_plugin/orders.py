"""What a course of events has the parent do; values, which conduct carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxrun.contract.testing import Fault, Warned


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to these ranks."""

    message: Any
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inflict:
    """Let a rank have this fault."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Show:
    """Show a debugger's text."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Read:
    """Read a line for a rank's debugger, and send it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Record:
    """Hand a warning to pytest."""

    warning: Warned


Order = Tell | Inflict | Show | Read | Record
