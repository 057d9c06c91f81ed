"""A job of Slurm's that goes on after a preemption or its time limit (--requeue).

    scontrol   Slurm is asked to start the job again, as the last that this launcher does
    chain:N    N jobs were handed in at once; each waits for the one before, and goes on where that was preempted

Either way the run directory goes on too: it is found by the job's identity, which all these launchers share.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import EXIT_PREEMPTED, UnavailableError, UsageError
from jaxrun.records.rundir.recorded_files import read_verdict
from jaxrun.records.rundir.requeued import find_requeued
from jaxrun.spec.backends.slurm_job_state import query_job_state
from jaxrun.spec.job.job import REQUEUE_SCONTROL
from jaxrun.spec.job.plan import Plan
from jaxrun.terminal import print_notice

_UNFINISHED = ("preempted", "lost")  # outcomes after which the next job of a chain goes on


def run_requeued(plan: Plan, environ: Mapping[str, str], run: Callable[[], int]) -> int:
    """Run the job by `run`, and see that it goes on if it was preempted; returns the exit status of `jaxrun`.

    Raises UsageError or UnavailableError where it could not go on.
    """
    if plan.job.requeue == REQUEUE_SCONTROL:
        check_requeue(environ)
    elif (before := _read_last_verdict(plan)) is not None and before.outcome not in _UNFINISHED:
        how = "done" if before.outcome == "ok" else f"{before.outcome}, exit {before.exit_code}"
        print_notice(f"a job before this one in its chain has ended ({how}); there is nothing left to do")
        return before.exit_code
    status = run()
    if status != EXIT_PREEMPTED:
        return status
    if plan.job.requeue == REQUEUE_SCONTROL:
        print_notice(requeue(environ))
    else:
        print_notice("the next job of the chain goes on")
    return status


def check_requeue(environ: Mapping[str, str]) -> None:
    """Raise UnavailableError without scontrol, and UsageError where Slurm cannot start the job again."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        raise UnavailableError(
            "--requeue has Slurm start the job again by scontrol, which is not on PATH, as in a container; a chain of "
            "jobs does without it: --submit --requeue=chain:8, typed on a machine that has sbatch"
        )
    job = environ["SLURM_JOB_ID"]
    state = query_job_state(job, environ)
    if state is not None and not state.is_batch:
        raise UsageError(
            f"--requeue is for a batch job, which Slurm can start again, and Slurm job {job} is an interactive one; "
            "leave it out, or hand the job to Slurm with --submit"
        )
    if state is not None and not state.requeue:
        raise UsageError(f"--requeue: Slurm job {job} was submitted with --no-requeue; leave one of them out")


def requeue(environ: Mapping[str, str]) -> str:
    """Have Slurm start this job again, unless somebody has cancelled it; returns a line that says how that went.

    A job that Slurm itself ends, to start it again or not, is no longer RUNNING; and `scontrol requeue` would revive
    one that its user has cancelled.
    """
    job = environ["SLURM_JOB_ID"]
    in_array = {"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"} <= environ.keys()
    name = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}" if in_array else job
    by_hand = f"to have it started again: scontrol requeue {name}"
    try:
        state = query_job_state(job, environ)
    except UnavailableError as error:
        return f"{error}, so it is not started again"
    if state is None:
        return f"Slurm does not answer, so job {name} is not started again; {by_hand}"
    if state.state != "RUNNING":
        return f"Slurm itself ends job {name}, so whether it starts it again is up to Slurm"
    words = ["scontrol", "requeue", name]
    done = subprocess.run(
        words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        return f"Slurm did not start job {name} again: {done.stderr.strip()}; {by_hand}"
    return f"Slurm starts job {name} again (restart {state.restarts + 1})"


def _read_last_verdict(plan: Plan) -> Verdict | None:
    path = find_requeued(plan.job.run_dir, Path.cwd(), plan.requeue_id)
    return read_verdict(path) if path is not None else None
