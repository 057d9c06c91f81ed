"""Which agents are admitted to an attempt, and which are refused.

    connects ── greet ──▶ refused, or welcomed: told which job and attempt this is
    speaks ──── enter ──▶ ADMITTED   the job has this agent, on this connection
                          CONTENDS   another agent has the place, and may be lost: contests.py
                          NAMED      another agent has the place, and the program does not run: the head names both
                          REFUSED    another agent has the place, and the program runs
                          IGNORED    a second path of an agent that speaks on the first one

From each agent only one connection counts, and nothing that belongs to an earlier attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.supervisor.agent_connections import AgentConnection, AgentConnections
from jaxrun.controller.supervisor.attempt_loop import AttemptLoop
from jaxrun.controller.supervisor.contests import CHECK_INTERVAL_S, Claim, Contest, Contests
from jaxrun.controller.supervisor.kept_record import KeptRecord
from jaxrun.controller.supervisor.losses import LossWatch
from jaxrun.errors import EXIT_PREEMPTED, NotUniformError, UnavailableError
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentRefused, AgentReport, AgentToHead, JobInfo, NextAttempt, Shutdown
from jaxrun.records.event_log.events import AgentTurnedAway
from jaxrun.records.output.output import Output
from jaxrun.spec.job.plan import Plan
from jaxrun.text import format_ranks


class Entry(enum.Enum):
    """What becomes of a message from a connection; the module's docstring explains each."""

    ADMITTED = enum.auto()
    CONTENDS = enum.auto()
    NAMED = enum.auto()
    REFUSED = enum.auto()
    IGNORED = enum.auto()


@dataclass(frozen=True, slots=True)
class Place:
    """What the job knows of an agent's place when a connection speaks for that agent.

    is_its_own:     the agent uses this connection already
    is_taken:       the agent uses another connection
    is_forsaken:    the agent on that connection has not answered since the attempt before, and its host is awaited
    loss_is_held:   the agent is lost, and the head does not know it yet
    """

    is_its_own: bool
    is_taken: bool
    is_forsaken: bool
    loss_is_held: bool


def decide_entry(place: Place, *, waits: bool, runs: bool, is_report: bool) -> Entry:
    """Decide what becomes of a message from a connection.

    waits:      the job waits for lost hosts, so that an agent may come in the place of another
    runs:       the program runs
    is_report:  the message is the agent's report, its first claim to the place
    """
    if place.is_its_own:
        return Entry.ADMITTED
    if waits and not place.is_forsaken and (place.is_taken or place.loss_is_held):
        return Entry.CONTENDS
    if not place.is_taken or place.is_forsaken:
        return Entry.ADMITTED
    if not is_report:
        return Entry.IGNORED
    return Entry.REFUSED if runs else Entry.NAMED


