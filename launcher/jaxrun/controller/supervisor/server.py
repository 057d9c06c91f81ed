"""Serves the agents that connect from other hosts: passes their events to the head, and its actions to them.

For those agents it is what agent.py is for workers: it decides nothing. A lost host shows here first: as a connection
that the kernel gives up (channel/connection.py), or as a probe that is not answered (loss_watch.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.job_outcome import EndReason, JobOutcome
from jaxrun.controller.supervisor.agent_receiver import AgentReceiver
from jaxrun.controller.supervisor.connections import AgentClocks, AgentConnection, AgentConnections
from jaxrun.controller.supervisor.dropped_peers import DroppedPeers
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.loss_watch import LossWatch
from jaxrun.controller.supervisor.remote_output import RemoteOutput
from jaxrun.controller.supervisor.spare_agents import SpareAgents
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Listener
from jaxrun.protocol.agent_messages import (
    AgentReport,
    AgentSignalled,
    AgentToHead,
    FirstOutput,
    JobInfo,
    OutputChunk,
    Shutdown,
    SignalWorker,
    StartFailed,
    StartWorker,
    StreamEnded,
    WorkerExited,
)
from jaxrun.protocol.env import REQUEST_SIGNAL
from jaxrun.protocol.worker_messages import DeviceReport, Failed, Hello, Run
from jaxrun.records.event_log.actions import (
    Action,
    Finish,
    PrintLine,
    ReadTerminalLine,
    RecordClock,
    Send,
    ShowTerminalText,
    SignalRanks,
)
from jaxrun.records.event_log.events import (
    AgentLost,
    Event,
    LaunchCommandEnded,
    LauncherSignalled,
    SpareLost,
    SpareReported,
    TerminalLine,
)

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptContext

_AGENTS, _LISTENER, _SIGNALS, _LAUNCH_OUTPUT = range(4)  # the order in which readable descriptors are served
_SHUTDOWN_SEND_S = 1.0  # for the last messages to leave
_AGENT_EXIT_S = 1.0  # for the agents that answer to end, before the engine ends those that do not


class AgentServer:
    """The head's side of all agents of one job."""

    def __init__(
        self,
        context: AttemptContext,
        listener: Listener,
        launch: LaunchProcess,
        job_info: JobInfo,
        *,
        verbose: bool,
        attached: bool,
        spares: SpareAgents,
        earlier: AgentConnections | None = None,
    ) -> None:
        """`job_info` is what each agent is sent first; `earlier` are the connections of the attempt before, if it has
        left agents; `spares` are those that wait.

        `attached`: somebody else started this process beside the agents, and sends it the signals that they get."""
        self._dispatcher = context.dispatcher
        self._output = context.output
        self._signals = context.signals
        self._clock = context.clock
        self._parent = context.parent
        self._terminal = context.terminal
        self._listener = listener
        self._launch = launch
        self._verbose = verbose
        self._attached = attached
        self._loop = EventLoop(self._clock)
        self._numbers = context.plan.agents
        self._spares = spares
        self.connections = AgentConnections(self._loop, self._numbers)
        self._earlier = earlier
        self._receiver = AgentReceiver(
            self._loop,
            _AGENTS,
            self.connections,
            context,
            job_info,
            on_message=self._on_message,
            on_second_report=self._handle,
            on_lost=self._on_lost,
        )
        self._remote_output = RemoteOutput(self._output, self.connections)
        self._clocks = AgentClocks(self._clock)
        self._losses = LossWatch(context, launch, self.connections, self._clocks, self._handle, attached=attached)
        self._dropped_peers = DroppedPeers(self._dispatcher.record, self._clock)
        self._signalled = False  # whether this process was asked to end, where the agents are as well
        self.slurm_step = ""  # of which the agents are tasks, as the first of them has reported
        self._outcome: JobOutcome | None = None

    def run(self) -> JobOutcome:
        """Serve the job until the head says that it is over."""
        self._add_callbacks()
        if self._earlier is not None:
            self._receiver.adopt(self._earlier)
        while self._outcome is None:
            self._loop.run_once()
        self._dropped_peers.log()
        return self._outcome

    def close_loop(self) -> None:
        """The attempt is over, and the next takes over the connections."""
        self._loop.close()

    @property
    def usable_agents(self) -> set[int]:
        """The numbers of the agents that another attempt can have: they are there, and have reported all ends."""
        unanswered = map(self._numbers.of_rank, self._outcome.unanswered if self._outcome is not None else ())
        return self.connections.live - {*unanswered, *(self._numbers.waiting - self._spares.ready)}

    def shut_down_agents(self, status: int) -> None:
        """Tell all agents to end with `status`."""
        self.connections.send_all(Shutdown(status))
        self.connections.flush(_SHUTDOWN_SEND_S)

    @property
    def all_reported(self) -> bool:
        return self._losses.all_reported

    @property
    def silent_ranks(self) -> set[int]:
        """Those without whose agents the job has ended: they are stopped, or have not come in time."""
        unanswered = self._outcome.unanswered if self._outcome is not None else ()
        return {*unanswered, *(self._dispatcher.hosts.keys() - self._clocks.reported)}

    def close(self, *, wait: bool = True) -> None:
        """Close all connections; `wait` for agents that answer to end, where others do not."""
        self.connections.wait_for_end(_AGENT_EXIT_S if wait and self.silent_ranks else 0)
        for connection in self.connections:
            connection.close()
        self._loop.close()

    def _add_callbacks(self) -> None:
        loop = self._loop
        loop.add_reader(self._signals.fileno(), _SIGNALS, self._on_signals)
        loop.add_reader(self._launch.fileno(), _LAUNCH_OUTPUT, self._on_launch_output)
        if self._parent is not None:
            parent = self._parent
            loop.add_reader(parent.fileno(), _SIGNALS, lambda: self._execute_all(parent.receive()))
        dropped, expected = self._dropped_peers, len(self._dispatcher.hosts) + len(self._numbers.waiting)
        self._listener.attach(loop, _LISTENER, self._receiver.add, dropped.add, expected=expected)
        loop.add_timer(dropped.deadline, dropped.log)
        self._terminal.attach(loop, _SIGNALS, lambda line: self._handle(TerminalLine(line)))
        loop.add_poller(self._remote_output.acknowledge)
        loop.add_poller(self._output.flush_due)
        self._losses.attach(loop)
        dispatcher = self._dispatcher
        loop.add_timer(dispatcher.deadline, lambda: self._execute_all(dispatcher.handle_timeouts()))

    # ---- events to the head, and its actions

    def _handle(self, event: Event) -> None:
        self._execute_all(self._dispatcher.handle(event))

    def _execute_all(self, actions: Iterable[Action]) -> None:
        actions = list(actions)
        signals = [action for action in actions if isinstance(action, SignalRanks)]
        if any(action.signum == signal.SIGKILL for action in signals):
            # All stand still before the first is killed, or they would see each other die, and complain.
            self.connections.send([rank for action in signals for rank in action.ranks], SignalWorker(signal.SIGSTOP))
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        match action:
            case Send():
                if isinstance(action.message, StartWorker):
                    self._remote_output.handle_start(action.message)
                self._receiver.is_closed |= isinstance(action.message, Run)
                self.connections.send(action.ranks, action.message)
            case SignalRanks():
                self.connections.send(action.ranks, SignalWorker(action.signum))
            case PrintLine():
                self._output.print_line(f"jaxrun: {action.text}" if action.text else "", status=action.status)
            case ShowTerminalText():
                self._terminal.show(action.text)
            case ReadTerminalLine():
                self._terminal.read_line()
            case Finish():
                self._outcome = outcome = action.outcome
                if outcome.reason is EndReason.UNAVAILABLE and not self.all_reported:
                    self._outcome = replace(outcome, text=self._launch.add_last_lines(outcome.text))

    # ---- messages of agents

    def _on_message(self, rank: int, connection: AgentConnection, message: AgentToHead) -> None:
        match message:
            case _ if rank in self._numbers.waiting:
                if isinstance(message, AgentReport):
                    self._on_spare_report(message)
            case OutputChunk() | StreamEnded():
                self._remote_output.handle(rank, connection, message)
            case FirstOutput():
                self._dispatcher.record(message)
            case AgentSignalled():
                self._losses.hold(message, probe=True)
            case AgentReport():
                self._dispatcher.record(RecordClock(rank, self._clocks.add(message)))
                self.slurm_step = self.slurm_step or message.slurm_step
                self._handle(message)
                self._prepare_spares()
            case Hello() | DeviceReport():
                self._handle(self._clocks.correct(message))
            case Failed():
                self._losses.add_failure(rank)
                self._remote_output.log_traceback(message)
                self._losses.handle_or_hold(message)
            case WorkerExited():
                self._losses.handle_or_hold(message)
            case _:
                self._handle(message)

    # ---- agents that wait on spare hosts

    def _on_spare_report(self, report: AgentReport) -> None:
        self._dispatcher.record(SpareReported(report.rank, report.host, report.pid))
        reason = self._spares.add(report)
        if reason:
            self._output.print_line(f"jaxrun: spare host {report.host} cannot be used: {reason}")
        self._prepare_spares()

    def _prepare_spares(self) -> None:
        for number, start in self._spares.preparations(self._numbers.waiting):
            self.connections.send((number,), start)

    def _on_spare_lost(self, number: int, reason: str) -> None:
        host = self._spares.host_of(number)
        self._dispatcher.record(SpareLost(number, host, reason))
        if self._spares.lose(number):
            self._output.print_line(f"jaxrun: spare host {host} is lost: {reason}")

    # ---- agents, hosts and the launch command go away

    def _on_lost(self, rank: int, connection: AgentConnection) -> None:
        self._remote_output.forget(connection)
        if rank in self._numbers.waiting:
            self._on_spare_lost(rank, connection.lost_reason)
            return
        self._losses.hold(AgentLost(rank, connection.lost_reason), probe=False)

    def _on_launch_output(self) -> None:
        text = self._launch.read()
        if text is None:
            self._loop.remove_reader(self._launch.fileno())
        elif text and self._verbose:
            self._output.print_line(text.decode(errors="replace"))
        if text and self._spares.hosts and not self.all_reported:
            missing = {self._numbers.of_rank(rank) for rank in self._dispatcher.hosts.keys() - self._clocks.reported}
            if self._launch.failed_agents() & missing:  # the launch command outlives them, and does not end
                said = self._launch.last_lines()
                self._handle(StartFailed(f"{self._launch.title} could not start all agents; it said:\n{said}"))

    # ---- signals

    def _on_signals(self) -> None:
        for signum in self._signals.receive():
            if signum != signal.SIGCHLD:
                self._on_signal(signum)
            elif self._launch.status is None and self._launch.reap():
                self._dispatcher.record(LaunchCommandEnded(self._launch.status or 0))
                self._losses.hold(probe=True)

    def _on_signal(self, signum: int) -> None:
        if not self._attached or signum in (signal.SIGQUIT, REQUEST_SIGNAL):
            self._handle(LauncherSignalled(signum))
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self.connections.send((0,), SignalWorker(signum))  # the agents of the other ranks have got it as well
        elif self._signalled:
            self._handle(LauncherSignalled(signum))  # somebody insists
        else:
            self._signalled = True
            self._losses.hold(AgentSignalled(0, signum), probe=True)
