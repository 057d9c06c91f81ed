"""Hears the agents of a job on other hosts, and has them do what the head decides.

One loop over the door, the lines to the agents, the process that starts them, and signals. It is to those agents what
agent.py is to workers: nothing is decided here.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxrun.agent.agent import ActionSource
from jaxrun.agent.signals import SignalPipe
from jaxrun.channel.connection import AGENT_TO_HEAD
from jaxrun.channel.event_loop import EventLoop
from jaxrun.channel.listener import Listener, Peer
from jaxrun.diagnosis.stacks import NATIVE_STACKS_SIGNAL
from jaxrun.errors import ProtocolError
from jaxrun.head.actions import Action, EndReason, Finish, JobOutcome, PrintLine, Send, SignalRanks, TakeSnapshot
from jaxrun.head.events import AgentLost, Event, LauncherSignalled
from jaxrun.output.output import Output
from jaxrun.protocol.agent_messages import (
    AgentReport,
    AgentSignalled,
    AgentToHead,
    FirstOutput,
    OutputChunk,
    OutputCredit,
    Shutdown,
    SignalWorker,
    SnapshotPurpose,
    SnapshotReply,
    SnapshotRequest,
    StartFailed,
    StartWorker,
    StreamEnded,
    WorkerExited,
)
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.worker_messages import DeviceReport, Failed, Hello
from jaxrun.supervisor.connections import AgentConnection, AgentConnections
from jaxrun.supervisor.dispatch import Dispatcher
from jaxrun.supervisor.launch_process import LaunchProcess
from jaxrun.supervisor.loss_attribution import Evidence, LossAttribution
from jaxrun.supervisor.stacks_collection import StacksCollection
from jaxrun.text import format_ranks_on_hosts

_LINES, _DOOR, _SIGNALS, _STARTER = range(4)  # the order in which what is ready is served
# How Open MPI 4 and 5 write a rank: [[12345,1],3], [prterun-h1-12345@1,3].
_BY_NAME = re.compile(r"Process name: \[\S*,(\d{1,9})\]")
_RETRY = 0.01  # seconds until what the network did not take is sent again
# Seconds in which a host that is there has answered; an engine leaves the processes that it started less time.
_ANSWER = {False: 1.0, True: 0.15}
_FAREWELL = 1.0  # seconds for the last messages to leave
# Seconds that the starter gets to end by itself, and after SIGTERM: after a job that ended well, and after another.
_IN_PEACE = (5.0, 2.0)
_IN_A_HURRY = (0.6, 0.6)


class AgentServer:
    """One job."""

    def __init__(
        self,
        desk: Dispatcher,
        door: Listener,
        output: Output,
        signals: SignalPipe,
        starting: LaunchProcess,
        clock: Callable[[], float],
        *,
        verbose: bool = False,
        attached: bool = False,
        orders: ActionSource | None = None,
    ) -> None:
        """`attached`: this process is one of those that somebody else started, and is sent their signals, too.

        `orders`: where whoever the launcher works for is heard, and what is to be done then.
        """
        self._dispatcher = desk
        self._listener = door
        self._output = output
        self._signals = signals
        self._launch = starting
        self._now = clock
        self._verbose = verbose
        self._attached = attached
        self._orders = orders
        self._connections = AgentConnections()
        self._loop = EventLoop()
        self._skew: dict[int, float] = {}  # seconds that a rank's clock is behind ours
        self._logs_remotely: set[int] = set()
        self._stacks: dict[SnapshotPurpose, StacksCollection] = {}  # by purpose
        self._losses = LossAttribution(_ANSWER[attached])
        self._failure_reported: set[int] = set()  # ranks that have said last words
        self._ending: JobOutcome | None = None

    def run(self) -> JobOutcome:
        """Serve the job until the head says that it is over."""
        self._loop.add_reader(self._signals.fileno(), _SIGNALS, self._on_signals)
        self._loop.add_reader(self._launch.fileno(), _STARTER, self._on_launch_output)
        if self._orders is not None:
            fd, hear = self._orders
            self._loop.add_reader(fd, _SIGNALS, lambda: self._execute_all(hear()))
        for listener in self._listener.sockets:
            self._loop.add_reader(listener.fileno(), _DOOR, lambda listener=listener: self._on_connect(listener))  # type: ignore[misc]
        while self._ending is None:
            self._run_once()
        return self._ending

    def shut_down_agents(self, status: int) -> None:
        """Tell all agents to end with `status`."""
        self._connections.send_all(Shutdown(status))
        deadline = time.monotonic() + _FAREWELL
        while self._connections.unsent and time.monotonic() < deadline:
            self._connections.flush()
            time.sleep(_RETRY)

    def stop_launch_process(self, *, hurry: bool) -> None:
        """See to it that what has started the agents ends, too; with `hurry`, as it may be stuck."""
        patience = _IN_A_HURRY if hurry else _IN_PEACE
        for seconds, signum in zip(patience, (signal.SIGTERM, signal.SIGKILL), strict=True):
            if self._wait_launch_process(seconds):
                return
            self._launch.stop(signum)
        self._wait_launch_process(patience[-1])

    def close(self) -> None:
        for line in self._connections:
            line.close()
        self._listener.close()
        self._launch.close()
        self._loop.close()

    # ---- the loop

    def _run_once(self) -> None:
        self._loop.run_once(self._wait_limit())
        self._connections.flush()
        self._listener.drop_expired(self._loop.remove_reader)
        if not self._output.congested:
            self._connections.acknowledge()
        for note in self._listener.dropped:
            self._dispatcher.record("dropped", text=note)
        self._listener.dropped.clear()
        for purpose in [purpose for purpose, found in self._stacks.items() if found.deadline <= self._now()]:
            self._finish_stacks(purpose)
        if self._losses.deadline is not None and self._losses.deadline <= self._now():
            self._attribute_losses()
        self._execute_all(self._dispatcher.handle_timeouts())

    def _wait_limit(self) -> float | None:
        """How long nothing needs to happen: seconds, None for ever."""
        now = self._now()
        waits = [self._output.flush_due(), _RETRY if self._connections.unsent else None]
        dues = (
            self._dispatcher.deadline(),
            *(found.deadline for found in self._stacks.values()),
            self._losses.deadline,
        )
        waits += [due - now for due in dues if due]
        deadline = self._listener.deadline()
        if deadline is not None:
            waits.append(deadline - time.monotonic())
        known = [max(0.0, wait) for wait in waits if wait is not None]
        return min(known, default=None)

    # ---- the head

    def _handle(self, event: Event) -> None:
        self._execute_all(self._dispatcher.handle(event))

    def _execute_all(self, actions: Iterable[Action]) -> None:
        actions = list(actions)
        killed = [rank for action in actions if isinstance(action, SignalRanks) for rank in action.ranks]
        if any(isinstance(action, SignalRanks) and action.signum == signal.SIGKILL for action in actions):
            self._connections.send(
                killed, SignalWorker(signal.SIGSTOP)
            )  # or they would see each other die, and complain
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        match action:
            case Send():
                if isinstance(action.message, StartWorker) and action.message.log_dir:
                    self._logs_remotely.add(action.message.rank)
                self._connections.send(action.ranks, action.message)
            case SignalRanks():
                self._connections.send(action.ranks, SignalWorker(action.signum))
            case TakeSnapshot():
                self._stacks[action.purpose] = StacksCollection(action, self._now())
                self._connections.send(action.ranks, SnapshotRequest(action.purpose))
                if self._stacks[action.purpose].complete:
                    self._finish_stacks(action.purpose)
            case PrintLine():
                self._output.print_line(f"jaxrun: {action.text}")
            case Finish():
                self._ending = self._with_launch_output(action.outcome)

    def _with_launch_output(self, ending: JobOutcome) -> JobOutcome:
        """Where agents are missing, the starter may have said why, and wait for the others."""
        words = self._launch.last_lines()
        if ending.reason is not EndReason.UNAVAILABLE or self._all_reported or not words or words in ending.text:
            return ending
        return replace(ending, text=f"{ending.text}\n{self._launch.title} said:\n{words}")

    def _finish_stacks(self, purpose: SnapshotPurpose) -> None:
        self._handle(self._stacks.pop(purpose).result())

    # ---- what happens

    def _on_connect(self, listener: object) -> None:
        for fd in self._listener.accept(listener):  # type: ignore[arg-type]
            self._loop.add_reader(fd, _DOOR, lambda fd=fd: self._on_pending_peer(fd))  # type: ignore[misc]

    def _on_pending_peer(self, fd: int) -> None:
        admitted = self._listener.receive(fd)
        if admitted is None and self._listener.is_pending(fd):
            return
        self._loop.remove_reader(fd)
        if admitted is not None:
            self._admit(admitted)

    def _admit(self, admitted: Peer) -> None:
        line: AgentConnection = AgentConnection(admitted.connection, AGENT_TO_HEAD)
        self._connections.add(admitted.rank, line)
        self._loop.add_reader(line.fileno(), _LINES, lambda: self._on_readable(admitted.rank, line))

    def _on_readable(self, rank: int, line: AgentConnection) -> None:
        try:
            messages = line.receive()
        except ProtocolError as error:
            messages, line.lost_reason = [], f"its agent sent what is no message of jaxrun's: {error}"
        for message in messages:
            self._on_message(rank, line, message)
        if line.lost_reason:
            self._loop.remove_reader(line.fileno())
            self._connections.remove(rank, line)
            line.close()
            if rank in self._skew:
                self._hold(AgentLost(rank, line.lost_reason), ask=False)

    def _hold(self, *events: Event, ask: bool) -> None:
        """Hold these events until it is known why agents end; `ask` whether all hosts still answer."""
        wanted = self._probe_hosts if ask and self._skew else None
        self._losses.hold(events, self._now(), all_came=self._all_reported, ask=wanted)

    def _probe_hosts(self) -> None:
        self._connections.send_all(OutputCredit(0))  # asks for no more than the answer of the other side's kernel

    def _attribute_losses(self) -> None:
        status = self._launch.status
        known = Evidence(
            unanswered=self._connections.unanswered_ranks() if self._losses.probed else (),
            failure_reported=frozenset(self._failure_reported),
            launch_end=self._launch_failure(),
            launch_failed=status not in (None, 0) and not self._launch.was_killed,
            all_reported=self._all_reported,
        )
        for event in self._losses.explain(known):
            self._handle(event)

    @property
    def _all_reported(self) -> bool:
        return len(self._skew) == len(self._dispatcher.hosts)

    def _launch_failure(self) -> StartFailed | None:
        if self._launch.status is None:
            return None
        words = self._launch.last_lines()
        said = f"; it said:\n{words}" if words else ""
        hosts = self._dispatcher.hosts
        missing = [rank for rank in hosts if rank not in self._skew]
        named = [rank for rank in map(int, _BY_NAME.findall(words)) if rank in hosts]
        lacking = f"\nnot heard from: {format_ranks_on_hosts(missing, hosts)}" if missing and self._skew else ""
        if not self._skew and named:
            lacking = f"\nthat is {format_ranks_on_hosts(named, hosts)}"
        return StartFailed(f"{self._launch.describe_end()} before the job was over{said}{lacking}")

    def _on_message(self, rank: int, line: AgentConnection, message: AgentToHead) -> None:
        match message:
            case OutputChunk():
                take = self._output.show if rank in self._logs_remotely else self._output.write
                take(rank, message.stream, message.data)
                self._connections.count_output(line, len(message.data))
            case StreamEnded():
                self._output.end_stream(rank, message.stream)
            case FirstOutput():
                self._dispatcher.record("first_output", rank)
            case SnapshotReply():
                found = self._stacks.get(message.purpose)
                if found is not None and found.add(message):
                    self._finish_stacks(message.purpose)
            case AgentSignalled():
                self._hold(message, ask=True)
            case AgentReport():
                self._skew[rank] = self._now() - message.time
                self._handle(message)
            case Failed():
                self._failure_reported.add(rank)
                if rank not in self._logs_remotely:
                    self._output.log(rank, "err", message.traceback.encode())
                self._handle_in_order(message)
            case WorkerExited():
                self._handle_in_order(message)
            case _:
                self._handle(self._with_head_clock(rank, message))

    def _handle_in_order(self, event: Event) -> None:
        """A worker's end may come of what is held, when its engine ends all of them."""
        if self._losses.probed:
            self._hold(event, ask=False)
        else:
            self._handle(event)

    def _with_head_clock(self, rank: int, message: AgentToHead) -> Event:
        skew = self._skew.get(rank, 0.0)
        match message:
            case Hello():
                return replace(message, time=message.time + skew, started_at=message.started_at + skew)
            case DeviceReport():
                return replace(message, time=message.time + skew, joined_at=message.joined_at + skew)
        return message  # type: ignore[return-value]

    def _on_signals(self) -> None:
        for number in self._signals.receive():
            if number != signal.SIGCHLD:
                self._on_signal(number)
            elif self._launch.status is None and self._launch.reap():
                self._on_launch_end()

    def _on_signal(self, number: int) -> None:
        if not self._attached or number in (signal.SIGQUIT, STACKS_SIGNAL, NATIVE_STACKS_SIGNAL):
            self._handle(LauncherSignalled(number))
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._connections.send((0,), SignalWorker(number))  # the other ranks are sent it as well
        else:
            self._hold(AgentSignalled(0, number), ask=True)

    def _on_launch_output(self) -> None:
        words = self._launch.read()
        if words is None:
            self._loop.remove_reader(self._launch.fileno())
        elif words and self._verbose:
            self._output.print_line(words.decode(errors="replace"))

    def _on_launch_end(self) -> None:
        self._dispatcher.record("starter_ended", status=self._launch.status)
        self._hold(ask=True)

    def _wait_launch_process(self, seconds: float) -> bool:
        """Wait for the starter's end, and for the ends of the lines, which are noticed in passing."""
        deadline = time.monotonic() + seconds
        while not self._launch.reap():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._signals.receive()
            self._launch.read()
            time.sleep(min(left, _RETRY))
        return True
