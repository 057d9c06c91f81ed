"""Supervises the workers of one host: reports their messages and exits to the head, and executes the head's actions.

The head is in this process, behind the supervisor's Dispatcher, or elsewhere, behind a HeadClient. The agent is the
parent of its workers and, as a subreaper, of whatever they leave behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.stacks import FATAL_ERROR
from jaxrun.errors import EXIT_SOFTWARE, ProtocolError
from jaxrun.node.agent.oom import OomWatch, own_memory_cgroup
from jaxrun.node.agent.pipes import OutputPipes
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.agent.snapshot_reader import SnapshotReader
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_messages import (
    ClockProbe,
    ClockReply,
    FaultNotInjected,
    FirstOutput,
    InjectFault,
    NextAttempt,
    Shutdown,
    StartWorker,
    WorkerExited,
)
from jaxrun.protocol.probe_messages import ProbePeers
from jaxrun.protocol.snapshot_messages import ProgramDetailsReply, ProgramDetailsRequest, RankQuery, RecorderSnapshot
from jaxrun.protocol.worker_messages import Done, Failed, ProfileCalls, Run, WorkerStage
from jaxrun.records.event_log.actions import (
    Action,
    Finish,
    MessageToRank,
    PrintLine,
    ReadTerminalLine,
    Send,
    ShowTerminalText,
    SignalRanks,
)
from jaxrun.records.event_log.event_checks import check_event
from jaxrun.records.event_log.events import Event, FreshInterpreters, LauncherSignalled, TerminalLine
from jaxrun.records.output.drain import OutputSink

if TYPE_CHECKING:
    from jaxrun.node.agent.head_client import ActionSource, DebuggerConsole, HeadInterface

LastAction = Finish | NextAttempt | Shutdown

_MESSAGES, _SIGNALS, _OUTPUT = range(3)  # the order in which readable descriptors are served


class Agent:
    """All workers of one plan on this host."""

    def __init__(
        self,
        workers: WorkerGroup,
        head: HeadInterface,
        output: OutputSink,
        signals: SignalPipe,
        clock: Callable[[], float],
        source: ActionSource | None = None,
        terminal: DebuggerConsole | None = None,
    ) -> None:
        """`terminal` is there where the head is in this process."""
        self._workers = workers
        self._head = head
        self._output = output
        self._signals = signals
        self._clock = clock
        self._source = source
        self._terminal = terminal
        self._pipes = OutputPipes(output, lambda rank: head.record(FirstOutput(rank)))
        self._loop = EventLoop(clock)
        self._oom = OomWatch(own_memory_cgroup())
        self._snapshots = SnapshotReader(workers, output, clock)
        self._last: LastAction | None = None

    def run(self) -> LastAction:
        """Start the workers and serve them until the head says that it is over; returns its last action."""
        loop, head = self._loop, self._head
        loop.add_reader(self._signals.fileno(), _SIGNALS, self._on_signals)
        if self._source is not None:
            loop.add_reader(self._source.fileno(), _MESSAGES, self._on_actions)
        if self._terminal is not None:
            self._terminal.attach(loop, _MESSAGES, lambda line: self._report(TerminalLine(line)))
        loop.add_poller(self._output.flush_due)
        loop.add_poller(self._pause_or_resume_output)
        loop.add_timer(self._snapshots.deadline, self._report_snapshots)
        loop.add_timer(head.deadline, lambda: self._execute_all(head.handle_timeouts()))
        events = self._workers.start()
        if self._workers.fork_server is not None:
            loop.add_reader(self._workers.fork_server.channel.fileno(), _MESSAGES, self._on_fork_server)
        self._add_workers(events)
        self._on_actions()  # those that came together with the order to start are not announced by the descriptor
        while self._last is None:
            loop.run_once()
        return self._last

    def close(self) -> None:
        """Hand over what is still in the pipes and close everything."""
        self._snapshots.close()
        self._pipes.close()
        self._workers.close()
        self._oom.close()
        self._loop.close()

    def _add_workers(self, events: Iterable[Event]) -> None:
        """Listen to the workers that are there now, then report the events of their start."""
        for worker in self._workers:
            self._loop.add_reader(worker.pipes.channel.fileno(), _MESSAGES, partial(self._on_channel, worker))
            self._pipes.add(worker.rank, worker.pipes.out, worker.pipes.err)
        self._report_all(events)

    def _pause_or_resume_output(self) -> None:
        """Read what the workers write only while the output takes more: their pipes then stop them."""
        fd = self._pipes.fileno()
        if self._output.congested:
            self._loop.remove_reader(fd)
        elif not self._loop.has_reader(fd):
            self._loop.add_reader(fd, _OUTPUT, self._pipes.read_ready)

    # ---- events to the head, and its actions

    def _report_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._report(event)

    def _report(self, event: Event) -> None:
        self._execute_all(self._head.handle(event))

    def _execute_all(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        match action:
            case Send():
                for rank in action.ranks:
                    self._deliver(rank, action.message)
            case SignalRanks():
                self._signal(action)
            case PrintLine():
                self._output.print_line(f"jaxrun: {action.text}" if action.text else "", status=action.status)
            case ShowTerminalText() if self._terminal is not None:
                self._terminal.show(action.text)
            case ReadTerminalLine() if self._terminal is not None:
                self._terminal.read_line()
            case Finish() | NextAttempt() | Shutdown():
                self._last = action

    def _deliver(self, rank: int, message: MessageToRank) -> None:
        """Carry out what is meant for the agent of this rank, and send its worker the rest."""
        worker = self._workers[rank]
        match message:
            case InjectFault():
                if reason := worker.inject_fault(message.kind):
                    self._report(FaultNotInjected(rank, message.kind, reason))
            case ClockProbe():
                self._report(ClockReply(rank, message.asked_at, time.time()))  # by which the worker's calls are timed
            case RankQuery():
                self._report_all(self._snapshots.request(rank, message))
            case ProgramDetailsRequest():
                details = worker.flight.program_details(message.program)
                self._report(ProgramDetailsReply(rank, message.program, details))
            case ProfileCalls():
                worker.send(message)
                worker.flight.raise_orders()
            case StartWorker() | ProbePeers():
                raise AssertionError("this agent has its workers already")
            case _:
                worker.send(message)
                if isinstance(message, Run):
                    self._workers.prepare_successor()

    def _signal(self, action: SignalRanks) -> None:
        if action.signum == signal.SIGKILL:
            # All stand still before the first is killed, or they would see each other die, and complain.
            for rank in action.ranks:
                self._workers[rank].signal(signal.SIGSTOP)
            # Its resource tracker will complain of what it had no time to remove.
            for rank in action.ranks:
                self._pipes.hide(rank)
        for rank in action.ranks:
            self._workers[rank].signal(action.signum)

    # ---- what happens

    def _on_actions(self) -> None:
        if self._source is not None:
            self._execute_all(self._source.receive())

    def _on_fork_server(self) -> None:
        server = self._workers.fork_server
        assert server is not None
        fd = server.channel.fileno()
        events = self._workers.receive_forked()
        if self._workers.fork_server is None:
            self._loop.remove_reader(fd)
        self._report_all(events)
        if self._workers.declined:
            self._head.record(FreshInterpreters(self._workers.declined))
            for worker in self._workers:
                self._loop.remove_reader(worker.pipes.channel.fileno())
                self._pipes.remove(worker.rank)
            self._add_workers(self._workers.start_fresh())

    def _on_channel(self, worker: WorkerProcess) -> None:
        fd = worker.pipes.channel.fileno()
        try:
            messages = worker.receive()
            for message in messages or ():
                check_event(message, worker.rank)
        except ProtocolError as error:
            self._loop.remove_reader(fd)
            worker.close_channel()
            text = f"something wrote to jaxrun's channel in the worker: {error}"
            self._report(
                Failed(worker.rank, self._clock(), WorkerStage.PROGRAM, EXIT_SOFTWARE, "ProtocolError", text, "")
            )
            return
        if messages is None:
            self._loop.remove_reader(fd)
        for message in messages or ():
            if isinstance(message, Failed):
                self._output.logs.write_file(worker.rank, "err", message.traceback.encode())
            if isinstance(message, (Failed, Done)):
                self._report_flight(worker)
            self._report(message)

    def _report_flight(self, worker: WorkerProcess) -> None:
        flight = worker.read_new_flight()
        if flight is not None:
            self._report(RecorderSnapshot(worker.rank, flight, worker.core_wait_seconds()))

    def _report_snapshots(self) -> None:
        self._report_all(self._snapshots.poll())

    def _on_signals(self) -> None:
        for signum in self._signals.receive():
            if signum == signal.SIGCHLD:
                self._reap()
                self._report_snapshots()  # a py-spy may have ended
            else:
                self._report(LauncherSignalled(signum))

    def _reap(self) -> None:
        by_pid = {worker.pid: worker for worker in self._workers if worker.live}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in by_pid:
                    self._on_exit(by_pid[pid], os.waitstatus_to_exitcode(status))

    def _on_exit(self, worker: WorkerProcess, status: int) -> None:
        worker.status = status
        self._on_channel(worker)  # its last messages come before its exit
        self._loop.remove_reader(worker.pipes.channel.fileno())
        self._pipes.finish(worker.rank)
        crashed = status < 0 and status != -signal.SIGKILL
        oom = self._oom.explain(worker.pid) if status == -signal.SIGKILL and not worker.killed else ""
        crash_dump = worker.read_new_stacks() if crashed else ""
        if crashed and FATAL_ERROR not in crash_dump:  # the program has led the fault handler to stderr, as absl does
            crash_dump = self._output.logs.crash_dump(worker.rank) or crash_dump
        self._report_flight(worker)
        logs = self._output.logs
        tail, bursts = logs.stderr_tail(worker.rank), logs.bursts(worker.rank)
        self._report(WorkerExited(worker.rank, status, crash_dump, tail, oom, bursts))
