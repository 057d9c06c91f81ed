"""One job on this machine, from its first process to its exit code: puts agent, head and output together."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.agent import orphans
from jaxrun.agent.agent import Agent
from jaxrun.agent.crew import Crew
from jaxrun.agent.forkserver import ForkServer
from jaxrun.agent.guard import Guard
from jaxrun.agent.signals import LAUNCHER_SIGNALS, SignalPipe
from jaxrun.agent.spawn import Spawner
from jaxrun.clock import Clock
from jaxrun.control import Control
from jaxrun.desk import Desk
from jaxrun.head.events import Finish, Limits
from jaxrun.head.head import Head
from jaxrun.head.uniform import Expected
from jaxrun.planning.plan import Plan
from jaxrun.records.rundir import RunDir
from jaxrun.telling import decide, open_output, tell

_LOOPBACK = "127.0.0.1"


def conduct(
    plan: Plan, environ: Mapping[str, str], directory: RunDir, guard: Guard, server: ForkServer | None, started: float
) -> int:
    """Conduct the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`.

    `server` is the process that imports jax for it, if there is one.
    """
    clock = Clock()
    desk = Desk(_make_head(plan, started), directory, clock)
    control = Control.of(environ, desk)
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        orphans.adopt()
        try:
            output = open_output(plan, environ, directory)
            spawner = Spawner(plan, environ, directory.name, directory.path)
            unmarked = server is not None and server.given  # then the guard cannot know the workers by their job's mark
            crew = Crew(plan, spawner, server, forked=guard.add if unmarked else lambda pid: None)
            orders = (control.fileno(), control.hear) if control else None
            agent = Agent(crew, desk, output, signals, clock, orders)
            directory.record("started", started)
            last = agent.run()
            assert isinstance(last, Finish)
        finally:
            orphans.end_all(spare=guard.pid)
            guard.dismiss()
        agent.close()
    return tell(decide(plan, plan.host_of, last.ending, started), directory, output)


def _make_head(plan: Plan, now: float) -> Head:
    job = plan.job
    expected = Expected(len(plan.workers), plan.job_id, job.platform, plan.local_devices)
    limits = Limits(init=job.init_timeout, job=job.timeout, grace=job.grace, stall=job.stall_timeout)
    return Head(plan.host_of, expected, limits, _LOOPBACK, now, lockstep=job.lockstep, chaos=job.chaos)
