"""One job on this machine, from its first process to its exit code: puts agent, head and output together."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.agent import subreaper
from jaxrun.agent.agent import Agent
from jaxrun.agent.guard import Guard
from jaxrun.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.agent.spawn import Spawner
from jaxrun.agent.worker_group import WorkerGroup
from jaxrun.clock import Clock
from jaxrun.forkserver.client import ForkServer
from jaxrun.head.actions import Finish
from jaxrun.head.consistency import Expected
from jaxrun.head.events import TimeLimits
from jaxrun.head.head import Head
from jaxrun.job.plan import Plan
from jaxrun.rundir.rundir import RunDir
from jaxrun.supervisor.dispatch import Dispatcher
from jaxrun.supervisor.parent_link import ParentLink
from jaxrun.supervisor.report import make_verdict, open_output, report_verdict

_LOOPBACK = "127.0.0.1"


def run_local(
    plan: Plan, environ: Mapping[str, str], directory: RunDir, guard: Guard, server: ForkServer | None, started: float
) -> int:
    """Conduct the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`.

    `server` is the process that imports jax for it, if there is one.
    """
    clock = Clock()
    desk = Dispatcher(_make_head(plan, started), directory, clock)
    control = ParentLink.from_env(environ, desk)
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        subreaper.become_subreaper()
        try:
            output = open_output(plan, environ, directory)
            spawner = Spawner(plan, environ, directory.name, directory.path)
            unmarked = (
                server is not None and server.inherited
            )  # then the guard cannot know the workers by their job's mark
            crew = WorkerGroup(plan, spawner, server, forked=guard.add if unmarked else lambda pid: None)
            orders = (control.fileno(), control.receive) if control else None
            agent = Agent(crew, desk, output, signals, clock, orders)
            directory.record("started", started)
            last = agent.run()
            assert isinstance(last, Finish)
        finally:
            subreaper.kill_all(spare=guard.pid)
            guard.disarm()
        agent.close()
    return report_verdict(make_verdict(plan, plan.host_of, last.outcome, started), directory, output)


def _make_head(plan: Plan, now: float) -> Head:
    job = plan.job
    expected = Expected(len(plan.workers), plan.job_id, job.platform, plan.local_devices)
    limits = TimeLimits(init=job.init_timeout, job=job.timeout, grace=job.grace, stall=job.stall_timeout)
    return Head(plan.host_of, expected, limits, _LOOPBACK, now, lockstep=job.lockstep, chaos=job.chaos)
