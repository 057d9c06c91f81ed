"""The agent in the launcher's own process, which starts all workers of a job on this machine, and the link to it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.controller.supervisor.attempt_context import AttemptContext
from jaxrun.controller.supervisor.executor import Executor
from jaxrun.node.agent.agent import Agent
from jaxrun.node.agent.process_tree import kill_all
from jaxrun.node.agent.spawn import WorkerSetup, with_own_variables
from jaxrun.node.agent.worker_group import ForkServers, WorkerGroup
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentOrder, HostCheck, RankOrder
from jaxrun.protocol.auth import new_token
from jaxrun.records.event_log.events import LauncherSignalled
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.plan import Plan

if TYPE_CHECKING:
    from jaxrun.node.agent.gpus import GpuMemory


class LocalAgent:
    """Agents of attempts.py: one, in this process."""

    listen_addresses = ""

    def __init__(self, environ: Mapping[str, str], directory: RunDir, fork_server: ForkServer | None) -> None:
        """`fork_server` is the process that imports jax for all workers, if there is one."""
        self._environ = environ
        self._directory = directory
        self._fork_servers = ForkServers(fork_server)
        self._forks = fork_server is not None
        self._gpu_memory: GpuMemory | None = None

    def make_registry(self, plan: Plan) -> None:
        """There is none: this machine is known."""

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan | Stop:
        return Stop() if outcome.failed_checks else plan

    def run(self, context: AttemptContext) -> JobOutcome:
        """Run the workers to their end; nothing that they started is left, and all their output is handed over."""
        plan, guard = context.plan, context.guard
        if (check := plan.host_check) and (failure := self._check_hosts(check, context)):
            return failure
        self._wait_for_gpus(context)
        setup = setup_of(plan, self._environ, self._directory.name, context.log_dir)
        server = self._fork_servers.take(setup, start=self._forks and plan.attempt > 1)
        # Workers of an inherited fork server lack the mark in their environment by which the guard finds others.
        unmarked = server is not None and server.inherited
        workers = WorkerGroup(
            setup,
            server,
            guard.add if unmarked else None,
            successors=self._fork_servers if self._forks and plan.job.max_restarts else None,
        )
        executor = Executor(context)
        agent = Agent(executor.loop, workers, context.output, executor.receive, context.clock)
        outcome = executor.run(LocalLink(agent, executor))
        self._forks = self._forks and not workers.declined
        kill_all(keep=(guard.pid, *self._fork_servers.pids))
        agent.close()
        executor.loop.close()
        return outcome

    def _check_hosts(self, check: HostCheck, context: AttemptContext) -> JobOutcome | None:
        """Run --host-check for each of the hosts that this machine acts as; how the job ends if one fails."""
        from jaxrun.controller.head.agent_registry import HostCheckError
        from jaxrun.node.agent.host_check import check_host

        plan, hosts, failed = context.plan, context.plan.host_of, dict[int, str]()
        env, attempt, signals = plan.base_env(self._environ), plan.attempt, context.signals
        for rank in (worker.rank for worker in plan.workers if worker.local_rank == 0):
            host = hosts[rank]
            failure = check_host(check, env, lambda: signals.stop_requested, host=host, rank=rank, attempt=attempt)
            failed |= {rank: failure} if failure else {}
        if not failed:
            return None
        return JobOutcome(EndReason.UNAVAILABLE, text=str(HostCheckError(failed, hosts)), failed_checks=failed)

    def _wait_for_gpus(self, context: AttemptContext) -> None:
        """Before the first of several attempts, note how much of the GPUs is used; before the others, wait for it."""
        plan, signals = context.plan, context.signals
        if not plan.job.max_restarts or not plan.device_names:
            return
        if self._gpu_memory is None:
            from jaxrun.node.agent.gpus import GpuMemory

            self._gpu_memory = GpuMemory({**self._environ, **plan.job.env})
            return
        self._gpu_memory.wait_until_free(
            lambda text: context.output.print_line(f"jaxrun: {text}"), lambda: signals.stop_requested
        )

    def stop(self, exit_code: int) -> None:
        self._fork_servers.close()


def setup_of(plan: Plan, environ: Mapping[str, str], run_dir: str = "", flight_dir: Path | None = None) -> WorkerSetup:
    """How the workers of a plan are started; `environ` is the launcher's own."""
    token = new_token()
    told = tuple(replace(plan.worker_env(worker, run_dir=run_dir), rank_token=token) for worker in plan.workers)
    shared = with_own_variables(plan.base_env(environ))
    return WorkerSetup(plan.argv, shared, told, flight_dir, plan.job.wrap)


class LocalLink:
    """AgentLink to the agent in this process."""

    def __init__(self, agent: Agent, executor: Executor) -> None:
        self._agent = agent
        self._executor = executor

    def start(self) -> None:
        self._agent.start()

    def send(self, ranks: tuple[int, ...], order: RankOrder) -> None:
        self._agent.execute(ranks, order)

    def send_to_agents(self, agents: tuple[AgentId, ...], order: AgentOrder) -> None:
        raise AssertionError("the plan and the clock of this machine are known: the head orders nothing of its agent")

    def look_for_hosts(self) -> None:
        """The job has no other."""

    def on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._agent.on_child_exit()
        else:
            self._executor.handle(LauncherSignalled(signum))

    def complete(self, outcome: JobOutcome) -> JobOutcome:
        return outcome
