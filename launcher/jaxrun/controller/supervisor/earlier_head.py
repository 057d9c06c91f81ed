"""A head that may take the place of another: the command of host 0 was started again (--wait-hosts).

Agents that have lost their head look for it under its name, and tell the one that they find what job they are of. So
before this head makes anything of a job, it asks the agents that come: the first one with a record decides that the
job continues. If all hosts are there and none has a record, a new job begins.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from jaxrun.analysis.verdict import verdict as verdict_file
from jaxrun.analysis.verdict.restarts import Restart, Stop, decide_restart, lost_with_head
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.controller.supervisor.agent_connections import AgentConnection, ConnectedAgent
from jaxrun.controller.supervisor.remote_job import HeadPort
from jaxrun.errors import EXIT_SIGNAL_BASE, EXIT_UNAVAILABLE, ProtocolError, UnavailableError
from jaxrun.node.agent.agent import LISTENER, MESSAGES, SIGNALS
from jaxrun.node.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.node.channel.connection import AGENT_TO_HEAD
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Peer
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentConnected, AgentToHead, Shutdown
from jaxrun.protocol.job_record import AttemptEnd, JobRecord
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice
from jaxrun.text import format_ranges

_SAID_INTERVAL_S = 10.0  # between two lines about hosts that are missing
_ANSWERING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SEND_S = 1.0  # for the last message to leave
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class FoundAgents:
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


def find_agents(plan: Plan, port: HeadPort) -> FoundAgents:
    """Wait for the agents of all other hosts, or for the first that knows a job; for --init-timeout at most.

    Raises EndedEarlyError.
    """
    if port.rendezvous is not None:
        port.rendezvous.write(port.token, format_addresses(port.listener.addresses))
    with contextlib.closing(_Arrival(plan, port)) as arrival:
        return arrival.run()


class _Arrival:
    """The agents that come, until it is known which job this is."""

    def __init__(self, plan: Plan, port: HeadPort) -> None:
        self._awaited = {agent for agent, ranks in plan.agents.items() if ranks and agent != 0}
        self._numbers = {agent: number for number, agent in enumerate(sorted(plan.agents))}
        self._loop = loop = EventLoop(time.monotonic)
        self._signals = SignalPipe(LAUNCHER_SIGNALS)
        self._agents: dict[AgentConnection, AgentId] = {}
        self._messages: dict[AgentConnection, list[AgentToHead]] = {}
        self._record: JobRecord | None = None
        self._host = ""
        self._signum = 0
        self._began = time.monotonic()
        self._until = self._began + plan.job.init_timeout
        self._said_at = self._began
        loop.add_timer(lambda: min(self._until, self._said_at + _SAID_INTERVAL_S), self._say_who_is_missing)
        port.listener.attach(loop, LISTENER, self._on_peer, expected=len(self._awaited))

    def run(self) -> FoundAgents:
        with self._signals as signals:
            self._loop.add_reader(signals.fileno(), SIGNALS, self._on_signals)
            while not self._is_over:
                self._loop.run_once()
            if self._signum:
                dismiss(self._agents, Shutdown(EXIT_SIGNAL_BASE + self._signum))
                raise EndedEarlyError(self._signum)
        found = (ConnectedAgent(agent, one, tuple(self._messages[one])) for one, agent in self._agents.items())
        return FoundAgents(tuple(found), self._record, self._host)

    def close(self) -> None:
        self._loop.close()

    @property
    def _there(self) -> set[AgentId]:
        """The agents that have chosen a connection."""
        return {agent for one, agent in self._agents.items() if self._messages[one]}

    @property
    def _is_over(self) -> bool:
        is_known = self._record is not None or self._awaited <= self._there
        return is_known or bool(self._signum) or time.monotonic() >= self._until

    def _on_peer(self, peer: Peer) -> None:
        connection: AgentConnection = AgentConnection(peer.connection, AGENT_TO_HEAD, peer.tags)
        self._agents[connection] = AgentId(peer.number)
        self._messages[connection] = []
        self._loop.add_reader(connection.fileno(), MESSAGES, partial(self._read, connection))

    def _read(self, connection: AgentConnection) -> None:
        try:
            arrived = connection.receive()
        except ProtocolError as error:
            connection.lost_reason, arrived = str(error), []
        for message in arrived:
            if isinstance(message, AgentConnected) and message.record is not None:
                if self._record is None:
                    self._record, self._host = message.record, message.host
                message = replace(message, record=None)
            self._messages[connection].append(message)
        if connection.lost_reason:
            self._loop.remove_reader(connection.fileno())
            connection.close()
            del self._agents[connection], self._messages[connection]

    def _on_signals(self) -> None:
        self._signum = next((one for one in self._signals.receive() if one in _ANSWERING), self._signum)

    def _say_who_is_missing(self) -> None:
        now = time.monotonic()
        if now < self._said_at + _SAID_INTERVAL_S:
            return
        self._said_at = now
        missing = [self._numbers[agent] for agent in self._awaited - self._there]
        noun = "host" if len(missing) == 1 else "hosts"
        waited = f"after {now - self._began:.0f} s"
        print_notice(f"host 0 of {len(self._numbers)} waits for {noun} {format_ranges(missing, ',')} {waited}")


def dismiss(connections: Iterable[AgentConnection], order: Shutdown) -> None:
    """Tell agents that there is nothing for them to do."""
    waiting = tuple(connections)
    for connection in waiting:
        connection.send(order)
    until = time.monotonic() + _SEND_S
    while any(one.flush_due() is not None for one in waiting) and time.monotonic() < until:
        time.sleep(_POLL_S)
    for connection in waiting:
        connection.close()


@dataclass(frozen=True, slots=True)
class BegunJob:
    """A job that this launcher begins, or continues in the place of an earlier one.

    plan:          of the first attempt that this launcher makes
    started:       when the job began, in seconds since the epoch
    agents:        that have come already
    record:        of the job that continues; None where a new one begins
    continued_at:  when it was continued
    ends:          how the attempts so far have ended, the one that has lost its head too
    earlier:       the verdicts on them
    """

    plan: Plan
    started: float
    agents: tuple[ConnectedAgent, ...] = ()
    record: JobRecord | None = None
    continued_at: float | None = None
    ends: tuple[AttemptEnd, ...] = ()
    earlier: tuple[Verdict, ...] = ()


def begin_or_continue(plan: Plan, port: HeadPort, now: float) -> BegunJob:
    """Begin the job of this plan, or continue one that agents know, where a head may take the place of another.

    Raises UnavailableError if that one has no further attempt, and EndedEarlyError.
    """
    if not plan.head_may_return:
        return BegunJob(plan, now)
    found = find_agents(plan, port)
    if found.record is None:
        return BegunJob(plan, now, found.agents)
    job = continue_job(plan, found, now)
    if isinstance(job, Stop):
        dismiss([one.connection for one in found.agents], Shutdown(EXIT_UNAVAILABLE, headline=job.why))
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
    ends = (*record.ends, lost_with_head(record.saved_step, left=record.head_left))
    first = record.attempt - len(record.ends)
    decision = decide_restart(ends, plan.job.max_restarts, plan.job.restart_on, first_attempt=first)
    if not isinstance(decision, Restart):
        return Stop(f"{lost.headline}; {decision.why}")
    there = {AgentId(0), *(one.agent for one in found.agents)}
    known = plan.host_of | dict(record.hosts)
    missing = {agent: known[ranks[0]] for agent, ranks in plan.agents.items() if ranks and agent not in there}
    following = replace(
        plan,
        job=replace(plan.job, chaos=()),  # each fault happens once
        job_id=record.job_id,
        attempt=record.attempt + 1,
        restart_reason=lost.headline,
        awaited=missing,
    )
    earlier = (*map(verdict_file.from_json, record.verdicts), lost)
    return BegunJob(following, record.started, found.agents, record, now, ends, earlier)


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
