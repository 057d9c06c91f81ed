"""Serves the agents that connect from other hosts: passes their events to the head, and its actions to them.

It is the executor's link to them, and decides nothing. A lost host shows here first: as a connection
that the kernel gives up (channel/connection.py), or as a probe that is not answered (loss_watch.py).
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.controller.supervisor.agent_receiver import AgentReceiver, DroppedPeers
from jaxrun.controller.supervisor.connections import AgentConnection, AgentConnections, RemoteOutput
from jaxrun.controller.supervisor.executor import Executor
from jaxrun.controller.supervisor.host_search import HostSearch
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.loss_watch import LossWatch
from jaxrun.controller.supervisor.spare_agents import SpareAgents
from jaxrun.node.agent.agent import LISTENER, MESSAGES, OUTPUT
from jaxrun.node.channel.listener import Listener, Peer
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
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
from jaxrun.protocol.env import REQUEST_SIGNAL
from jaxrun.protocol.worker_messages import Failed, Run
from jaxrun.records.event_log.actions import RecordClock
from jaxrun.records.event_log.events import (
    AgentLost,
    HostsFound,
    LaunchCommandEnded,
    LauncherSignalled,
)

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.staging import Staged

_SHUTDOWN_SEND_S = 1.0  # for the last messages to leave
_AGENT_EXIT_S = 1.0  # for the agents that answer to end, before the engine ends those that do not


class AgentServer:
    """AgentLink to all agents of one job that are on other hosts."""

    def __init__(
        self,
        executor: Executor,
        listener: Listener,
        launch: LaunchProcess,
        job_info: JobInfo,
        spares: SpareAgents,
        search: HostSearch | None,
        earlier: AgentConnections | None = None,
        staged: Staged | None = None,
    ) -> None:
        """`job_info` is what each agent is sent first; `earlier` are the connections of the attempt before, if it has
        left agents; `search` is for hosts that have no agent, None where people start agents; `staged` is for takers.
        """
        context = executor.context
        command = context.plan.launch_command
        self._executor = executor
        self._dispatcher = context.dispatcher
        self._output = context.output
        self._clock = context.clock
        self._listener = listener
        self._launch = launch
        # Somebody else started this process beside the agents, and sends it the signals that they get.
        self._attached = command is not None and bool(command.attached_to)
        self._verbose = context.plan.job.verbose
        self._loop = executor.loop
        self._agents = context.plan.agents
        self._spares = spares
        self.connections = AgentConnections(self._loop, self._agents)
        self._earlier = earlier
        self._staged = staged
        self._search = search
        spares.attach(self.connections, context)
        self._receiver = AgentReceiver(
            self._loop,
            MESSAGES,
            self.connections,
            context,
            job_info,
            on_message=self._on_message,
            on_second_report=executor.handle,
            on_lost=self._on_lost,
        )
        self._remote_output = RemoteOutput(self._output, self.connections)
        self._losses = LossWatch(context, launch, self.connections, executor.handle, attached=self._attached)
        self._dropped_peers = DroppedPeers(self._dispatcher.record, self._clock)
        self.silent_agents: set[AgentId] = set()  # lost, because their hosts are silent
        self._signalled = False  # whether this process was asked to end, where the agents are as well
        self._outcome: JobOutcome | None = None

    def start(self) -> None:
        loop = self._loop
        loop.add_reader(self._launch.fileno(), OUTPUT, self._on_launch_output)
        dropped, expected = self._dropped_peers, len(self._agents)
        self._listener.attach(loop, LISTENER, self._on_peer, dropped.add, expected=expected)
        loop.add_timer(dropped.deadline, dropped.log)
        loop.add_poller(self._remote_output.acknowledge)
        loop.add_timer(lambda: self._losses.deadline, self._losses.tell)
        if self._earlier is not None:
            self._receiver.adopt(self._earlier)

    def complete(self, outcome: JobOutcome) -> JobOutcome:
        self._dropped_peers.log()
        if outcome.reason is EndReason.UNAVAILABLE and not self.all_reported:
            outcome = replace(outcome, text=self._launch.add_last_lines(outcome.text))
        self._outcome = outcome
        return outcome

    def close_loop(self) -> None:
        self._receiver.watches.close()
        self._loop.close()

    @property
    def uses_mpi(self) -> bool:
        """Whether the program uses the MPI that has started its ranks: another attempt needs it, too."""
        return self._outcome is not None and self._outcome.uses_mpi

    @property
    def usable_agents(self) -> set[AgentId]:
        """The agents that another attempt can have: they are connected, and have reported how all their ranks ended."""
        unanswered = {*(self._outcome.unanswered if self._outcome is not None else ())}
        return {
            agent
            for agent in self.connections.live & self._agents.keys()
            if unanswered.isdisjoint(ranks := self._agents[agent]) and (ranks or agent in self._spares.ready)
        }

    def shut_down_agents(self, status: int, *, job_goes_on: bool = False) -> None:
        """Tell all agents to end with `status`, and note what is known of them."""
        launch = self._launch
        launch.all_reported = self.all_reported
        launch.has_silent = bool(self.silent_ranks) or len(self.connections.live) < len(launch.command.agent_hosts)
        self.connections.send_all(Shutdown(status, job_goes_on))
        self.connections.flush(_SHUTDOWN_SEND_S)

    @property
    def all_reported(self) -> bool:
        return self._losses.all_reported

    @property
    def silent_ranks(self) -> set[int]:
        """The ranks whose agents were silent at the end of the job: they are stopped, or have not come in time."""
        unanswered = self._outcome.unanswered if self._outcome is not None else ()
        return {*unanswered, *(rank for agent in self._losses.unreported_agents for rank in self._agents[agent])}

    def close(self, *, wait: bool = True) -> None:
        """Close all connections; `wait` for agents that answer to end, where others do not."""
        self.connections.wait_for_end(_AGENT_EXIT_S if wait and self.silent_ranks else 0)
        for connection in self.connections:
            connection.close()
        self.close_loop()

    # ---- orders of the head

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        self._receiver.is_closed |= isinstance(order, Run)
        self.connections.send(ranks, order)

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        if isinstance(order, StartWorkers):
            self._remote_output.handle_start(order)
        self.connections.send_to_agents(agents, order)

    def look_for_hosts(self) -> None:
        if self._search is not None:
            self._search.begin()
            return
        there = sorted(self.connections.waiting & self.usable_agents)
        self._executor.handle(HostsFound(tuple(dict.fromkeys(map(self._spares.host_of, there)))))

    # ---- messages of agents

    def _on_peer(self, peer: Peer) -> None:
        if self._staged is not None and peer.purpose is Purpose.COPY:
            self._staged.give(peer)
        else:
            self._receiver.add(peer)

    def _on_message(self, agent: AgentId, connection: AgentConnection, message: AgentToHead) -> None:
        if agent in self.connections.waiting:
            if isinstance(message, AgentReport):
                self._spares.on_report(message)
        elif isinstance(message, AgentEvent):
            self._on_agent_event(message)
        else:
            self._on_worker_message(connection, message)

    def _on_agent_event(self, event: AgentEvent) -> None:
        match event:
            case AgentSignalled():
                self._losses.hold(event, probe=True)
            case AgentReport():
                ranks = self._agents.get(event.agent, ())
                self._losses.reported |= {event.agent} if ranks else set()
                for rank in ranks:
                    self._dispatcher.record(RecordClock(rank, self._clock() - event.time))
                self._launch.launch_id = self._launch.launch_id or event.launch_id
                self._executor.handle(event)
                self._spares.prepare()
            case _:
                self._executor.handle(event)

    def _on_worker_message(
        self, connection: AgentConnection, message: AgentMessage | OutputChunk | StreamEnded
    ) -> None:
        match message:
            case OutputChunk() | StreamEnded():
                self._remote_output.handle(message.rank, connection, message)
            case Failed():
                self._losses.failure_reported.add(message.rank)
                self._remote_output.log_traceback(message)
                self._losses.handle_or_hold(message)
            case WorkerExited():
                self._losses.handle_or_hold(message)
            case _:
                self._executor.receive(message)

    # ---- agents, hosts and the launch command go away

    def _on_lost(self, agent: AgentId, connection: AgentConnection) -> None:
        self._remote_output.forget(connection)
        self.silent_agents |= {agent} if connection.is_silent else set()
        if agent in self.connections.waiting:
            self._spares.on_lost(agent, connection.lost_reason)
        else:
            self._losses.hold(AgentLost(agent, connection.lost_reason), probe=False)

    def _on_launch_output(self) -> None:
        text = self._launch.read()
        if text is None:
            self._loop.remove_reader(self._launch.fileno())
        elif text and self._verbose:
            self._output.print_line(text.decode(errors="replace"))
        # A launch command that outlives its agents does not end where it cannot start one.
        if text and self._spares.hosts and self._launch.failed_agents() & self._losses.unreported_agents:
            said = self._launch.last_lines()
            self._executor.handle(StartFailed(f"{self._launch.title} could not start all agents; it said:\n{said}"))

    # ---- signals

    def on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._spares.on_child_exit()
            if self._search is not None:
                self._search.on_child_exit()
            if self._launch.status is None and self._launch.reap():
                self._dispatcher.record(LaunchCommandEnded(self._launch.status or 0))
                self._losses.hold(probe=True)
        elif not self._attached or signum in (signal.SIGQUIT, signal.SIGTSTP, REQUEST_SIGNAL):
            self._executor.handle(LauncherSignalled(signum))
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self.connections.send((0,), SignalWorker(signum))  # the agents of the other ranks have got it as well
        elif self._signalled:
            self._executor.handle(LauncherSignalled(signum))  # somebody insists
        else:
            self._signalled = True
            self._losses.hold(AgentSignalled(self.connections.agent_of(0), signum), probe=True)
