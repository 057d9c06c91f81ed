"""The agents of one attempt that are on other hosts: passes on what they report, and sends them orders.

It decides nothing: the head does, to which all events go; admission.py decides which agents are heard at all. A lost
host shows here first: as a connection that the kernel gives up (channel/connection.py), or as probes that are not
answered (channel/silence.py); losses.py says which loss came first.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.supervisor.admission import Admission, Entry
from jaxrun.controller.supervisor.agent_connections import (
    AgentConnection,
    AgentConnections,
    ConnectedAgent,
    DroppedPeers,
    HostWatches,
    RemoteOutput,
)
from jaxrun.controller.supervisor.attempt_loop import AttemptLoop
from jaxrun.controller.supervisor.engine_commands import HostSearch
from jaxrun.controller.supervisor.kept_record import KeptRecord
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.losses import ATTACHED_GRACE_S, LossWatch
from jaxrun.controller.supervisor.next_attempt_hosts import AgentsLeft
from jaxrun.controller.supervisor.quarantine_decision import HostsHeard
from jaxrun.controller.supervisor.spare_agents import SpareAgents
from jaxrun.errors import JaxrunError, ProtocolError
from jaxrun.node.agent.agent import LISTENER, MESSAGES, OUTPUT
from jaxrun.node.channel.connection import AGENT_TO_HEAD
from jaxrun.node.channel.listener import Listener, Peer
from jaxrun.node.channel.silence import SilenceLimit
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentEvent,
    AgentMessage,
    AgentOrder,
    AgentReport,
    AgentSignalled,
    AgentToHead,
    JobInfo,
    OutputChunk,
    RankOrder,
    Shutdown,
    SignalWorker,
    StartFailed,
    StartWorkers,
    StreamEnded,
    WorkerExited,
)
from jaxrun.protocol.auth import Purpose
from jaxrun.protocol.job_record import JobRecord
from jaxrun.protocol.stop_messages import CheckpointSaved
from jaxrun.protocol.worker_messages import Failed, Run
from jaxrun.records.event_log.actions import RecordClock
from jaxrun.records.event_log.events import (
    AgentLost,
    BadMessage,
    HostsFound,
    LaunchCommandEnded,
    LauncherSignalled,
    SpareLost,
    SpareReported,
    check_event,
)
from jaxrun.records.output.output import Output
from jaxrun.spec.job.plan import Plan

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.launcher_staging import Staged

_SHUTDOWN_SEND_S = 1.0  # for the last messages to leave
_BLAMED_EXIT_S = 0.2  # for a process to end after its connection, so that mpirun sees its status first
_AGENT_EXIT_S = 1.0  # for the agents that answer to end, before the engine ends those that do not


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where the agents of all attempts connect.

    job_info:  the first message to each agent
    staged:    copies for those that come to take them
    """

    listener: Listener
    job_info: JobInfo
    staged: Staged | None = None


@dataclass(frozen=True, slots=True)
class LaunchedAgents:
    """The commands that have started agents: the launch command, and the commands of agents on spare hosts."""

    launch: LaunchProcess
    spares: SpareAgents


