"""The states of an agent in a process of its own, each from one order of the head to the next.

    Connecting ──JobInfo──▶ WaitingForOrders ──StartWorkers──▶ Supervising
                             ▲ │    ▲                               │
                             └─┘    └──────────NextAttempt──────────┘
                         NextAttempt

Shutdown, the loss of the head, and at a terminal a second Ctrl-C lead out of each of them. A state is a loop over
events with a table: each kind of message has one handler, which returns what ends the state, or None. Messages behind
the one that ends a state stay in the HeadLink for the next state.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from jaxrun.errors import EXIT_SIGNAL_BASE, EXIT_UNAVAILABLE, NoPlaceError, NotUniformError, UnavailableError
from jaxrun.node.agent.agent import MESSAGES, SIGNALS, Agent
from jaxrun.node.agent.pipes import Relay
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.agent.task_thread import Task, TaskThread
from jaxrun.node.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentEvent,
    AgentRefused,
    AgentSignalled,
    ClockProbe,
    ClockReply,
    HeadToAgent,
    HostTask,
    JobInfo,
    KeepRecord,
    NextAttempt,
    OutputCredit,
    RankOrder,
    Shutdown,
    StartWorkers,
    ToRanks,
)
from jaxrun.protocol.codec import list_handlers
from jaxrun.protocol.job_record import JobRecord

HEAD_LOST = Shutdown(EXIT_UNAVAILABLE)  # sentinel, which no head sends; compare with `is`
Order = StartWorkers | NextAttempt | Shutdown
R = TypeVar("R", bound=JobInfo | Order)
CheckHead = Callable[[], float | None]  # gives up the connection of a silent head; returns when to call it again
_Table = dict[Any, Callable[[Any], R | None]]  # by kind of message, or by a union of several
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HeadLink:
    """An agent's connection to the head, and the signals that the agent is sent.

    stopped_by: the latest signal that has asked this agent to end; 0 for none
    record: what the head wants kept for another one that takes its place
    messages: those that have arrived and that no state has handled yet
    """

    def __init__(
        self, agent: AgentId, connection: Connection[HeadToAgent], signals: SignalPipe, *, by_terminal: bool
    ) -> None:
        """`by_terminal`: a second signal that asks for the end ends the agent, whatever the head says."""
        self.agent = agent
        self.connection = connection
        self.signals = signals
        self.messages: deque[HeadToAgent] = deque()
        self.record: JobRecord | None = None
        self.stopped_by = 0
        # Stop signals that are still forwarded to the head; the next one ends this agent. None: all are forwarded.
        self._stops_left = 1 if by_terminal else None

    def receive(self) -> None:
        self.messages += self.connection.receive()

    def forward_stop(self, signum: int) -> Shutdown | None:
        """Report a signal that asks for the end to the head, which decides; or return the end of this agent."""
        self.stopped_by = signum
        if self._stops_left == 0:
            return Shutdown(EXIT_SIGNAL_BASE + signum)
        if self._stops_left is not None:
            self._stops_left -= 1
        self.connection.send(AgentSignalled(self.agent, signal.Signals(signum)))
        return None


class AgentState(Generic[R]):
    """Handles events until one ends the state."""

    def __init__(
        self,
        link: HeadLink,
        loop: EventLoop,
        table: Mapping[Any, Callable[[Any], R | Shutdown | None]],
        pollers: Sequence[CheckHead],
    ) -> None:
        """Raise ValueError if a kind of message has no handler in the table, or two."""
        self._link = link
        self._loop = loop
        common: _Table[R] = {KeepRecord: self._keep_record}
        self._handlers = list_handlers({**table, **common})
        self._end: R | Shutdown | None = None
        if missing := [kind.__name__ for kind in HEAD_TO_AGENT.values() if kind not in self._handlers]:
            raise ValueError(f"{', '.join(missing)} has no handler")
        loop.add_reader(link.signals.fileno(), SIGNALS, self._on_signals)
        loop.add_reader(link.connection.fileno(), MESSAGES, self._on_messages)
        for poll in pollers:
            loop.add_poller(poll)

    def run(self) -> R | Shutdown:
        """Handle events, first the messages that came with the one that led here; return what ends the state."""
        self._on_messages()
        while self._end is None:
            self._loop.run_once()
            if self._link.connection.lost_reason:  # as a poller or a failed `send` has found
                self._on_messages()
        return self._end

    def _on_messages(self) -> None:
        link = self._link
        link.receive()
        while link.messages and self._end is None:
            message = link.messages.popleft()
            self._end = self._handlers[type(message)](message)
        if link.connection.lost_reason and self._end is None:
            self._on_signals()  # an agent that was told to end before that does not look for the head
            if self._end is None:
                self._end_by_itself(HEAD_LOST)

    def _keep_record(self, message: KeepRecord) -> None:
        self._link.record = message.record

    def _on_signals(self) -> None:
        for signum in self._link.signals.receive():
            self._on_signal(signum)

    def _on_signal(self, signum: int) -> None:
        if signum in STOPPING and (end := self._link.forward_stop(signum)):
            self._end_by_itself(end)

    def _end_by_itself(self, end: Shutdown) -> None:
        """Handle an end that the head has not decided."""
        self._end = end


def _ignore(message: object) -> None:
    """Ignore a message for another state: it was on its way when that state began or ended."""


def _end(order: R) -> R:
    return order


def _refuse_late(message: AgentRefused) -> None:
    """The head refuses an agent at once only while the program runs: nothing is wrong with the agent or its host."""
    raise NoPlaceError(message.reason)


def _refuse(message: AgentRefused) -> None:
    if message.may_return:
        raise NoPlaceError(message.reason)
    if message.is_taken:
        raise UnavailableError(message.reason)
    raise NotUniformError(message.reason)


class Connecting(AgentState[JobInfo]):
    """Waits until the head sends the job's properties.

    Raises NoPlaceError if the head refuses the agent, because the program runs already.
    """

    def __init__(self, link: HeadLink, loop: EventLoop) -> None:
        ignored = HostTask | StartWorkers | ClockProbe | RankOrder | ToRanks | OutputCredit | NextAttempt
        table: _Table[JobInfo | Shutdown] = {JobInfo | Shutdown: _end, AgentRefused: _refuse_late, ignored: _ignore}
        super().__init__(link, loop, table, ())


class WaitingForOrders(AgentState[Order]):
    """Reports facts about the host, does the head's other tasks, and waits until it decides.

    Blocking tasks run in a thread, which ends at a stop signal and at the head's next order.
    Raises NotUniformError or UnavailableError if the head refuses the agent.
    """

    def __init__(
        self,
        link: HeadLink,
        loop: EventLoop,
        check_head: CheckHead,
        report: Task[AgentEvent],
        do: Callable[[HostTask, Callable[[], bool]], Iterator[AgentEvent]],
        prepare: Callable[[StartWorkers], None],
    ) -> None:
        """`report` is the first task, and `do` carries out tasks for the head.

        `prepare` is called with the workers that the agent may get later, while it waits on a spare host.
        """
        table: _Table[Order] = {
            HostTask: self._on_task,
            StartWorkers: self._on_start,
            NextAttempt | Shutdown: _end,
            AgentRefused: _refuse,
            JobInfo | ClockProbe | RankOrder | ToRanks | OutputCredit: _ignore,
        }
        super().__init__(link, loop, table, (check_head, self._flush))
        self._do = do
        self._prepare = prepare
        self._wanted: Task[AgentEvent] | None = report  # the next task
        self._running: TaskThread[AgentEvent] | None = None

    def run(self) -> Order:
        try:
            return super().run()
        finally:
            self._stop_task()

    def _on_messages(self) -> None:
        super()._on_messages()
        if self._end is None and self._wanted is not None:
            self._stop_task()
            self._running, self._wanted = TaskThread(self._wanted), None
            self._loop.add_reader(self._running.fileno(), MESSAGES, self._on_results)

    def _on_task(self, order: HostTask) -> None:
        self._wanted = partial(self._do, order)

    def _on_start(self, order: StartWorkers) -> StartWorkers | None:
        if not order.waits:
            return order
        self._prepare(order)
        return None

    def _on_results(self) -> None:
        if self._running is not None:
            for message in self._running.receive():
                self._link.connection.send(message)

    def _on_signal(self, signum: int) -> None:
        if signum in STOPPING and self._running is not None:
            self._running.stop()
        super()._on_signal(signum)

    def _stop_task(self) -> None:
        if self._running is not None:
            self._loop.remove_reader(self._running.fileno())
            self._running.close()
            self._running = None

    def _flush(self) -> float | None:
        return self._link.connection.flush_due()


class Supervising(AgentState[Order]):
    """Serves the workers of one attempt until the head ends the attempt or the job, or is lost."""

    def __init__(
        self,
        link: HeadLink,
        loop: EventLoop,
        check_head: CheckHead,
        agent: Agent,
        relay: Relay,
        ranks: Sequence[int],
    ) -> None:
        """`agent` is started by `run`; it has the workers of `ranks`."""
        table: _Table[Order] = {
            ToRanks: self._on_order_to_ranks,
            RankOrder: self._on_order,
            ClockProbe: self._on_clock_probe,
            OutputCredit: self._on_credit,
            NextAttempt | Shutdown: _end,
            JobInfo | AgentRefused | HostTask | StartWorkers: _ignore,
        }
        super().__init__(link, loop, table, (check_head, relay.flush_due))
        self._agent = agent
        self._relay = relay
        self._ranks = ranks

    def run(self) -> Order:
        self._agent.start()
        return super().run()

    def _on_order_to_ranks(self, message: ToRanks) -> None:
        self._agent.execute(message.ranks, message.order)

    def _on_order(self, order: RankOrder) -> None:
        self._agent.execute(self._ranks, order)

    def _on_clock_probe(self, message: ClockProbe) -> None:
        self._link.connection.send(ClockReply(self._link.agent, message.asked_at, time.time()))

    def _on_credit(self, message: OutputCredit) -> None:
        self._relay.add_credit(message.bytes)

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._agent.on_child_exit()
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._agent.signal_all(signum)
        else:
            super()._on_signal(signum)

    def _end_by_itself(self, end: Shutdown) -> None:
        """Kill the workers at once, so that none sees another's end and reports it as its own failure."""
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            self._agent.signal_all(signum)
        super()._end_by_itself(end)
