"""Watches and stops workers, tells its superior what happens to them, and carries out what that decides.

The superior is the head itself, in this process, or the line to a head on another host. One loop: messages first, then
exits and signals, output last. The agent is the parent of its workers and, as a subreaper, of whatever they leave
behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from jaxrun.agent.faults import inject
from jaxrun.agent.oom import OomWatch, own_memory_cgroup
from jaxrun.agent.pipes import OutputPipes
from jaxrun.agent.signals import SignalPipe
from jaxrun.agent.worker_group import WorkerGroup
from jaxrun.agent.worker_process import WorkerProcess
from jaxrun.channel.event_loop import EventLoop
from jaxrun.errors import EXIT_SOFTWARE, ProtocolError
from jaxrun.head.actions import Action, Finish, MessageToRank, PrintLine, Send, SignalRanks, TakeSnapshot
from jaxrun.head.events import Event, LauncherSignalled
from jaxrun.output.drain import OutputSink
from jaxrun.protocol.agent_messages import (
    FaultNotInjected,
    InjectFault,
    ProgramDetails,
    ProgramDetailsRequest,
    RecorderSnapshot,
    Shutdown,
    SnapshotPurpose,
    SnapshotReply,
    StartWorker,
    WorkerExited,
)
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.worker_messages import Done, Failed

if TYPE_CHECKING:
    from jaxrun.agent.pyspy import NativeDump

_STACKS_WAIT_S = 0.1  # seconds for the fault handlers to answer; they take some milliseconds
_MESSAGES, _SIGNALS, _PIPES = range(3)  # the order in which what is ready is served


class HeadInterface(Protocol):
    """Who decides what becomes of the workers. Times are seconds since the epoch."""

    def handle(self, event: Event) -> list[Action]:
        """What is to be done now, in order; orders from far come later."""

    def handle_timeouts(self) -> list[Action]:
        """What is to be done because time has passed."""

    def deadline(self) -> float | None:
        """When `due` is to be asked at the latest."""

    def record(self, name: str, rank: int | None = None, **more: object) -> None:
        """What happened that changes no decision."""


ActionSource = tuple[int, Callable[[], list[Action]]]


class Agent:
    """All workers of one plan on this host."""

    def __init__(
        self,
        crew: WorkerGroup,
        superior: HeadInterface,
        output: OutputSink,
        signals: SignalPipe,
        clock: Callable[[], float],
        orders: ActionSource | None = None,
    ) -> None:
        """`orders`: a descriptor, and what is to be done when it is readable: orders of a superior elsewhere, or of the
        process that the launcher works for.
        """
        self._workers = crew
        self._head = superior
        self._output = output
        self._signals = signals
        self._now = clock
        self._orders = orders
        self._pipes = OutputPipes(output, lambda rank: superior.record("first_output", rank))
        self._loop = EventLoop()
        self._oom = OomWatch(own_memory_cgroup())
        self._stacks_due: list[tuple[float, TakeSnapshot]] = []
        self._native_dumps: list[tuple[SnapshotReply, NativeDump]] = []
        self._last: Finish | Shutdown | None = None

    def run(self) -> Finish | Shutdown:
        """Start the workers and serve them until the superior says that it is over; returns its last word."""
        self._loop.add_reader(self._signals.fileno(), _SIGNALS, self._on_signals)
        if self._orders is not None:
            fd, hear = self._orders
            self._loop.add_reader(fd, _MESSAGES, lambda: self._execute_all(hear()))
        events = self._workers.start()
        if self._workers.fork_server is not None:
            self._loop.add_reader(self._workers.fork_server.channel.fileno(), _MESSAGES, self._on_server)
        self._add_workers(events)
        if self._orders is not None:
            self._execute_all(self._orders[1]())  # what has come before we listened
        while self._last is None:
            self._run_once()
        return self._last

    def close(self) -> None:
        """Hand over what is still in the pipes and let go of everything."""
        for _, look in self._native_dumps:
            look.close()
        self._pipes.close()
        self._workers.close()
        self._oom.close()
        self._loop.close()

    # ---- the loop

    def _run_once(self) -> None:
        """Wait until something happens or is due, and see to it."""
        wait = self._wait_limit(self._output.flush_due())
        self._read_pipes(wanted=not self._output.congested)
        self._loop.run_once(wait)
        now = self._now()
        for due, order in [item for item in self._stacks_due if item[0] <= now]:
            self._stacks_due.remove((due, order))
            self._on_stacks(order, self._read_stacks(order))
        self._poll_native_dumps()
        self._execute_all(self._head.handle_timeouts())

    def _wait_limit(self, output: float | None) -> float | None:
        """How long nothing needs to happen: seconds, None for ever. `output` is the output's own answer."""
        now = self._now()
        waits = [due - now for due, _ in self._stacks_due]
        waits += [look.deadline - now for _, look in self._native_dumps]
        deadline = self._head.deadline()
        if deadline is not None:
            waits.append(deadline - now)
        if output is not None:
            waits.append(output)
        return max(0.0, min(waits)) if waits else None

    def _read_pipes(self, *, wanted: bool) -> None:
        fd = self._pipes.fileno()
        if wanted and not self._loop.has_reader(fd):
            self._loop.add_reader(fd, _PIPES, self._pipes.read_ready)
        elif not wanted:
            self._loop.remove_reader(fd)

    def _add_workers(self, events: Iterable[Event]) -> None:
        """Listen to the children that are there now, then tell the head of them."""
        for child in self._workers:
            fd = child.pipes.channel.fileno()
            self._loop.add_reader(fd, _MESSAGES, lambda child=child: self._on_channel(child))  # type: ignore[misc]
            self._pipes.add(child.rank, child.pipes.out, child.pipes.err)
        self._report_all(events)

    # ---- the superior

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
            case TakeSnapshot() if action.purpose.recorders_only:
                self._report(self._read_flights(action))
            case TakeSnapshot():
                for rank in action.ranks:
                    self._workers[rank].read_new_stacks()
                    self._workers[rank].signal(STACKS_SIGNAL)
                self._stacks_due.append((self._now() + _STACKS_WAIT_S, action))
            case PrintLine():
                self._output.print_line(f"jaxrun: {action.text}")
            case Finish() | Shutdown():
                self._last = action

    def _deliver(self, rank: int, message: MessageToRank) -> None:
        """Carry out what is meant for the agent, and send the worker the rest."""
        worker = self._workers[rank]
        match message:
            case InjectFault():
                if trouble := inject(worker, message.kind):
                    self._report(FaultNotInjected(rank, message.kind, trouble))
            case ProgramDetailsRequest():
                details = worker.flight.program_details(message.program)
                self._report(ProgramDetails(rank, message.program, details))
            case StartWorker():
                raise AssertionError("this agent has its workers already")
            case _:
                worker.send(message)

    def _signal(self, order: SignalRanks) -> None:
        if order.signum == signal.SIGKILL:
            for rank in order.ranks:  # or they would see each other die, and complain
                self._workers[rank].signal(signal.SIGSTOP)
        for rank in order.ranks:
            self._workers[rank].signal(order.signum)

    # ---- what happens

    def _on_server(self) -> None:
        server = self._workers.fork_server
        assert server is not None
        fd = server.channel.fileno()
        events = self._workers.receive_forked()
        if self._workers.fork_server is None:
            self._loop.remove_reader(fd)
        self._report_all(events)
        if self._workers.declined:
            self._head.record("fork_declined", reason=self._workers.declined)
            for child in self._workers:
                self._loop.remove_reader(child.pipes.channel.fileno())
                self._pipes.remove(child.rank)
            self._add_workers(self._workers.start_fresh())

    def _on_channel(self, child: WorkerProcess) -> None:
        fd = child.pipes.channel.fileno()
        try:
            messages = child.receive()
        except ProtocolError as error:
            self._loop.remove_reader(fd)
            child.close_channel()
            text = f"something wrote to jaxrun's channel in the worker: {error}"
            self._report(Failed(child.rank, self._now(), "program", EXIT_SOFTWARE, "ProtocolError", text, ""))
            return
        if messages is None:
            self._loop.remove_reader(fd)
        for message in messages or ():
            if isinstance(message, Failed):
                self._output.log(child.rank, "err", message.traceback.encode())
            if isinstance(message, (Failed, Done)):
                self._report_flight(child)
            self._report(message)

    def _report_flight(self, child: WorkerProcess) -> None:
        flight = child.read_new_flight()
        if flight is not None:
            self._report(RecorderSnapshot(child.rank, flight))

    def _on_signals(self) -> None:
        for number in self._signals.receive():
            if number == signal.SIGCHLD:
                self._reap()
            else:
                self._report(LauncherSignalled(number))

    def _reap(self) -> None:
        by_pid = {child.pid: child for child in self._workers if child.live}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in by_pid:
                    self._on_exit(by_pid[pid], os.waitstatus_to_exitcode(status))

    def _on_exit(self, child: WorkerProcess, status: int) -> None:
        child.status = status
        self._on_channel(child)  # its last words come before its end
        self._loop.remove_reader(child.pipes.channel.fileno())
        self._pipes.finish(child.rank)
        crashed = status < 0 and status != -signal.SIGKILL
        oom = self._oom.explain(child.pid) if status == -signal.SIGKILL and not child.killed else ""
        fatal = child.read_new_stacks() if crashed else ""
        self._report_flight(child)
        self._report(WorkerExited(child.rank, status, fatal, self._output.stderr_tail(child.rank), oom))

    def _on_stacks(self, order: TakeSnapshot, taken: SnapshotReply) -> None:
        if order.purpose is not SnapshotPurpose.NATIVE:
            self._report(taken)
            return
        from jaxrun.agent import pyspy  # rarely wanted, and slow to import

        children = (self._workers[rank] for rank in order.ranks)
        targets = (pyspy.Target(child.rank, child.pid, child.stopped) for child in children if child.live)
        self._native_dumps.append((taken, pyspy.NativeDump(targets, self._now())))

    def _poll_native_dumps(self) -> None:
        """Go on with the looks for C frames; those that are done are told."""
        for taken, look in tuple(self._native_dumps):
            look.poll(self._now())
            if look.done:
                self._native_dumps.remove((taken, look))
                self._report(replace(taken, native_stacks=look.texts))

    def _read_stacks(self, order: TakeSnapshot) -> SnapshotReply:
        children = [self._workers[rank] for rank in order.ranks]
        return SnapshotReply(
            order.purpose,
            stacks={child.rank: child.read_new_stacks() for child in children},
            kernel_waits={child.rank: child.kernel_wait() for child in children},
            cpu_seconds={child.rank: child.cpu_seconds() for child in children},
            bytes_written={child.rank: self._output.bytes_written(child.rank) for child in children},
            flights={child.rank: child.flight.brief() for child in children},
        )

    def _read_flights(self, order: TakeSnapshot) -> SnapshotReply:
        readers = {rank: self._workers[rank].flight for rank in order.ranks}
        whole = order.purpose is SnapshotPurpose.HISTORY
        flights = {rank: reader.history() if whole else reader.brief() for rank, reader in readers.items()}
        return SnapshotReply(order.purpose, {}, {}, {}, {}, flights)
