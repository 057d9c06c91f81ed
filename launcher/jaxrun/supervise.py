"""Carries out a plan on this machine: from the run directory to the exit code."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from . import orphans, report, rundir, verdict
from .agent import Agent
from .crew import Crew
from .events import Limits
from .guard import Guard
from .head import Head
from .output import Output
from .plan import Plan, summary, to_json
from .signals import SignalPipe
from .spawn import Spawner
from .uniform import Expected

_LOOPBACK = "127.0.0.1"
_FILES_PER_WORKER = 12  # two pipes, a channel, stacks and two logs, and twice the first while it is being started
_FILES_OF_OURS = 64
_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def run(plan: Plan, environ: Mapping[str, str]) -> int:
    """Run the job to its end; returns the exit status of `jaxrun`."""
    started = time.time()
    _allow_open_files(_FILES_OF_OURS + _FILES_PER_WORKER * len(plan.workers))
    directory = _open_run_dir(plan)
    guard = Guard(plan.job_id)  # forks, so it comes before any thread
    orphans.adopt()
    crew = Crew(plan, Spawner(plan, environ, str(directory.path.absolute()) if directory.path else ""))
    try:
        with SignalPipe(_SIGNALS) as signals:
            crew.begin()
            output = _open_output(plan, environ, directory)
            agent = Agent(crew, _make_head(plan, started), output, directory, signals)
            ending = agent.run()
    finally:
        guard.dismiss()
        orphans.end_all()
    agent.close()
    hosts = {worker.rank: worker.host for worker in plan.workers}
    decided = verdict.decide(ending, hosts, started=started, ended=time.time(), timeout=plan.job.timeout)
    directory.write_text(rundir.VERDICT, verdict.to_json(decided))
    directory.close()
    output.say(report.render(decided, _as_typed(directory.path)))
    output.close()
    return decided.exit_code


def _open_run_dir(plan: Plan) -> rundir.RunDir:
    job = plan.job
    if job.no_run_dir:
        return rundir.RunDir(None)
    name = job.program[0].rpartition(".")[2] if job.module else Path(job.program[0]).stem
    return rundir.create(job.run_dir, base=Path.cwd(), name=name, now=datetime.now())


def _open_output(plan: Plan, environ: Mapping[str, str], directory: rundir.RunDir) -> Output:
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
    return Head({worker.rank: worker.host for worker in plan.workers}, expected, limits, _LOOPBACK, now)


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as it may, where the job needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _as_typed(path: Path | None) -> Path | None:
    """Relative to where the user is, when it lies below."""
    if path is None or not path.is_absolute():
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
