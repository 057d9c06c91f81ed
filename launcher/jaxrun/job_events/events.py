"""Events that the head handles, from the launcher itself, agents and workers; and events that are only logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import field

from jaxrun.errors import ProtocolError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentEvent,
    AgentToHead,
    WorkerEvent,
)
from jaxrun.protocol.codec import Message
from jaxrun.protocol.job_messages import Request
from jaxrun.protocol.worker_messages import WorkerToAgent
from jaxrun.text import format_ranges


class AgentLost(Message, frozen=True):
    """This agent has become unreachable, for this reason; its ranks are lost with it.

    ended_by_launch_command: mpirun or srun ended the agent because another one had ended
    """

    agent: AgentId
    reason: str
    ended_by_launch_command: bool = False


class LauncherSignalled(Message, frozen=True):
    """The launcher has received a signal."""

    signum: int


class Resumed(Message, frozen=True):
    """The launcher continues after a Suspend of `seconds` seconds."""

    paused_s: float


class SignalRequested(Message, frozen=True):
    """The process that the launcher works for, or a client of its socket, asks to send all workers a signal."""

    signum: int


class FaultRequested(Message, frozen=True):
    """The same for a fault to inject into these ranks; `kind` is one of FAULT_KINDS (job/fault_spec.py)."""

    kind: str
    ranks: tuple[int, ...]


class ParentExited(Message, frozen=True):
    """The process that the launcher works for is gone, or asks to end the job; `reason` says which."""

    reason: str


class EndRequested(Message, frozen=True):
    """A client of the job's socket, which `reason` names, asks to end the job now (jaxrun stop --now)."""

    reason: str


class Requested(Message, frozen=True):
    """Another process sends a request; `number` identifies it."""

    number: str
    request: Request


class RequestInput(Message, frozen=True):
    """The client of the request `number` sends it more bytes."""

    number: str
    data: bytes


class RequestEnded(Message, frozen=True):
    """The client of the request `number` needs no more answers, or has gone."""

    number: str


class HostsFound(Message, frozen=True):
    """These hosts, on which the job does not run, are back; the answer to LookForHosts."""

    hosts: tuple[str, ...]


class TerminalLine(Message, frozen=True):
    """A line that was typed for a debugger; empty at the end of the input."""

    line: str


class Tick(Message, frozen=True):
    """Time has passed."""


LauncherEvent = (
    AgentLost
    | LauncherSignalled
    | Resumed
    | SignalRequested
    | FaultRequested
    | ParentExited
    | EndRequested
    | Requested
    | RequestInput
    | RequestEnded
    | HostsFound
    | TerminalLine
    | Tick
)
Event = LauncherEvent | AgentEvent | WorkerEvent | WorkerToAgent


# ---- events that the launcher only logs


class AttemptStarted(Message, frozen=True):
    """An attempt begins, on this number of hosts.

    listening:  addresses where agents connect
    reason:     why there is another attempt after the first
    agents:     the ranks of each agent; empty while it waits on a spare host
    """

    listening: str = ""
    reason: str = ""
    hosts: int = 0
    agents: Mapping[AgentId, tuple[int, ...]] = field(default_factory=dict)


class AttemptEnded(Message, frozen=True):
    """An attempt has ended, and there will be another. The fields are those of its verdict."""

    outcome: str
    exit_code: int
    headline: str
    log: str
    divergence: str = ""
    details: tuple[str, ...] = ()


class FreshInterpreters(Message, frozen=True):
    """The workers are started in fresh interpreters, for this reason."""

    reason: str


class AgentTurnedAway(Message, frozen=True):
    """An agent connected to a job that is already running, with another agent in its place or none."""

    agent: AgentId
    reason: str


class BadMessage(Message, frozen=True):
    """This agent sent something that is not a message, and was disconnected for it."""

    agent: AgentId
    reason: str


class PeersDropped(Message, frozen=True):
    """A number of peers were turned away at the head's port; `reason` is the last one's."""

    count: int
    reason: str


class SpareReported(Message, frozen=True):
    """This agent is ready and waits on a spare host."""

    agent: AgentId
    host: str
    pid: int


class SpareLost(Message, frozen=True):
    """An agent on a spare host is gone."""

    agent: AgentId
    host: str
    reason: str


class LaunchCommandEnded(Message, frozen=True):
    """mpirun or srun has ended with this status."""

    status: int


class StallNotice(Message, frozen=True):
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


# ---- what the decoder of an agent's or a worker's message cannot know: who has sent it


def check_event(message: AgentToHead, *, agent: AgentId | None = None, ranks: Sequence[int] = ()) -> None:
    """Raise ProtocolError if this agent, or a worker of one of its ranks, cannot have sent this message legitimately.

    Anyone who knows the job's token, or writes to a worker's channel, can send any message. It may only be about the
    sender and its own ranks. The error's text completes "it sent …".
    """
    name = type(message).__name__
    if (sender := getattr(message, "agent", agent)) != agent:
        raise ProtocolError(f"a {name} of agent {sender}, which is another one")
    rank = getattr(message, "rank", None)
    if rank is not None and rank not in ranks:
        own = f"than {format_ranges(ranks, ',')}, its own" if ranks else "while it has none"
        raise ProtocolError(f"a {name} for another rank {own}")
