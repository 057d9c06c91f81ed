"""What people are told of a job: its first line, its output, and at its end the verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from jaxrun.head.actions import JobOutcome
from jaxrun.job.plan import Plan, to_json
from jaxrun.job.render import plan_summary
from jaxrun.output.output import Output
from jaxrun.rundir import rundir
from jaxrun.rundir.rundir import RunDir
from jaxrun.verdict import decide, report, verdict
from jaxrun.verdict.verdict import Verdict


def open_output(plan: Plan, environ: Mapping[str, str], directory: RunDir) -> Output:
    """Where all output goes; the job's first line has been said."""
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    plain |= plan.launch_command is not None and bool(
        plan.launch_command.attached_to
    )  # mpirun may show its ranks a terminal of its own
    out, err = (not plain and os.isatty(fd) for fd in (1, 2))
    ranks = [worker.rank for worker in plan.workers]
    shown = frozenset(rank for rank in ranks if plan.job.shows(rank))
    # Agents on other hosts write the logs themselves, where they can.
    ours = plan.launch_command is None
    output = Output(len(ranks), log_dir=directory.path, colour=(out, err), shown=shown, open_logs=ours)
    directory.on_write_error(lambda text: output.print_line(f"jaxrun: {text}"))
    launcher = {"host": os.uname().nodename, "pid": os.getpid()}
    directory.write_text(rundir.JOB_FILE, to_json(plan, launcher))
    where = f" · run dir {display_path(directory.path)}" if directory.path else ""
    output.print_line(f"jaxrun: {plan_summary(plan)}{where}")
    for note in plan.notes if plan.job.verbose else ():
        output.print_line(f"jaxrun: {note}")
    return output


def make_verdict(plan: Plan, hosts: Mapping[int, str], ending: JobOutcome, started: float) -> Verdict:
    """The verdict, as soon as the job is over."""
    return decide.decide(ending, hosts, started=started, ended=time.time(), timeout=plan.job.timeout)


def report_verdict(decided: Verdict, directory: RunDir, output: Output) -> int:
    """Print and keep the verdict; returns the exit status of `jaxrun`."""
    directory.write_text(rundir.VERDICT_FILE, verdict.to_json(decided))
    directory.close()
    output.print_line(report.format_report(decided, display_path(directory.path)))
    output.close()
    return decided.exit_code


def display_path(path: Path | None) -> Path | None:
    """Relative to where the user is, when it lies below."""
    if path is None or not path.is_absolute():
        return path
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
