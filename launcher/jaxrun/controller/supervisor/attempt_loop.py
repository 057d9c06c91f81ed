"""The loop of one attempt: it passes events to the head, and executes the head's actions, here and nowhere else.

    agents, signals ─── handle(event) ──▶ Dispatcher ──▶ Head
                                              │ actions wait in a queue
    agents, screen, terminal ◀── run(agents) ─┘

Events are handled at once. Their actions are executed when the callback that noticed the event returns: so nothing that
an action causes happens in the middle of a callback, and the agents need not exist when the loop is made.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import stall_patience
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, HeadOptions, TimeLimits
from jaxrun.controller.supervisor.dispatcher import Dispatcher
from jaxrun.controller.supervisor.job_history import JobHistory
from jaxrun.controller.supervisor.job_server import JobServer
from jaxrun.controller.supervisor.job_terminal import Terminal, why_no_terminal
from jaxrun.controller.supervisor.notifier import Notifier
from jaxrun.controller.supervisor.train_job_status import TrainJobStatus
from jaxrun.job_events.actions import (
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
from jaxrun.job_events.events import Event, FreshInterpreters, Resumed
from jaxrun.node.agent.agent import SIGNALS
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.addresses import loopback_address
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentMessage,
    AgentOrder,
    FirstOutput,
    ForkingDeclined,
    RankOrder,
    SignalWorker,
)
from jaxrun.protocol.env import attempt_nonce
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.job_record import JobRecord
from jaxrun.protocol.names import GANG_ADDRESS, POD_MARKER
from jaxrun.protocol.worker_messages import Done, Failed
from jaxrun.records.event_log.event_log import LoggedMessage
from jaxrun.records.output.output import Output
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.option_checks import PRELOAD_AUTO
from jaxrun.spec.job.option_kinds import AUTO_S
from jaxrun.spec.job.plan import Plan


class Supervision(HidesFields, frozen=True):
    """What all attempts of a job share.

    loop:     serves the job from before its first attempt to its end
    events:   have come to the job, and wait for the head of this attempt or of the next one
    history:  the attempts that other launchers have made; when the job began
    """

    hidden = frozenset({"environ"})

    environ: Mapping[str, str]
    directory: RunDir
    output: Output
    signals: SignalPipe
    loop: EventLoop
    events: deque[Event]
    guard: Guard
    terminal: Terminal
    server: JobServer
    notifier: Notifier
    train_job: TrainJobStatus
    history: JobHistory

    @property
    def started(self) -> float:
        """When the job began, in seconds since the epoch."""
        return self.history.started

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds since the epoch."""
        return self.loop.clock

    def serve_and_check(self) -> bool:
        """Serve the job within a wait for something else; returns whether a signal asks the launcher to stop."""
        self.loop.run_once(0)
        return self.signals.stop_requested


class AttemptResult(Struct, frozen=True):
    """How an attempt ended; `hosts` has the host of each rank, as far as it was known then."""

    outcome: JobOutcome
    hosts: Mapping[int, str]


class AgentLink(Protocol):
    """The way to the agents of one attempt."""

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        """Send an order about these ranks to their agents."""

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        """Send an order to these agents."""

    def look_for_hosts(self, agents: tuple[AgentId, ...]) -> None:
        """Look for the hosts of these agents, and start the agents there, or for any host that the job lacks.

        HostsFound follows.
        """

    def on_signal(self, signum: int) -> None:
        """Handle a signal to this process."""


