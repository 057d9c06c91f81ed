"""The agent in the launcher's own process: starts all workers of a job on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.node.agent.agent import Agent
from jaxrun.node.agent.fork_server_keeper import ForkServerKeeper
from jaxrun.node.agent.spawn import Spawner
from jaxrun.node.agent.subreaper import kill_all
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.records.event_log.actions import Finish
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.plan import Plan

if TYPE_CHECKING:
    from jaxrun.controller.supervisor.attempts import AttemptContext
    from jaxrun.node.agent.gpus import GpuMemory


class LocalAgent:
    """Agents of attempts.py: one, in this process."""

    listen_addresses = ""

    def __init__(self, environ: Mapping[str, str], directory: RunDir, fork_server: ForkServer | None) -> None:
        """`fork_server` is the process that imports jax for all workers, if there is one."""
        self._environ = environ
        self._directory = directory
        self._fork_servers = ForkServerKeeper(environ, fork_server)
        self._forks = fork_server is not None
        self._gpu_memory: GpuMemory | None = None

    def make_registry(self, plan: Plan) -> None:
        """There is none: this machine is known."""

    def next_plan(self, plan: Plan, outcome: JobOutcome) -> Plan:
        return plan

    def run(self, context: AttemptContext) -> JobOutcome:
        """Run the workers to their end; nothing that they started is left, and all their output is handed over."""
        plan, guard = context.plan, context.guard
        self._wait_for_gpus(context)
        server = self._fork_servers.take(plan)
        if server is None and self._forks and plan.attempt > 1:
            server = self._fork_servers.start(plan)
        # Workers of an inherited fork server lack the mark in their environment by which the guard finds others.
        unmarked = server is not None and server.inherited
        spawner = Spawner(plan, self._environ, self._directory.name, context.log_dir)
        workers = WorkerGroup(
            plan,
            spawner,
            server,
            guard.add if unmarked else None,
            new_server=(lambda: self._fork_servers.start(plan)) if self._forks and plan.job.max_restarts else None,
        )
        agent = Agent(
            workers,
            context.dispatcher,
            context.output,
            context.signals,
            context.clock,
            context.parent,
            context.terminal,
        )
        last = agent.run()
        assert isinstance(last, Finish)
        self._fork_servers.keep(workers.successor, plan)
        self._forks = self._forks and not workers.declined
        kill_all(spare=(guard.pid, *self._fork_servers.pids))
        agent.close()
        return last.outcome

    def _wait_for_gpus(self, context: AttemptContext) -> None:
        """Before the first of several attempts, note how much of the GPUs is used; before the others, wait for it."""
        plan, signals = context.plan, context.signals
        if not plan.job.max_restarts or not plan.device_names:
            return
        if self._gpu_memory is None:
            from jaxrun.node.agent.gpus import GpuMemory

            self._gpu_memory = GpuMemory.visible_with({**self._environ, **plan.job.env})
            return
        self._gpu_memory.wait_until_free(
            lambda text: context.output.print_line(f"jaxrun: {text}"), lambda: signals.stop_requested
        )

    def stop(self, exit_code: int) -> None:
        """Let a fork server end that waits for another attempt."""
        self._fork_servers.close()
