"""What a call on a gang reports while the function runs on the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxrun.frontends.gang.exceptions import RemoteFailure
from jaxrun.protocol.gang_messages import GangMessage


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A rank's function has sent a value."""

    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class Printed:
    """A rank's Python code has printed; `stream` is "out" or "err"."""

    rank: int
    stream: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    """The function has ended on a rank; `error` is None where it has returned."""

    rank: int
    error: RemoteFailure | None
    message: GangMessage

    def value(self) -> Any:
        """What the function has returned. Two values of one message may share memory. Raises what unpickling raises."""
        return self.message.load()


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A rank's connection has ended: the rank has died, or its job was stopped."""

    rank: int


@dataclass(frozen=True, slots=True)
class LauncherOutput:
    """Whole lines that the launcher has printed about the job, above all that its ranks are out of step."""

    text: str


CallEvent = RankMessage | Printed | Returned | Disconnected | LauncherOutput
