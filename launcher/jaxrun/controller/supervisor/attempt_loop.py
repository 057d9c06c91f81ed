"""The loop of one attempt: it waits for what happens, and executes the head's actions, here and nowhere else.

    agents, signals ─── handle(event) ──▶ AttemptHead ──▶ Dispatcher ──▶ Head
                                               │ actions wait in a queue
    agents, screen, terminal ◀── AttemptLoop ──┘

Events are handled at once. Their actions are executed when the callback that noticed the event returns: so nothing that
an action causes happens in the middle of a callback.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import stall_patience
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, HeadOptions, TimeLimits
from jaxrun.controller.roster import Roster
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.controller.supervisor.job_terminal import why_no_terminal
from jaxrun.controller.supervisor.supervision import Supervision
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
from jaxrun.job_events.events import Event, Resumed
from jaxrun.node.agent.agent import SIGNALS
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentOrder,
    RankOrder,
    SignalWorker,
)
from jaxrun.protocol.env import attempt_nonce
from jaxrun.protocol.job_record import JobRecord
from jaxrun.protocol.names import GANG_ADDRESS, POD_MARKER
from jaxrun.records.rundir.rundir import attempt_directory
from jaxrun.spec.job.option_kinds import AUTO_S
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.worker_assignment import LauncherSettings


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
    """Serves one attempt: its agents, signals, the terminal and the screen, and the head behind its link."""

    def __init__(self, shared: Supervision, head: AttemptHead, agents: AgentLink) -> None:
        """`agents` hand their events to the same `head`."""
        self._head = head
        self._agents = agents
        self._loop = shared.loop
        self._output = shared.output
        outside, loop = shared.outside, head.loop
        train_job = outside.train_job
        self._terminal = outside.terminal
        self._signals = outside.signals
        self._events: deque[Event] = outside.events
        self._arrived: deque[int] = deque()  # signals that were not handled yet
        self._outcome: JobOutcome | None = None
        loop.add_reader(self._signals.fileno(), SIGNALS, lambda: self._arrived.extend(self._signals.receive()))
        outside.server.begin_attempt(outside.events)
        loop.add_poller(self._output.flush_due)
        loop.add_timer(train_job.deadline, lambda: train_job.update(head.told_step, shared.clock()))

    def run(self) -> JobOutcome:
        """Serve the attempt until the head decides that it is over.

        Signals that arrive after that stay in the pipe, for whatever follows the attempt.
        """
        self._execute_due()
        self._loop.run_until(lambda: self._outcome is not None, after_step=self._proceed)
        self._terminal.stop_reading()
        if self._arrived:
            self._signals.put_back(self._arrived)
        assert self._outcome is not None
        return self._outcome

    def _proceed(self) -> None:
        """Handle the consequences of a step of the loop."""
        self._execute_due()
        while self._arrived and self._outcome is None:
            self._agents.on_signal(self._arrived.popleft())
            self._execute_due()

    def _execute_due(self) -> None:
        """Execute what the head wants, until nothing is due."""
        self._hand_over()
        for actions in self._head.take_actions():
            self._execute_all(actions)
            self._hand_over()

    def _hand_over(self) -> None:
        """Pass what has come from outside to the head; after its end that waits for the next attempt."""
        while self._events and self._outcome is None:
            self._head.handle(self._events.popleft())

    def _execute_all(self, actions: Sequence[Action]) -> None:
        killed = [action for action in actions if isinstance(action, SignalRanks) and action.signum == signal.SIGKILL]
        if killed:
            # Stop all before the first is killed; otherwise they would see each other die, and complain.
            ranks = tuple(rank for action in killed for rank in action.ranks)
            self._agents.send(ranks, SignalWorker(signal.SIGSTOP))
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        agents = self._agents
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
        self._head.handle(Resumed(time.monotonic() - began))


def make_registry(
    plan: Plan, shared: Supervision, roster: Roster, *, directory: str = "", listen_addresses: str = ""
) -> AgentRegistry:
    """Make the registry of the agents of an attempt; `directory` and `listen_addresses` are as there."""
    run_dir = shared.directory
    log_dir = str(attempt_directory(Path(run_dir.name), plan.attempt)) if run_dir.path else ""
    settings = LauncherSettings({**shared.environ, **plan.job.env}, run_dir.name, log_dir)
    return AgentRegistry(plan, settings, roster, directory=directory, listen_addresses=listen_addresses)


def make_head(plan: Plan, shared: Supervision, record: JobRecord, registry: AgentRegistry) -> Head:
    """Make the head of an attempt.

    record:    what is known of the job as the attempt begins
    registry:  decides the devices and the coordinator's interface once all agents have reported
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
        grow=job.grow_after if plan.placement.is_smaller else None,
        teardown=job.grace,
    )
    awaited, is_remote = registry.roster.missing(), plan.launch_command is not None
    options = HeadOptions(
        has_other_clocks=is_remote,
        lockstep=job.lockstep,
        chaos=job.chaos,
        no_terminal=why_no_terminal(plan),
        requeue=job.requeue,
        debug=job.debug and plan.attempt == 1,
        post_mortem=job.debug_post_mortem,
        keep_survivors=job.keep_survivors,
        returns=job.max_restarts if job.keep_survivors else 0,
        returns_used=sum(end.returns for end in record.ends),
        drains=plan.head_may_return and POD_MARKER in shared.environ,
        in_pods=plan.is_started_by_hand and POD_MARKER in shared.environ,
        cores=0 if is_remote else _cores_to_watch(plan, shared.environ),
    )
    hosts = plan.host_of | {rank: host for agent, host in awaited.items() for rank in plan.placement.agents[agent]}
    return Head(HeadJob(hosts, plan.placement.agents, expected, limits, options), began, registry)


def _cores_to_watch(plan: Plan, environ: Mapping[str, str]) -> int:
    """Return the number of this machine's cores that the ranks may use; 0 if a lack of cores is not worth a line.

    Gangs print what their functions print, simulated hosts are several on purpose, and one line is enough for a job.
    """
    job = plan.job
    is_unwanted = job.quiet or job.simulated_hosts or plan.attempt > 1 or GANG_ADDRESS in environ
    return 0 if is_unwanted else len(os.sched_getaffinity(0))
