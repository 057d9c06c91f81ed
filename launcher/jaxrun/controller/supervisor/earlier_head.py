"""A head that may take the place of another: the command of host 0 was started again (--wait-hosts).

Agents that have lost their head look for it under its name, and tell the one that they find what job they are of. So
before this head makes anything of a job, it asks the agents that come: the first one with a record decides that the
job continues. If all hosts are there and none has a record, a new job begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.verdict.restarts import Stop, lost_with_head
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.controller.seat import LinkId
from jaxrun.controller.supervisor.job_history import JobHistory
from jaxrun.controller.supervisor.remote_job import HeadPort
from jaxrun.controller.supervisor.transport import AgentConnection, ConnectedAgent, LinkHandler, Transport
from jaxrun.errors import EXIT_SIGNAL_BASE, EXIT_UNAVAILABLE, ProtocolError, UnavailableError
from jaxrun.node.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.node.channel.connection import AGENT_TO_HEAD
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Peer
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentConnected, AgentToHead, Shutdown
from jaxrun.protocol.job_record import JobRecord
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice
from jaxrun.text import format_ranges

_SAID_INTERVAL_S = 10.0  # between two lines about hosts that are missing
_SEND_S = 1.0  # for the last message to leave


class FoundAgents(Struct, frozen=True):
    """The agents that have come before the job began.

    record:  of the job that continues; None where a new one begins
    host:    of the agent that has told it
    """

    agents: tuple[ConnectedAgent, ...] = ()
    record: JobRecord | None = None
    host: str = ""


class EndedEarlyError(Exception):
    """A signal has asked for the end before there was a job; `status` is the exit status."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.status = EXIT_SIGNAL_BASE + signum


def find_agents(plan: Plan, port: HeadPort, loop: EventLoop) -> FoundAgents:
    """Wait for the agents of all other hosts, or for the first that knows a job; for --init-timeout at most.

    Raises EndedEarlyError.
    """
    if port.rendezvous is not None:
        port.rendezvous.write(port.token, format_addresses(port.listener.addresses))
    with contextlib.closing(_Arrival(plan, port, loop)) as arrival:
        return arrival.run()


class _Arrival:
    """The agents that come, until it is known which job this is."""

    def __init__(self, plan: Plan, port: HeadPort, loop: EventLoop) -> None:
        self._awaited = {agent for agent, ranks in plan.placement.agents.items() if ranks and agent != 0}
        self._numbers = {agent: number for number, agent in enumerate(sorted(plan.placement.agents))}
        self._loop = loop
        self._part = loop.part()
        self._transport = port.transport
        self._agents: dict[LinkId, AgentId] = {}
        self._messages: dict[LinkId, list[AgentToHead]] = {}
        self._record: JobRecord | None = None
        self._host = ""
        self._limit = plan.job.init_timeout
        self._began = self._said_at = loop.clock()
        self._part.add_timer(lambda: self._said_at + _SAID_INTERVAL_S, self._say_who_is_missing)
        self._transport.serve(
            LinkHandler(self._on_peer, lambda text: None, self._on_messages, self._on_lost, self._on_nonsense)
        )

    def run(self) -> FoundAgents:
        """Wait until it is known. Raises EndedEarlyError if a signal asks for the end before."""
        with SignalPipe(LAUNCHER_SIGNALS) as signals:
            if not self._loop.run_until(lambda: self._is_known, self._limit, signals):
                signum = next(filter(signals.asks_to_stop, signals.receive()), None)
                if signum is not None:
                    dismiss(self._transport, Shutdown(EXIT_SIGNAL_BASE + signum))
                    raise EndedEarlyError(signum)
        found = (ConnectedAgent(agent, one, tuple(self._messages[one])) for one, agent in self._agents.items())
        return FoundAgents(tuple(found), self._record, self._host)

    def close(self) -> None:
        self._transport.hold()
        self._part.close()

    @property
    def _there(self) -> set[AgentId]:
        """The agents that have chosen a connection."""
        return {agent for one, agent in self._agents.items() if self._messages[one]}

    @property
    def _is_known(self) -> bool:
        return self._record is not None or self._awaited <= self._there

    def _on_peer(self, peer: Peer) -> None:
        link = self._transport.add(AgentConnection(peer.connection, AGENT_TO_HEAD, peer.tags))
        self._agents[link], self._messages[link] = AgentId(peer.number), []
        self._transport.watch(link)

    def _on_messages(self, link: LinkId, arrived: Sequence[AgentToHead]) -> None:
        for message in arrived:
            if isinstance(message, AgentConnected) and message.record is not None:
                if self._record is None:
                    self._record, self._host = message.record, message.host
                message = replace(message, record=None)
            self._messages[link].append(message)

    def _on_lost(self, link: LinkId, why: str, is_silent: bool) -> None:
        del self._agents[link], self._messages[link]

    def _on_nonsense(self, link: LinkId, error: ProtocolError) -> None:
        self._transport.spoil(link, str(error))

    def _say_who_is_missing(self) -> None:
        self._said_at = now = self._loop.clock()
        missing = [self._numbers[agent] for agent in self._awaited - self._there]
        noun = "host" if len(missing) == 1 else "hosts"
        waited = f"after {now - self._began:.0f} s"
        print_notice(f"host 0 of {len(self._numbers)} waits for {noun} {format_ranges(missing, ',')} {waited}")


