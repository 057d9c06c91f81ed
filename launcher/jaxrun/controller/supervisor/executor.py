"""Runs one attempt: hands the head what happens, and executes its actions. The only place that executes them.

Events reach the head, and its actions come back, through the dispatcher (dispatcher.py).

Whatever is for agents goes through a link: to the agent in this process (local.py), or to those that have connected
from other hosts (server.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Protocol

from jaxrun.analysis.diagnosis.outcome import JobOutcome
from jaxrun.controller.supervisor.attempt_context import AttemptContext
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
from jaxrun.records.event_log.actions import (
    Action,
    Finish,
    LookForHosts,
    PrintLine,
    ReadTerminalLine,
    Send,
    SendToAgents,
    ShowTerminalText,
    SignalRanks,
    Suspend,
)
from jaxrun.records.event_log.events import (
    Event,
    FreshInterpreters,
    Resumed,
    TerminalLine,
)


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
