"""Events that the head handles, from the launcher itself, agents and workers; and events that are only logged."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxrun.errors import ProtocolError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentEvent,
    AgentReport,
    AgentSignalled,
    AgentToHead,
    ClockReply,
    FaultNotInjected,
    WorkerEvent,
    WorkerExited,
)
from jaxrun.protocol.job_messages import Request
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.protocol.worker_messages import Failed, WorkerToAgent
from jaxrun.spec.job.fault_spec import FAULT_KINDS
from jaxrun.text import format_ranges

_SIGNALS = {*signal.Signals}
_LAST_SIGNAL = 64
_MAX_STATUS = 255
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class AgentLost:
    """This agent has become unreachable, for this reason; its ranks are lost with it.

    ended_by_launch_command: mpirun or srun ended the agent because another one had ended
    """

    agent: AgentId
    reason: str
    ended_by_launch_command: bool = False


@dataclass(frozen=True, slots=True)
class LauncherSignalled:
    """The launcher has received a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The launcher continues after a Suspend of `seconds` seconds."""

    paused_s: float


@dataclass(frozen=True, slots=True)
class SignalRequested:
    """The process that the launcher works for, or a client of its socket, asks to send all workers a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class FaultRequested:
    """The same for a fault to inject into these ranks; `kind` is one of FAULT_KINDS (job/fault_spec.py)."""

    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParentExited:
    """The process that the launcher works for is gone; or it, or a client of the socket, asks to end the job.

    `reason` says which.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Requested:
    """Another process sends a request; `number` identifies it."""

    number: str
    request: Request


@dataclass(frozen=True, slots=True)
class RequestInput:
    """The client of the request `number` sends it more bytes."""

    number: str
    data: bytes


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The client of the request `number` needs no more answers, or has gone."""

    number: str


@dataclass(frozen=True, slots=True)
class HostsFound:
    """These hosts, on which the job does not run, are back; the answer to LookForHosts."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TerminalLine:
    """A line that was typed for a debugger; empty at the end of the input."""

    line: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


LauncherEvent = (
    AgentLost
    | LauncherSignalled
    | Resumed
    | SignalRequested
    | FaultRequested
    | ParentExited
    | Requested
    | RequestInput
    | RequestEnded
    | HostsFound
    | TerminalLine
    | Tick
)
Event = LauncherEvent | AgentEvent | WorkerEvent | WorkerToAgent


# ---- events that the launcher only logs


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """An attempt begins, on this number of hosts.

    listening:  addresses where agents connect
    reason:     why there is another attempt after the first
    agents:     the ranks of each agent; empty while it waits on a spare host
    """

    listening: str = ""
    reason: str = ""
    hosts: int = 0
    agents: Mapping[AgentId, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt has ended, and there will be another. The fields are those of its verdict."""

    outcome: str
    exit_code: int
    headline: str
    log: str
    divergence: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FreshInterpreters:
    """The workers are started in fresh interpreters, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class AgentTurnedAway:
    """An agent connected to a job that is already running, with another agent in its place or none."""

    agent: AgentId
    reason: str


@dataclass(frozen=True, slots=True)
class BadMessage:
    """This agent sent something that is not a message, and was disconnected for it."""

    agent: AgentId
    reason: str


@dataclass(frozen=True, slots=True)
class PeersDropped:
    """A number of peers were turned away at the head's port; `reason` is the last one's."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class SpareReported:
    """This agent is ready and waits on a spare host."""

    agent: AgentId
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class SpareLost:
    """An agent on a spare host is gone."""

    agent: AgentId
    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchCommandEnded:
    """mpirun or srun has ended with this status."""

    status: int


@dataclass(frozen=True, slots=True)
class StallNotice:
    """A line was printed that the job has made no progress for this number of seconds."""

    idle_s: float


LauncherNote = (
    AttemptStarted
    | AttemptEnded
    | FreshInterpreters
    | AgentTurnedAway
    | BadMessage
    | PeersDropped
    | SpareReported
    | SpareLost
    | LaunchCommandEnded
    | StallNotice
)


# ---- checks of what an agent or a worker may send to the head, beyond the types of its messages


def check_event(message: AgentToHead, *, agent: AgentId | None = None, ranks: Sequence[int] = ()) -> None:
    """Raise ProtocolError if this agent, or a worker of one of its ranks, cannot have sent this message legitimately.

    Anyone who knows the job's token, or writes to a worker's channel, can send any well-typed message. Such a message
    may only be about the sender and its own ranks, with values that are possible. The error's text completes "it sent
    …".
    """
    name = type(message).__name__
    if (sender := getattr(message, "agent", agent)) != agent:
        raise ProtocolError(f"a {name} of agent {sender}, which is another one")
    rank = getattr(message, "rank", None)
    if rank is not None and rank not in ranks:
        own = f"than {format_ranges(ranks, ',')}, its own" if ranks else "while it has none"
        raise ProtocolError(f"a {name} for another rank {own}")
    if not _is_possible(message):
        raise ProtocolError(f"a {name} that no process can mean: {message!r:.200}")


def _is_possible(message: AgentToHead) -> bool:
    match message:
        case AgentSignalled(signum=signum):
            return signum in _SIGNALS
        case WorkerExited(status=status):
            return -_LAST_SIGNAL <= status <= _MAX_STATUS
        case Failed(status=status):
            return 0 <= status <= _MAX_STATUS
        case ClockReply(asked_at=asked_at, time=time):
            return math.isfinite(asked_at) and math.isfinite(time)
        case HostFacts(port=port) | AgentReport(stage_port=port):
            return 0 <= port <= _MAX_PORT
        case FaultNotInjected(kind=kind):
            return kind in FAULT_KINDS
    return True
