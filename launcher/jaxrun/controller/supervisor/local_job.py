"""A job on this machine: its agents are in the launcher's own process, one for each host that is simulated.

They share one Agent, which has all workers, because one import of jax serves the workers of all hosts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import HostCheckFailed
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.roster import Roster
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.controller.supervisor.attempt_loop import AttemptLoop, make_head, make_registry
from jaxrun.controller.supervisor.supervision import Supervision
from jaxrun.job_events.events import LauncherSignalled
from jaxrun.node.agent.agent import MESSAGES, Agent
from jaxrun.node.agent.process_tree import kill_all
from jaxrun.node.agent.spawn import setup_of_orders
from jaxrun.node.agent.worker_group import OwnForkServer, WorkerGroup
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentOrder,
    AgentReport,
    ClockProbe,
    ClockReply,
    RankOrder,
    StartWorker,
    StartWorkers,
)
from jaxrun.protocol.auth import new_token
from jaxrun.protocol.job_record import JobRecord
from jaxrun.protocol.probe_messages import PeerResults, ProbePeers
from jaxrun.protocol.staging_messages import CopyStaged, StagedCopied
from jaxrun.spec.job.plan import Plan

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.launcher_staging import Staged
    from jaxrun.node.agent.host_readiness import HostReadiness
    from jaxrun.node.agent.task_thread import TaskThread


class LocalJob:
    """Runs the attempts of a job whose workers are all on this machine."""

    listen_addresses = ""  # there is nothing to listen for

    def __init__(
        self, shared: Supervision, plan: Plan, address: str, fork_server: ForkServer | None, staged: Staged | None
    ) -> None:
        """`address` is where this machine reaches itself.

        fork_server:  the process that imports jax for all workers, if there is one
        """
        self._shared = shared
        self._roster = Roster()
        self._address = address
        self._workers = LocalWorkers(shared, fork_server, staged)
        self._readiness: Mapping[AgentId, HostReadiness] = {}
        if plan.host_check is not None or (plan.job.max_restarts and plan.device_names):
            from jaxrun.node.agent.host_readiness import HostReadiness

            environ = {**shared.environ, **plan.job.env}
            self._readiness = {agent: HostReadiness(environ, report.host) for agent, report in plan.reports.items()}

    def run_attempt(self, plan: Plan, record: JobRecord) -> JobOutcome:
        """Run the workers to their end; nothing that they started is left, and all their output is delivered.

        record:  what is known of the job as the attempt begins
        """
        shared = self._shared
        self._roster.begin(plan, anew=True)
        registry = make_registry(plan, shared, self._roster)
        head = AttemptHead(shared, make_head(plan, shared, record, registry), plan.attempt, preload=plan.job.preload)
        agents = LocalAgents(shared, head, plan, self._workers, self._address)
        agents.report(self._readiness)
        outcome = AttemptLoop(shared, head, agents).run()
        agents.close()
        head.loop.close()
        return outcome

    def placed(self, plan: Plan) -> Plan:
        return plan

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        """Return the plan of another attempt, which is the same one."""
        return Stop() if isinstance(outcome.end, HostCheckFailed) else plan

    def stop(self, exit_code: int, headline: str = "", culprits: Collection[int] = ()) -> None:
        """Release everything that was kept for another attempt."""
        self._workers.close()


class LocalWorkers:
    """Prepares the workers of this machine, and ends what they have left; keeps their fork server for each attempt."""

    def __init__(self, shared: Supervision, fork_server: ForkServer | None, staged: Staged | None) -> None:
        self._shared = shared
        self._staged = staged
        self._fork_server = OwnForkServer(fork_server)
        self._forks = fork_server is not None

    def prepare(self, starts: tuple[StartWorker, ...], *, restarts: bool) -> WorkerGroup:
        """Return these workers, not yet started, with their fork server, if there is one."""
        guard = self._shared.guard
        setup = setup_of_orders(starts, self._shared.environ, new_token())
        if self._staged is not None:
            setup = self._staged.start_from_copies(setup)
        server = self._fork_server.get(setup) if self._forks else None
        # Workers of an inherited fork server lack the mark in their environment by which the guard finds others.
        unmarked = server is not None and server.inherited
        return WorkerGroup(setup, server, guard.add if unmarked else None, keep_server=restarts)

    def end(self, workers: WorkerGroup | None) -> None:
        """Kill what the attempt has left. Workers that no process can fork are never forked again."""
        self._forks = self._forks and not (workers is not None and workers.declined)
        kill_all(keep=(self._shared.guard.pid, *self._fork_server.pids, *self._shared.outside.notifier.pids))

    def close(self) -> None:
        self._fork_server.close()


class LocalAgents:
    """AgentLink to the agents in this process, in one attempt."""

    def __init__(self, shared: Supervision, head: AttemptHead, plan: Plan, workers: LocalWorkers, address: str) -> None:
        """`address` is where this machine reaches itself."""
        self._shared = shared
        self._head = head
        self._plan = plan
        self._workers = workers
        self._address = address
        self._ordered: dict[AgentId, tuple[StartWorker, ...]] = {}
        self._task: TaskThread[AgentReport | str] | None = None  # waits until the hosts are ready
        self._started: tuple[Agent, WorkerGroup] | None = None

    def report(self, readiness: Mapping[AgentId, HostReadiness]) -> None:
        """Report all hosts to the head: at once or, where there may be something to wait for, when they are ready."""
        if not readiness:
            for report in self._plan.reports.values():
                self._report(report)
            return
        from jaxrun.node.agent.task_thread import TaskThread

        self._task = TaskThread(partial(self._reports_of_ready, readiness))
        self._head.loop.add_reader(self._task.fileno(), MESSAGES, self._on_task)

    def close(self) -> None:
        """End what is left of the attempt, and deliver all output."""
        self._stop_task()
        agent, workers = self._started or (None, None)
        self._workers.end(workers)
        if agent is not None:
            agent.close()

    # ---- orders of the head

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        if self._started is not None:
            self._started[0].execute(ranks, order)

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        match order:
            case StartWorkers():
                self._ordered |= dict.fromkeys(agents, order.workers)
                if len(self._ordered) == len(self._plan.reports):
                    self._start()
            case CopyStaged():  # the launcher has copied everything to this host
                for agent in agents:
                    self._head.handle(StagedCopied(agent, 0))
            case ClockProbe():
                for agent in agents:
                    self._head.handle(ClockReply(agent, order.asked_at, time.time()))
            case ProbePeers():  # hosts that are one machine reach each other
                for agent in agents:
                    self._head.handle(PeerResults(agent, {}, {}))

    def look_for_hosts(self, agents: tuple[AgentId, ...]) -> None:
        """The job has no other."""

    def on_signal(self, signum: int) -> None:
        if signum != signal.SIGCHLD:
            self._head.handle(LauncherSignalled(signum))
        elif self._started is not None:
            self._started[0].on_child_exit()

    # ---- until the workers start

    def _report(self, report: AgentReport) -> None:
        own = self._address
        there = replace(report, attempt=self._plan.attempt, time=time.time(), address=own, head_address=own)
        self._head.handle(there)

    def _reports_of_ready(
        self, readiness: Mapping[AgentId, HostReadiness], is_stopped: Callable[[], bool]
    ) -> Iterator[AgentReport | str]:
        """Yield the report of each host once it is ready; runs in a thread."""
        from jaxrun.node.agent.host_readiness import CheckTurn

        plan = self._plan
        for agent, report in plan.reports.items():
            turn = CheckTurn(plan.attempt, plan.placement.agents[agent][0])
            failure = readiness[agent].wait(plan.host_check, turn, self._post, is_stopped)
            if failure is None:
                return
            yield replace(report, check_failure=failure)
            if plan.job.max_restarts and plan.device_names:
                readiness[agent].note_gpu_memory()

    def _post(self, text: str) -> None:
        """Have a line printed, from within the task."""
        if self._task is not None:
            self._task.post(text)

    def _on_task(self) -> None:
        for message in self._task.receive() if self._task is not None else ():
            if isinstance(message, AgentReport):
                self._report(message)
            else:
                self._shared.output.print_line(f"jaxrun: {message}")

    def _stop_task(self) -> None:
        if self._task is not None:
            self._head.loop.remove_reader(self._task.fileno())
            self._task.close()
            self._task = None

    def _start(self) -> None:
        """Start the workers of all hosts."""
        self._stop_task()  # a process with threads must not fork
        starts = tuple(start for agent in sorted(self._ordered) for start in self._ordered[agent])
        workers = self._workers.prepare(starts, restarts=bool(self._plan.job.max_restarts))
        agent = Agent(self._head.loop, workers, self._shared.output, self._head.receive, self._shared.clock)
        self._started = agent, workers
        agent.start()
