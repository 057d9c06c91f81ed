"""Runs one attempt: hands the head what happens, and executes its actions. The only place that executes them.

The dispatcher is the one way into the head: events are logged and handed to it, its actions are logged and returned.

Whatever is for agents goes through a link: to the agent in this process (local.py), or to those that have connected
from other hosts (server.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from jaxrun.analysis.diagnosis.outcome import JobOutcome
from jaxrun.analysis.verdict.stack_text import format_snapshot, format_stall_notice
from jaxrun.controller.head.head import Head
from jaxrun.node.agent.agent import SIGNALS
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentMessage,
    AgentOrder,
    FirstOutput,
    ForkingDeclined,
    RankOrder,
    SignalWorker,
)
from jaxrun.protocol.env import REQUEST_SIGNAL
from jaxrun.protocol.requests import Answer, AnswerState
from jaxrun.records.event_log.actions import (
    Action,
    AnswerRequest,
    Finish,
    LookForHosts,
    PrintLine,
    PrintSnapshot,
    PrintStallNotice,
    ReadTerminalLine,
    Send,
    SendToAgents,
    ShowTerminalText,
    SignalRanks,
    Suspend,
)
from jaxrun.records.event_log.event_log import LoggedEvent, LoggedMessage, find_message
from jaxrun.records.event_log.events import (
    Event,
    FreshInterpreters,
    LauncherSignalled,
    Requested,
    Resumed,
    TerminalLine,
    Tick,
)
from jaxrun.records.rundir.rundir import RunDir

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptContext


class Dispatcher:
    """Feeds events to the head and returns its actions; `clock` returns seconds since the epoch."""

    def __init__(self, head: Head, files: RunDir, clock: Callable[[], float], attempt: int = 1) -> None:
        """`attempt` is logged with each event."""
        self._attempt = attempt
        self._head = head
        self._files = files
        self._clock = clock

    @property
    def hosts(self) -> Mapping[int, str]:
        return self._head.hosts

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, LauncherSignalled) and event.signum == REQUEST_SIGNAL:
            return self._handle_requests()
        self._log(event)
        return [self._prepare(action) for action in self._head.handle(event, self._clock())]

    def handle_timeouts(self) -> list[Action]:
        """Return what is to be done because the head's deadline has passed."""
        deadline = self._head.deadline()
        return self.handle(Tick()) if deadline is not None and deadline <= self._clock() else []

    def deadline(self) -> float | None:
        """When `handle_timeouts` is to be called at the latest, seconds since the epoch."""
        return self._head.deadline()

    def record(self, message: LoggedMessage, to: tuple[int, ...] = ()) -> None:
        """Log what the head need not know, or what it has sent to these ranks."""
        self._files.record(LoggedEvent(self._clock(), message, self._attempt, to))

    def _handle_requests(self) -> list[Action]:
        actions: list[Action] = []
        for number, request in self._files.take_requests():
            if request is not None:
                actions += self.handle(Requested(number, request))
            else:
                text = "the launcher of this job does not understand the request: it is of another version of jaxrun"
                self._files.write_answer(number, Answer(AnswerState.REFUSED, text))
        return actions

    def _prepare(self, action: Action) -> Action:
        """Log an action, and do what needs neither agents nor output."""
        self._log(action)
        if isinstance(action, PrintSnapshot):
            return PrintLine(f"{action.heading}{format_snapshot(action.snapshot) or 'no rank has stacks to show yet'}")
        if isinstance(action, PrintStallNotice):
            return PrintLine(format_stall_notice(action.snapshot, action.idle_s, self._files.shown_path))
        if isinstance(action, AnswerRequest):
            self._files.write_answer(action.number, action.answer)
        return action

    def _log(self, thing: Event | Action) -> None:
        found = find_message(thing)
        if found is not None:
            self.record(*found)


class AgentLink(Protocol):
    """The way to the agents of one attempt."""

    def start(self) -> None:
        """Begin to serve the agents, in the loop of the executor."""

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        """Send an order about these ranks to their agents."""

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        """Send an order to these agents."""

    def look_for_hosts(self) -> None:
        """Look for hosts that the job lacks; HostsFound follows."""

    def on_signal(self, signum: int) -> None:
        """This process has got a signal."""

    def complete(self, outcome: JobOutcome) -> JobOutcome:
        """Add what the link knows of an outcome."""


class Executor:
    """The event loop of one attempt, the head behind its dispatcher, and the agents behind a link."""

    def __init__(self, context: AttemptContext) -> None:
        self.context = context
        self.loop = EventLoop(context.clock)
        self._dispatcher = context.dispatcher
        self._output = context.output
        self._outcome: JobOutcome | None = None

    def run(self, link: AgentLink) -> JobOutcome:
        """Serve the attempt until the head says that it is over."""
        self._link = link
        context, loop, dispatcher = self.context, self.loop, self._dispatcher
        loop.add_reader(context.signals.fileno(), SIGNALS, self._on_signals)
        if (parent := context.parent) is not None:
            loop.add_reader(parent.fileno(), SIGNALS, lambda: self._execute_all(parent.receive()))
        context.terminal.attach(loop, SIGNALS, lambda line: self.handle(TerminalLine(line)))
        context.guard.attach(loop, SIGNALS, lambda text: self._output.print_line(f"jaxrun: {text}"))
        loop.add_poller(self._output.flush_due)
        link.start()
        loop.add_timer(dispatcher.deadline, lambda: self._execute_all(dispatcher.handle_timeouts()))
        while self._outcome is None:
            loop.run_once()
        return self._outcome

    def receive(self, message: AgentMessage) -> None:
        match message:
            case FirstOutput():
                self._dispatcher.record(message)
            case ForkingDeclined():
                self._dispatcher.record(FreshInterpreters(message.reason))
            case _:
                self.handle(message)

    def handle(self, event: Event) -> None:
        self._execute_all(self._dispatcher.handle(event))

    def _on_signals(self) -> None:
        """Handle those that have arrived; what comes once this attempt is over is for whatever follows it."""
        arrived = self.context.signals.receive()
        while arrived and self._outcome is None:
            self._link.on_signal(arrived.pop(0))
        if arrived:
            self.context.signals.put_back(arrived)

    def _execute_all(self, actions: Iterable[Action]) -> None:
        actions = list(actions)
        killed = [action for action in actions if isinstance(action, SignalRanks) and action.signum == signal.SIGKILL]
        if killed:
            # All stand still before the first is killed, or they would see each other die, and complain.
            ranks = tuple(rank for action in killed for rank in action.ranks)
            self._link.send(ranks, SignalWorker(signal.SIGSTOP))
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        match action:
            case Send():
                self._link.send(action.ranks, action.message)
            case SendToAgents():
                self._link.send_to_agents(action.agents, action.message)
            case SignalRanks():
                self._link.send(action.ranks, SignalWorker(action.signum))
            case PrintLine():
                self._output.print_line(f"jaxrun: {action.text}" if action.text else "", status=action.status)
            case ShowTerminalText():
                self.context.terminal.show(action.text)
            case ReadTerminalLine():
                self.context.terminal.read_line()
            case LookForHosts():
                self._link.look_for_hosts()
            case Suspend():
                self._suspend()
            case Finish():
                self._outcome = self._link.complete(action.outcome)

    def _suspend(self) -> None:
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.handle(Resumed(time.monotonic() - began))