class Admission:
    """Admits agents to one attempt, refuses agents, and settles who of two gets a place.

    contests_due:  when to check whether a contest is decided; None without a contest
    """

    def __init__(
        self,
        attempt: AttemptLoop,
        plan: Plan,
        job_info: JobInfo,
        registry: AgentRegistry,
        connections: AgentConnections,
        losses: LossWatch,
        record: KeptRecord,
        output: Output,
        clock: Callable[[], float],
    ) -> None:
        """`job_info` is the first message to each agent; `record` is what each one keeps of the job."""
        self._attempt = attempt
        self._plan = plan
        self._job_info = job_info
        self._registry = registry
        self._connections = connections
        self._losses = losses
        self._record = record
        self._output = output
        self._clock = clock
        self._waits = plan.job.host_wait > 0
        self._runs = False  # once the program runs; until then the head names agents that do not fit
        self._stale: set[AgentConnection] = set()  # for these connections, only the end of the earlier attempt counts
        self._contests = Contests()
        self.contests_due: float | None = None

    def handle_run(self) -> None:
        """The program begins: an agent whose place is taken is refused from now on."""
        self._runs = True

    # ---- an agent connects

    def greet(self, agent: AgentId, connection: AgentConnection) -> bool:
        """Welcome an agent that has connected, or refuse it; returns whether it is welcome."""
        connections = self._connections
        may_come = agent in (connections.agents if self._waits else connections.waiting)
        if self._runs and not may_come:
            self._refuse(agent, connection)
            return False
        self.welcome(agent, connection)
        return True

    def welcome(self, agent: AgentId, connection: AgentConnection) -> None:
        """Tell an agent which job and attempt this is."""
        plan, connections = self._plan, self._connections
        attempt = plan.attempt if connections.agents.get(agent) or plan.is_started_by_hand else 0
        connections.send_to(connection, replace(self._job_info, attempt=attempt))
        self._record.send_to(connection)
        connections.add_unused(agent, connection)

    def adopt(self, agent: AgentId, connection: AgentConnection, *, leaves: bool) -> bool:
        """Tell an agent of the earlier attempt to end that one; returns whether this attempt has a place for it.

        What it still sends of the earlier attempt is dropped. `leaves`: its pod goes away.
        """
        connections = self._connections
        if leaves or agent not in connections.agents:
            connection.send(Shutdown(EXIT_PREEMPTED, leaves=True) if leaves else Shutdown(0))
            connection.close()
            return False
        if not connections.add(agent, connection):
            connections.add_unused(agent, connection)
        if ranks := connections.agents[agent]:
            self._stale.add(connection)
            connections.send_to(connection, NextAttempt(self._plan.attempt, ranks))
            self._record.send_to(connection)
        return True

    # ---- an agent speaks

    def drop_stale(self, connection: AgentConnection, messages: Sequence[AgentToHead]) -> Sequence[AgentToHead]:
        """Return the messages that belong to this attempt: from the report on with which the agent begins it."""
        if connection not in self._stale:  # in the earlier attempt it may have had other ranks
            return messages
        for index, message in enumerate(messages):
            if isinstance(message, AgentReport) and message.attempt == self._plan.attempt:
                self._stale.discard(connection)
                return messages[index:]
        return []

    def enter(self, agent: AgentId, connection: AgentConnection, message: AgentToHead) -> Entry:
        """Decide what becomes of this message, and give the agent its place or refuse it."""
        connections = self._connections
        earlier = connections.used_by(agent)
        place = Place(
            is_its_own=earlier is connection,
            is_taken=earlier is not None and earlier is not connection,
            is_forsaken=earlier in self._stale and agent in self._plan.awaited,
            loss_is_held=agent in self._losses.held_losses,
        )
        entry = decide_entry(place, waits=self._waits, runs=self._runs, is_report=isinstance(message, AgentReport))
        match entry:
            case Entry.ADMITTED:
                if earlier is not None and earlier is not connection:
                    self._give_up(agent, earlier)
                connections.add(agent, connection)
            case Entry.CONTENDS:
                self._contests.add(agent, connection, message, earlier)
                self.contests_due = self._clock()
            case Entry.REFUSED:
                self._turn_away(agent, connection)
        return entry

    def forget(self, connection: AgentConnection) -> None:
        """A connection is lost: its agent claims no place any more."""
        self._contests.remove(connection)

    def settle_contests(self) -> list[Contest]:
        """Return the later agents that have got their place now; the others are refused or wait on."""
        connections, admitted = self._connections, list[Contest]()
        for contest, claim in self._contests.take_decided(dict(connections.used()), self._losses.held_losses):
            if claim is Claim.TAKEN or not connections.add(contest.agent, contest.connection):
                self._turn_away(contest.agent, contest.connection)
            else:
                admitted.append(contest)
        self.contests_due = self._clock() + CHECK_INTERVAL_S if self._contests.are_open else None
        return admitted

    def refuse_unfit(self, connection: AgentConnection, report: AgentReport) -> bool:
        """Refuse an agent that replaces another, but does not fit the job; returns whether it was refused."""
        if not self._waits or not (self._runs or self._plan.attempt > 1):
            return False
        try:
            self._registry.check_command(report)
            self._registry.check_installation(report)
        except (UnavailableError, NotUniformError) as error:
            self._output.print_line(f"jaxrun: {report.host} cannot take the place of a lost host: {error}")
            self._turn_away(report.agent, connection, str(error))
            return True
        return False

    # ---- an agent is refused

    def _give_up(self, agent: AgentId, connection: AgentConnection) -> None:
        """Forget an agent that is connected, but has not answered since the end of an earlier attempt."""
        self._connections.remove(agent, connection)
        self._stale.discard(connection)
        connection.close()

    def _turn_away(self, agent: AgentId, connection: AgentConnection, reason: str = "") -> None:
        """Refuse an agent that has connected, and continue without it."""
        self._connections.remove(agent, connection)
        self._refuse(agent, connection, reason)

    def _refuse(self, agent: AgentId, connection: AgentConnection, reason: str = "") -> None:
        """Tell an agent that the job has no place for it, or the `reason`, and close its connection."""
        hosts, ranks = self._attempt.hosts, self._connections.agents.get(agent, ())
        if reason:
            text = reason
        elif ranks:
            text = f"this job runs already: its {format_ranks(ranks)} is another process, on {hosts[ranks[0]]}"
        else:
            text = f"this job runs already, with {len(hosts)} processes: none is rank {agent}"
        self._attempt.record(AgentTurnedAway(agent, text))
        connection.send(AgentRefused(text, is_taken=self._waits and bool(ranks) and not reason))
        connection.close()