def dismiss(transport: Transport, order: Shutdown) -> None:
    """Tell agents that there is nothing for them to do."""
    transport.send_all(order)
    transport.flush(_SEND_S)
    transport.close()


class BegunJob(Struct, frozen=True):
    """A job that this launcher begins, or continues in the place of an earlier one.

    plan:     of the first attempt that this launcher makes; it waits for the agents that have not come
    history:  the attempts so far, the one that has lost its head too
    agents:   that have come already
    record:   of the job that continues; None where a new one begins
    """

    plan: Plan
    history: JobHistory
    agents: tuple[ConnectedAgent, ...] = ()
    record: JobRecord | None = None


def begin_or_continue(plan: Plan, port: HeadPort, loop: EventLoop, now: float) -> BegunJob:
    """Begin the job of this plan, or continue one that agents know, where a head may take the place of another.

    Raises UnavailableError if that one has no further attempt, and EndedEarlyError.
    """
    if not plan.head_may_return:
        return BegunJob(plan, JobHistory(now, now))
    found = find_agents(plan, port, loop)
    if found.record is None:
        return BegunJob(plan, JobHistory(now, now), found.agents)
    job = continue_job(plan, found, now)
    if isinstance(job, Stop):
        dismiss(port.transport, Shutdown(EXIT_UNAVAILABLE, headline=job.why))
        raise UnavailableError(job.why)
    print_notice(
        f"this job continues: {found.host} says that {job.plan.restart_reason}; attempt {job.plan.attempt} begins"
    )
    return job


def continue_job(plan: Plan, found: FoundAgents, now: float) -> BegunJob | Stop:
    """The job that agents know, in place of the one of this plan; or why it has no further attempt."""
    record = found.record
    assert record is not None
    lost = _describe_lost_attempt(record, now)
    end = lost_with_head(record.saved_step, left=record.head_left)
    history = JobHistory.of_record(record, now).add(lost, end, now)
    decision = history.decide(plan.job, record.attempt)
    if isinstance(decision, Stop):
        return Stop(f"{lost.headline}; {decision.why}")
    there = {AgentId(0), *(one.agent for one in found.agents)}
    known = plan.host_of | dict(record.hosts)
    agents = plan.placement.agents
    missing = {agent: known[ranks[0]] for agent, ranks in agents.items() if ranks and agent not in there}
    following = replace(
        plan,
        job=replace(plan.job, chaos=()),  # each fault happens once
        job_id=record.job_id,
        attempt=record.attempt + 1,
        restart_reason=lost.headline,
        placement=replace(plan.placement, awaited=missing),
    )
    return BegunJob(following, history, found.agents, record)


def _describe_lost_attempt(record: JobRecord, now: float) -> Verdict:
    host = record.hosts.get(0, "")
    where = f" ({host})" if host else ""
    what = "has left, as its pod was drained," if record.head_left else "was lost"
    return Verdict(
        "lost",
        EXIT_UNAVAILABLE,
        dict(record.hosts),
        headline=f"host 0{where} {what} in attempt {record.attempt}, and the head of the job with it",
        startup=0.0,
        run=max(0.0, now - record.began),
        attempt=record.attempt,
        before=max(0.0, record.began - record.started),
    )