class RemoteAgents:
    """AgentLink to the agents on other hosts."""

    def __init__(
        self,
        attempt: AttemptLoop,
        plan: Plan,
        entrance: Entrance,
        launched: LaunchedAgents,
        registry: AgentRegistry,
        output: Output,
        clock: Callable[[], float],
        search: HostSearch | None,
        earlier: RemoteAgents | None = None,
        record: JobRecord | None = None,
    ) -> None:
        """Serve agents in the loop of the attempt from now on.

        registry:  where the agents with ranks report
        search:    for hosts that have no agent; None if people start agents
        earlier:   agents of the attempt before that stay
        record:    what agents keep for another head; None where no head takes the place of this one
        """
        self._attempt = attempt
        self._plan = plan
        self._entrance = entrance
        self._registry = registry
        self._output = output
        self._clock = clock
        self._search = search
        self.launched = launched
        self._launch, self._spares = launched.launch, launched.spares
        # Someone else started this process beside the agents, and sends it the signals that they get.
        self._attached = bool(self._launch.command.attached_to)
        self.connections = AgentConnections(attempt.loop, plan.agents)
        limit = SilenceLimit.of_head(entrance.job_info.host_timeout, len(plan.agents))
        self._watches = HostWatches(limit, clock)
        self._remote_output = RemoteOutput(output, self.connections)
        self._losses = LossWatch(
            self._launch,
            self.connections,
            self._watches,
            clock,
            attached=self._attached,
            read_stderr=lambda rank: output.logs.read_stderr(rank),
        )
        self._dropped_peers = DroppedPeers(clock)
        self._record = KeptRecord(record, self.connections, clock)
        self._admission = Admission(
            attempt,
            plan,
            entrance.job_info,
            registry,
            self.connections,
            self._losses,
            self._record,
            output,
            clock,
        )
        self._sought: dict[AgentId, str] = {}  # awaited agents whose hosts are looked for
        self._silent_agents: set[AgentId] = set()  # lost, because their hosts are silent
        self._signalled = False  # whether this process was asked to end, where the agents are as well
        self._outcome: JobOutcome | None = None
        self._serve()
        if earlier is not None:
            earlier.close_loop()
            self._adopt(earlier)

    def _serve(self) -> None:
        loop, dropped = self._attempt.loop, self._dropped_peers
        loop.add_timer(lambda: self._watches.next_check, self._drop_silent)
        loop.add_reader(self._launch.fileno(), OUTPUT, self._on_launch_output)
        self._entrance.listener.attach(
            loop, LISTENER, self._on_peer, dropped.add, expected=len(self.connections.agents)
        )
        loop.add_timer(dropped.deadline, self._log_dropped_peers)
        loop.add_poller(self._remote_output.acknowledge)
        loop.add_timer(lambda: self._losses.deadline, self._explain_losses)
        loop.add_timer(lambda: self._admission.contests_due, self._settle_contests)
        loop.add_timer(lambda: self._record.due, lambda: self._record.send_all(self._attempt.hosts))

    # ---- the end of the attempt, and of the job

    def complete(self, outcome: JobOutcome) -> JobOutcome:
        """Note how the attempt ended; returns the outcome with what the launch command said, where that may be why."""
        self._log_dropped_peers()
        if outcome.reason is EndReason.UNAVAILABLE and not self._losses.all_reported:
            outcome = replace(outcome, text=self._launch.add_last_lines(outcome.text))
        self._outcome = outcome
        return outcome

    def end_search(self) -> list[LaunchProcess]:
        """Give up a search for hosts; returns its commands that still run, and have been told to end."""
        return self._search.close() if self._search is not None else []

    def left(self) -> AgentsLeft:
        """Return those of these agents that another attempt can use."""
        command, spares = self._launch.command, self._spares
        uses_mpi = self._outcome is not None and self._outcome.uses_mpi  # then another attempt needs its MPI, too
        stay, runs = command.agents_stay and not uses_mpi, not self._launch.reap()
        usable = self.usable_agents if runs or stay else set[AgentId]()
        survive = command.survive_host_loss and (stay or not command.agents_stay)
        hosts = command.agent_hosts if survive else ()
        return AgentsLeft(
            usable,
            {agent: host for number, host in enumerate(hosts) if (agent := AgentId(number)) in usable},
            self._registry.reported_ranks,
            spares.lost_hosts,
            self._search.found if self._search is not None else (),
        )

    def heard(self) -> HostsHeard:
        """Return what was received in this attempt, and from which hosts."""
        hosts, agents = self._plan.host_of, self._plan.agents
        reports = {**self._spares.reported}
        reports |= {hosts[agents[agent][0]]: report for agent, report in self._registry.reports.items()}
        silent = {agent: agents.get(agent, ()) for agent in self._silent_agents}
        return HostsHeard(
            reported=[*reports],
            # Both ends of the connection of an agent on the launcher's own host have one address.
            far=[host for host, one in reports.items() if one.address != one.head_address],
            silent=[hosts[ranks[0]] if ranks else self._spares.host_of(agent) for agent, ranks in silent.items()],
        )

    @property
    def usable_agents(self) -> set[AgentId]:
        """The agents that another attempt can have: they are connected, and have reported how all their ranks ended."""
        unanswered = {*(self._outcome.unanswered if self._outcome is not None else ())}
        agents = self.connections.agents
        return {
            agent
            for agent in (self.connections.live & agents.keys()) - self.drained
            if unanswered.isdisjoint(ranks := agents[agent]) and (ranks or agent in self._spares.ready)
        }

    @property
    def drained(self) -> frozenset[AgentId]:
        """The agents whose pods go away."""
        return self._outcome.drained if self._outcome is not None else frozenset()

    @property
    def silent_ranks(self) -> set[int]:
        """The ranks whose agents were silent at the end of the job: they are stopped, or have not come in time."""
        unanswered = self._outcome.unanswered if self._outcome is not None else ()
        agents = self.connections.agents
        return {*unanswered, *(rank for agent in self._losses.unreported_agents for rank in agents[agent])}

    def shut_down(
        self, status: int, *, job_goes_on: bool = False, headline: str = "", blamed: Collection[int] = ()
    ) -> None:
        """Tell all agents to end with `status`, and note what is known of them; `headline`: why the job failed.

        blamed:  the ranks whose agents alone end with `status`, the others with 0; empty for all agents
        """
        launch, connections = self._launch, self.connections
        launch.all_reported = self._losses.all_reported
        started = len(launch.command.agents or launch.command.agent_hosts)
        is_lost = launch.command.survive_host_loss and len(connections.live) < started
        launch.has_silent = bool(self.silent_ranks) or is_lost
        if self._outcome is not None and self._outcome.head_leaves:  # the others look for the head of another pod
            self._record.send_all(self._attempt.hosts, head_left=True)
            connections.send_to_agents({*self.drained, AgentId(0)}, Shutdown(status, headline=headline, leaves=True))
            connections.flush(_SHUTDOWN_SEND_S)
        elif blamed:
            of_blamed = {agent for agent, ranks in connections.agents.items() if not set(blamed).isdisjoint(ranks)}
            connections.send_to_agents(of_blamed, Shutdown(status, job_goes_on, headline))
            connections.send_to_agents(connections.agents.keys() - of_blamed, Shutdown(0, job_goes_on, headline))
            connections.flush(_SHUTDOWN_SEND_S)
            if AgentId(0) not in of_blamed:  # whose status is this process's own
                connections.wait_for_end(_AGENT_EXIT_S, of_blamed)
                time.sleep(_BLAMED_EXIT_S)
        else:
            connections.send_all(Shutdown(status, job_goes_on, headline))
            connections.flush(_SHUTDOWN_SEND_S)
            connections.end_sending()

    def close(self, *, wait: bool = True) -> None:
        """Close all connections; `wait` for agents that answer to end, where others do not."""
        self.connections.wait_for_end(_AGENT_EXIT_S if wait and self.silent_ranks else 0)
        for connection in self.connections:
            connection.close()
        self.close_loop()

    def close_loop(self) -> None:
        self._watches.close()
        self._attempt.loop.close()

    # ---- orders of the head

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        if isinstance(order, Run):
            self._admission.handle_run()
            self._record.handle_run()
        if isinstance(order, SignalWorker) and order.signum in (signal.SIGTERM, signal.SIGKILL):
            self._losses.stop_asking()
        self.connections.send(ranks, order)

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        if isinstance(order, StartWorkers):
            self._remote_output.handle_start(order)
        self.connections.send_to_agents(agents, order)

    def look_for_hosts(self, agents: tuple[AgentId, ...]) -> None:
        self._sought = {agent: self._plan.host_of[self.connections.agents[agent][0]] for agent in agents}
        if self._search is None:
            there = sorted(self.connections.waiting & self.usable_agents)
            self._attempt.handle(HostsFound(tuple(dict.fromkeys(map(self._spares.host_of, there)))))
        elif self._search.begin([*self._sought.values()]):
            self._on_hosts_found(self._search)

    def _on_hosts_found(self, search: HostSearch) -> None:
        """A look for hosts is over: start the agents that are awaited there."""
        for agent, host in self._sought.items():
            if host in search.found and agent not in self.connections.live:
                with contextlib.suppress(JaxrunError):  # the next look tries it again
                    self._spares.restarted.append(search.start_agent(agent, host))
        self._attempt.handle(HostsFound(search.found))

    # ---- agents connect

    def _on_peer(self, peer: Peer) -> None:
        staged = self._entrance.staged
        if staged is not None and peer.purpose is Purpose.COPY:
            staged.give(peer)
            return
        connection: AgentConnection = AgentConnection(peer.connection, AGENT_TO_HEAD, peer.tags)
        agent = AgentId(peer.number)
        if self._admission.greet(agent, connection):
            self._add_reader(agent, connection)

    def admit(self, agents: Iterable[ConnectedAgent]) -> None:
        """Let agents in that have come before this attempt."""
        for one in agents:
            self._admission.welcome(one.agent, one.connection)
            self._add_reader(one.agent, one.connection)
            self._handle_messages(one.agent, one.connection, one.messages)

    def _adopt(self, earlier: RemoteAgents) -> None:
        """Take over the agents of the earlier attempt."""
        for agent, connection in earlier.connections.items():
            if self._admission.adopt(agent, connection, leaves=agent in earlier.drained):
                self._add_reader(agent, connection)

    def _add_reader(self, agent: AgentId, connection: AgentConnection) -> None:
        read = partial(self._on_readable, agent, connection)
        self._attempt.loop.add_reader(connection.fileno(), MESSAGES, read)

    def _settle_contests(self) -> None:
        for contest in self._admission.settle_contests():
            for message in contest.messages:
                if self.connections.used_by(contest.agent) is contest.connection:  # else refused
                    self._on_message(contest.agent, contest.connection, message)

    def _log_dropped_peers(self) -> None:
        if (dropped := self._dropped_peers.take()) is not None:
            self._attempt.record(dropped)

    # ---- messages of agents

    def _on_readable(self, agent: AgentId, connection: AgentConnection) -> None:
        try:
            messages: Sequence[AgentToHead] = connection.receive()
        except ProtocolError as error:
            self._drop_for_nonsense(agent, connection, error)
            messages = ()
        self._handle_messages(agent, connection, messages)

    def _handle_messages(self, agent: AgentId, connection: AgentConnection, arrived: Sequence[AgentToHead]) -> None:
        for message in self._check(agent, connection, arrived):
            match self._admission.enter(agent, connection, message):
                case Entry.ADMITTED:
                    self._on_message(agent, connection, message)
                    if self.connections.used_by(agent) is not connection:  # refused
                        return
                case Entry.NAMED if isinstance(message, AgentReport):
                    self._attempt.handle(message)  # the head names both agents
                case Entry.REFUSED:
                    return
        if connection.lost_reason:
            was_used = self.connections.remove(agent, connection)
            self._admission.forget(connection)
            connection.close()
            if was_used:
                self._on_lost(agent, connection)

    def _check(
        self, agent: AgentId, connection: AgentConnection, messages: Sequence[AgentToHead]
    ) -> Sequence[AgentToHead]:
        """Return those of the messages that belong to this attempt; an invalid message ends the connection."""
        try:
            messages = self._admission.drop_stale(connection, messages)
            for message in messages:
                check_event(message, agent=agent, ranks=self.connections.agents.get(agent, ()))
        except ProtocolError as error:
            self._drop_for_nonsense(agent, connection, error)
            return ()
        return messages

    def _drop_for_nonsense(self, agent: AgentId, connection: AgentConnection, error: ProtocolError) -> None:
        connection.lost_reason = f"its agent sent something that is not a message of jaxrun: {error}"
        self._attempt.record(BadMessage(agent, connection.lost_reason))

    def _on_message(self, agent: AgentId, connection: AgentConnection, message: AgentToHead) -> None:
        if agent in self.connections.waiting:
            if isinstance(message, AgentReport):
                self._on_spare_report(message)
        elif isinstance(message, AgentReport) and self._admission.refuse_unfit(connection, message):
            return
        elif isinstance(message, AgentEvent):
            self._on_agent_event(message)
        else:
            self._on_worker_message(connection, message)

    def _on_agent_event(self, event: AgentEvent) -> None:
        match event:
            case AgentConnected():
                self._attempt.handle(replace(event, record=None))  # what it knows was of use before the attempt began
            case AgentSignalled():
                self._losses.hold(event, ask=True)
            case AgentReport():
                ranks = self.connections.agents.get(event.agent, ())
                self._losses.reported |= {event.agent} if ranks else set()
                for rank in ranks:
                    self._attempt.record(RecordClock(rank, self._clock() - event.time))
                self._launch.launch_id = self._launch.launch_id or event.launch_id
                self._attempt.handle(event)
                self._prepare_spares()
            case _:
                self._attempt.handle(event)

    def _on_worker_message(
        self, connection: AgentConnection, message: AgentMessage | OutputChunk | StreamEnded
    ) -> None:
        match message:
            case OutputChunk() | StreamEnded():
                self._remote_output.handle(message.rank, connection, message)
                return
            case CheckpointSaved():
                self._record.handle_saved(message.step)
            case Failed():
                self._losses.failure_reported.add(message.rank)
                self._remote_output.log_traceback(message)
        if not (isinstance(message, Failed | WorkerExited) and self._losses.hold_if_asking(message)):
            self._attempt.receive(message)

    # ---- agents that wait

    def lose_spare(self, agent: AgentId, reason: str) -> None:
        host = self._spares.host_of(agent)
        self._attempt.record(SpareLost(agent, host, reason))
        if self._spares.lose(agent, reason):
            self._output.print_line(f"jaxrun: spare host {host} is lost: {reason}")

    def _on_spare_report(self, report: AgentReport) -> None:
        self._attempt.record(SpareReported(report.agent, report.host, report.pid))
        if reason := self._spares.add_report(report, self._registry):
            self._output.print_line(f"jaxrun: spare host {report.host} cannot be used: {reason}")
        self._prepare_spares()

    def _prepare_spares(self) -> None:
        for agent, start in self._spares.take_starts(self.connections.waiting, self._registry):
            self.connections.send_to_agents((agent,), StartWorkers((start,), waits=True))

    # ---- agents, hosts and the launch command go away

    def _drop_silent(self) -> None:
        """Lose the hosts that are silent."""
        lost, notice = self._watches.check(self.connections)
        if notice:
            self._output.print_line(notice)
        for agent, connection in lost:
            self._on_readable(agent, connection)

    def _on_lost(self, agent: AgentId, connection: AgentConnection) -> None:
        self._remote_output.forget(connection)
        self._silent_agents |= {agent} if connection.is_silent else set()
        if agent in self.connections.waiting:
            self.lose_spare(agent, connection.lost_reason)
        else:
            self._losses.hold(AgentLost(agent, connection.lost_reason), ask=False)

    def _explain_losses(self) -> None:
        """Tell the head why agents have ended, once it is known which hosts are alive."""
        unanswered = self._losses.unanswered()
        if unanswered and not self._attached:
            self._losses.wait_for_hosts()
            return
        for agent, connection in unanswered:  # what has started this process will end it before more can be known
            connection.give_up(ATTACHED_GRACE_S)
            self._on_readable(agent, connection)
        for event in self._losses.explain(self._attempt.hosts, self._silent_agents):
            self._attempt.handle(event)

    def _on_launch_output(self) -> None:
        text = self._launch.read()
        if text is None:
            self._attempt.loop.remove_reader(self._launch.fileno())
        elif text and self._plan.job.verbose:
            self._output.print_line(text.decode(errors="replace"))
        # One that outlives its agents does not end if it cannot start one of them; any other says why once it ends.
        survives = self._launch.command.survive_host_loss
        if text and survives and self._launch.failed_agents() & self._losses.unreported_agents:
            self._attempt.handle(StartFailed(self._launch.describe_failed_start()))

    # ---- signals

    def on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._on_child_exit()
        elif not self._attached or signum in (signal.SIGQUIT, signal.SIGTSTP):
            self._attempt.handle(LauncherSignalled(signum))
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self.connections.send((0,), SignalWorker(signum))  # the agents of the other ranks have got it as well
        elif self._signalled:
            self._attempt.handle(LauncherSignalled(signum))  # a second signal
        else:
            self._signalled = True
            self._losses.hold(AgentSignalled(self.connections.agent_of(0), signum), ask=True)

    def _on_child_exit(self) -> None:
        for agent, reason in self._spares.reap().items():
            self.lose_spare(agent, reason)
        if self._search is not None and self._search.on_child_exit():
            self._on_hosts_found(self._search)
        if self._launch.status is None and self._launch.reap():
            self._attempt.record(LaunchCommandEnded(self._launch.status or 0))
            self._losses.hold(ask=True)