class AttemptLoop:
    """The event loop of one attempt, with the head behind its dispatcher, signals, the terminal and the screen."""

    def __init__(self, shared: Supervision, head: Head, attempt: int, *, preload: str = PRELOAD_AUTO) -> None:
        """`attempt` is its number, for the log; `preload` is the value of --preload."""
        self._shared = shared
        self.loop = loop = shared.loop.part()  # for what ends with this attempt
        self._dispatcher = dispatcher = Dispatcher(head, shared.directory, shared.server, shared.clock, attempt)
        self._output = shared.output
        self._output.set_hosts(lambda: dispatcher.hosts)
        self._terminal = shared.terminal
        self._signals = shared.signals
        self._arrived: deque[int] = deque()  # signals that were not handled yet
        self._due: deque[Sequence[Action]] = deque()
        self._outcome: JobOutcome | None = None
        is_gang = GANG_ADDRESS in shared.environ  # its launcher names the modules that its parent has found
        self._named = set() if is_gang else set(preload.split(",")) - {PRELOAD_AUTO}
        loop.add_reader(shared.signals.fileno(), SIGNALS, lambda: self._arrived.extend(self._signals.receive()))
        shared.server.begin_attempt(shared.events)
        loop.add_poller(self._output.flush_due)
        train_job = shared.train_job
        loop.add_timer(train_job.deadline, lambda: train_job.update(dispatcher.told_step, shared.clock()))
        loop.add_timer(dispatcher.deadline, lambda: self._due.append(dispatcher.handle_timeouts()))

    @property
    def hosts(self) -> Mapping[int, str]:
        """The host of each rank, as far as known."""
        return self._dispatcher.hosts

    def run(self, agents: AgentLink) -> JobOutcome:
        """Serve the attempt until the head decides that it is over.

        Signals that arrive after that stay in the pipe, for whatever follows the attempt.
        """
        self._execute_due(agents)
        self._shared.loop.run_until(lambda: self._outcome is not None, after_step=lambda: self._proceed(agents))
        self._terminal.stop_reading()
        if self._arrived:
            self._signals.put_back(self._arrived)
        assert self._outcome is not None
        return self._outcome

    def _proceed(self, agents: AgentLink) -> None:
        """Handle the consequences of a step of the loop."""
        self._execute_due(agents)
        while self._arrived and self._outcome is None:
            agents.on_signal(self._arrived.popleft())
            self._execute_due(agents)

    def handle(self, event: Event) -> None:
        """Pass an event to the head; its actions follow once the current callback of the loop has returned."""
        self._due.append(self._dispatcher.handle(event))

    def receive(self, message: AgentMessage) -> None:
        """Pass an agent's report to the head, unless it is only logged."""
        match message:
            case FirstOutput():
                self.record(message)
            case Preloaded():
                self.record(message)
                self._show_left_out(message)
            case ForkingDeclined():
                self.record(FreshInterpreters(message.reason))
            case _:
                if isinstance(message, (Done, Failed)):
                    self._output.note_end(message.rank)
                self.handle(message)

    def record(self, message: LoggedMessage) -> None:
        """Log a message that the head does not need."""
        self._dispatcher.record(message)

    def _show_left_out(self, preloaded: Preloaded) -> None:
        """Print why a module that the user named is left to the ranks; once for all hosts."""
        for name in sorted(self._named & preloaded.left_out.keys()):
            self._notify(f"--preload {name}: {preloaded.left_out[name]}; left to the program")
            self._named.remove(name)

    def _notify(self, text: str) -> None:
        self._output.print_line(f"jaxrun: {text}")

    def _execute_due(self, agents: AgentLink) -> None:
        events = self._shared.events
        while events or self._due:
            while events and self._outcome is None:
                self.handle(events.popleft())
            if not self._due:
                return
            self._execute_all(self._due.popleft(), agents)

    def _execute_all(self, actions: Iterable[Action], agents: AgentLink) -> None:
        actions = list(actions)
        killed = [action for action in actions if isinstance(action, SignalRanks) and action.signum == signal.SIGKILL]
        if killed:
            # Stop all before the first is killed; otherwise they would see each other die, and complain.
            ranks = tuple(rank for action in killed for rank in action.ranks)
            agents.send(ranks, SignalWorker(signal.SIGSTOP))
        for action in actions:
            self._execute(action, agents)

    def _execute(self, action: Action, agents: AgentLink) -> None:
        match action:
            case Send():
                agents.send(action.ranks, action.message)
            case SendToAgents():
                agents.send_to_agents(action.agents, action.message)
            case SignalRanks():
                agents.send(action.ranks, SignalWorker(action.signum))
            case PrintLine():
                self._output.print_line(f"jaxrun: {action.text}" if action.text else "", status=action.status)
            case ShowTerminalText():
                self._terminal.show(action.text)
            case ReadTerminalLine():
                self._terminal.read_line()
            case LookForHosts():
                agents.look_for_hosts(action.agents)
            case Suspend():
                self._suspend()
            case Finish():
                self._outcome = action.outcome

    def _suspend(self) -> None:
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.handle(Resumed(time.monotonic() - began))


def make_head(plan: Plan, shared: Supervision, record: JobRecord, registry: AgentRegistry | None = None) -> Head:
    """Make the head of an attempt.

    record:  what is known of the job as the attempt begins

    A `registry` decides the devices and the coordinator's interface once all agents report.
    """
    job, began = plan.job, record.began
    before = began - shared.started
    nonce = attempt_nonce(plan.job_id, plan.attempt)
    expected = Expected(len(plan.workers), nonce, job.platform, plan.local_devices)
    limits = TimeLimits(
        init=job.init_timeout,
        job=None if job.timeout is None else job.timeout - before,
        grace=job.failure_grace,
        signal_grace=job.signal_grace,
        stall=None if job.stall_timeout == AUTO_S else job.stall_timeout,
        learns_stall=job.least_learned_stall and job.least_learned_stall * stall_patience(record.ends),
        stall_notice=job.stall_notice,
        save=job.save_time,
        ends_at=plan.ends_at,
        unhurried=bool(job.wrap) and job.grace is None,
        grow=job.grow_after if plan.is_smaller else None,
        teardown=job.grace,
    )
    awaited = registry.roster.missing() if registry is not None else {}
    options = HeadOptions(
        interface="" if registry else loopback_address(),
        lockstep=job.lockstep,
        chaos=job.chaos,
        no_terminal=why_no_terminal(plan),
        requeue=job.requeue,
        debug=job.debug and plan.attempt == 1,
        post_mortem=job.debug_post_mortem,
        keep_survivors=job.keep_survivors,
        drains=plan.head_may_return and POD_MARKER in shared.environ,
        cores=_cores_to_watch(plan, shared.environ) if registry is None else 0,
    )
    hosts = plan.host_of | {rank: host for agent, host in awaited.items() for rank in plan.agents[agent]}
    return Head(HeadJob(hosts, plan.agents, expected, limits, options), began, registry)


def _cores_to_watch(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return the number of this machine's cores that the ranks may use; 0 if a lack of cores is not worth a line.

    Gangs print what their functions print, simulated hosts are several on purpose, and one line is enough for a job.
    """
    job = plan.job
    is_unwanted = job.quiet or job.simulated_hosts or plan.attempt > 1 or GANG_ADDRESS in environ
    return 0 if is_unwanted else len(os.sched_getaffinity(0))
