"""The agent in the launcher's own process: starts all workers of a job on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxrun.agent.agent import Agent
from jaxrun.agent.spawn import Spawner
from jaxrun.agent.subreaper import kill_all
from jaxrun.agent.worker_group import WorkerGroup
from jaxrun.forkserver.client import ForkServer
from jaxrun.head.actions import Finish, JobOutcome
from jaxrun.job.plan import Plan
from jaxrun.job.standard_input import must_be_copied
from jaxrun.rundir.rundir import RunDir

if TYPE_CHECKING:
    from jaxrun.supervisor.supervise import JobContext


class LocalAgent:
    """Agents of supervise.py: one, in this process."""

    registry = None
    listen_addresses = ""

    def __init__(
        self, plan: Plan, environ: Mapping[str, str], directory: RunDir, fork_server: ForkServer | None
    ) -> None:
        """`fork_server` is the process that imports jax for all workers, if there is one."""
        self._plan = plan
        copies_stdin = must_be_copied(plan.job.stdin)
        self._spawner = Spawner(plan, environ, directory.name, directory.path, copies_stdin=copies_stdin)
        self._fork_server = fork_server

    def run(self, context: JobContext) -> JobOutcome:
        """Run the workers to their end; nothing that they started is left, and all their output is handed over."""
        # Workers of an inherited fork server lack the mark in their environment by which the guard finds others.
        unmarked = self._fork_server is not None and self._fork_server.inherited
        on_forked = context.guard.add if unmarked else None
        workers = WorkerGroup(self._plan, self._spawner, self._fork_server, on_forked)
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
        kill_all(spare=context.guard.pid)
        agent.close()
        return last.outcome

    def stop(self, exit_code: int) -> None:
        """Do nothing: all has ended with `run`."""
