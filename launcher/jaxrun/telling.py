"""What people are told of a job: its first line, its output, and at its end the verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from jaxrun.head.events import Ending
from jaxrun.output.output import Output
from jaxrun.planning.plan import Plan, to_json
from jaxrun.planning.render import summary
from jaxrun.records import rundir
from jaxrun.records.rundir import RunDir
from jaxrun.verdict import report, verdict
from jaxrun.verdict.outcome import Verdict


def open_output(plan: Plan, environ: Mapping[str, str], directory: RunDir) -> Output:
    """Where all output goes; the job's first line has been said."""
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    plain |= plan.starter is not None and bool(plan.starter.attached)  # mpirun may show its ranks a terminal of its own
    out, err = (not plain and os.isatty(fd) for fd in (1, 2))
    ranks = [worker.rank for worker in plan.workers]
    shown = frozenset(rank for rank in ranks if plan.job.shows(rank))
    # Agents on other hosts write the logs themselves, where they can.
    ours = plan.starter is None
    output = Output(len(ranks), log_dir=directory.path, colour=(out, err), shown=shown, open_logs=ours)
    directory.on_trouble(lambda text: output.say(f"jaxrun: {text}"))
    launcher = {"host": os.uname().nodename, "pid": os.getpid()}
    directory.write_text(rundir.JOB, to_json(plan, launcher))
    where = f" · run dir {as_typed(directory.path)}" if directory.path else ""
    output.say(f"jaxrun: {summary(plan)}{where}")
    for note in plan.notes if plan.job.verbose else ():
        output.say(f"jaxrun: {note}")
    return output


def decide(plan: Plan, hosts: Mapping[int, str], ending: Ending, started: float) -> Verdict:
    """The verdict, as soon as the job is over."""
    return verdict.decide(ending, hosts, started=started, ended=time.time(), timeout=plan.job.timeout)


def tell(decided: Verdict, directory: RunDir, output: Output) -> int:
    """Print and keep the verdict; returns the exit status of `jaxrun`."""
    directory.write_text(rundir.VERDICT, verdict.to_json(decided))
    directory.close()
    output.say(report.render(decided, as_typed(directory.path)))
    output.close()
    return decided.exit_code


def as_typed(path: Path | None) -> Path | None:
    """Relative to where the user is, when it lies below."""
    if path is None or not path.is_absolute():
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
