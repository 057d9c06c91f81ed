"""Carries out a plan on this machine: from the run directory to the exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from . import orphans, report, rundir, verdict
from .agent import Agent
from .crew import Crew
from .events import Ending, Limits
from .guard import Guard
from .head import Head
from .output import Output
from .plan import Plan, summary, to_json
from .signals import SignalPipe
from .spawn import Spawner
from .uniform import Expected

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


def run(plan: Plan, environ: Mapping[str, str]) -> int:
    """Run the job to its end; returns the exit status of `jaxrun`."""
    started = time.time()
    directory = _open_run_dir(plan)
    guard = Guard(plan.job_id)  # forks, so it comes before any thread
    orphans.adopt()
    crew = Crew(plan, Spawner(plan, environ, str(directory.path.absolute()) if directory.path else ""))
    try:
        with SignalPipe(_SIGNALS) as signals:
            crew.begin()
            output = _open_output(plan, environ, directory)
            directory.on_trouble(output.say)
            directory.write_text("job.json", to_json(plan))
            output.say(f"jaxrun: {_opening(plan, directory.path)}")
            agent = Agent(crew, _make_head(plan, started), output, directory, signals)
            ending = agent.run()
            guard.dismiss()
            orphans.end_all()
            agent.close()
    finally:
        guard.dismiss()
        orphans.end_all()
    decided = _decide(plan, ending, started, directory)
    output.say(report.render(decided, directory.path))
    output.close()
    directory.close()
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
    return Output(len(ranks), log_dir=directory.path, colour=(out, err), shown=shown)


def _make_head(plan: Plan, now: float) -> Head:
    job = plan.job
    expected = Expected(len(plan.workers), plan.job_id, job.platform, plan.local_devices)
    limits = Limits(init=job.init_timeout, job=job.timeout, grace=job.grace)
    return Head({worker.rank: worker.host for worker in plan.workers}, expected, limits, _LOOPBACK, now)
