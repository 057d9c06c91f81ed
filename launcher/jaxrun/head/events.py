"""What goes into the head and what comes out of it: events, actions, the ending of a job. All are values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxrun.contract import Message
from jaxrun.verdict.ends import End


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: until all have joined, for the whole job (None: no limit), between SIGTERM and SIGKILL."""

    init: float
    job: float | None
    grace: float


@dataclass(frozen=True, slots=True)
class Spawned:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has been reaped; `status` is negative for a signal."""

    rank: int
    status: int
    fatal: str = ""
    tail: str = ""
    out_of_memory: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The workers could not be started at all."""

    text: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher has received a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class StacksTaken:
    """By rank: what its fault handler wrote, the kernel's name for what it waits in, CPU seconds used."""

    purpose: str
    dumps: Mapping[int, str]
    waits: Mapping[int, str]
    cpu: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Spawned | Exited | Unavailable | Signalled | StacksTaken | Tick | Message


@dataclass(frozen=True, slots=True)
class Send:
    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Kill:
    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Ask the fault handlers; answered by StacksTaken with the same purpose."""

    ranks: tuple[int, ...]
    purpose: str


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How the job ended: the head's last word, from which the verdict is made.

    `reason`: "ok", "failed", "refused", "unavailable", "timeout", "early-exit", "interrupted" or "preempted".
    """

    reason: str
    ends: tuple[End, ...]
    text: str = ""
    traceback: str = ""
    dumps: Mapping[int, str] = field(default_factory=dict)
    signum: int = 0
    decided_at: float | None = None
    run_at: float | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    ending: Ending


Action = Send | Kill | TakeStacks | Say | Finish
