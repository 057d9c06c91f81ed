"""One job, from its first process to its exit code: puts agent, head and output together, and tells the verdict."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from jaxrun.agent import orphans
from jaxrun.agent.agent import Agent
from jaxrun.agent.crew import Crew
from jaxrun.agent.forkserver import ForkServer
from jaxrun.agent.guard import Guard
from jaxrun.agent.signals import SignalPipe
from jaxrun.agent.spawn import Spawner
from jaxrun.head.events import Ending, Limits
from jaxrun.head.head import Head
from jaxrun.head.uniform import Expected
from jaxrun.output.output import Output
from jaxrun.planning.plan import Plan, summary, to_json
from jaxrun.records import rundir
from jaxrun.records.rundir import RunDir
from jaxrun.verdict import report, verdict

_LOOPBACK = "127.0.0.1"
_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def conduct(
    plan: Plan, environ: Mapping[str, str], directory: RunDir, guard: Guard, server: ForkServer | None, started: float
) -> int:
    """Conduct the job that was begun at `started`, seconds since the epoch; returns the exit status of `jaxrun`.

    `server` is the process that imports jax for it, if there is one.
    """
    with SignalPipe(_SIGNALS) as signals:
        orphans.adopt()
        try:
            output = _open_output(plan, environ, directory)
            crew = Crew(plan, Spawner(plan, environ, _run_dir(directory)), server)
            agent = Agent(crew, _make_head(plan, started), output, directory, signals)
            directory.record("started", started)
            ending = agent.run()
        finally:
            guard.dismiss()
            orphans.end_all()
        agent.close()
    return _tell(plan, ending, started, directory, output)


def _tell(plan: Plan, ending: Ending, started: float, directory: RunDir, output: Output) -> int:
    decided = verdict.decide(ending, plan.host_of, started=started, ended=time.time(), timeout=plan.job.timeout)
    directory.write_text(rundir.VERDICT, verdict.to_json(decided))
    directory.close()
    output.say(report.render(decided, _as_typed(directory.path)))
    output.close()
    return decided.exit_code


def _open_output(plan: Plan, environ: Mapping[str, str], directory: RunDir) -> Output:
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    out, err = (not plain and os.isatty(fd) for fd in (1, 2))
    ranks = [worker.rank for worker in plan.workers]
    shown = frozenset(rank for rank in ranks if plan.job.shows(rank))
    output = Output(len(ranks), log_dir=directory.path, colour=(out, err), shown=shown)
    directory.on_trouble(lambda text: output.say(f"jaxrun: {text}"))
    directory.write_text(rundir.JOB, to_json(plan))
    where = f" · run dir {_as_typed(directory.path)}" if directory.path else ""
    output.say(f"jaxrun: {summary(plan)}{where}")
    for note in plan.notes if plan.job.verbose else ():
        output.say(f"jaxrun: {note}")
    return output


def _make_head(plan: Plan, now: float) -> Head:
    job = plan.job
    expected = Expected(len(plan.workers), plan.job_id, job.platform, plan.local_devices)
    limits = Limits(init=job.init_timeout, job=job.timeout, grace=job.grace)
    return Head(plan.host_of, expected, limits, _LOOPBACK, now)


def _run_dir(directory: RunDir) -> str:
    return str(directory.path.absolute()) if directory.path else ""


def _as_typed(path: Path | None) -> Path | None:
    """Relative to where the user is, when it lies below."""
    if path is None or not path.is_absolute():
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
