"""A job of Slurm's that goes on after a preemption or its time limit (--requeue).

Slurm is asked to start the job again, as the last that this launcher does. The run directory goes on too: it is found
by the job's number, which stays.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping

from jaxrun.errors import EXIT_PREEMPTED, UnavailableError, UsageError
from jaxrun.spec.backends.slurm_job_state import query_job_state
from jaxrun.terminal import print_notice


def run_requeued(environ: Mapping[str, str], run: Callable[[], int]) -> int:
    """Run the job by `run`, and see that it goes on if it was preempted; returns the exit status of `jaxrun`.

    Raises UsageError or UnavailableError where it could not go on.
    """
    check_requeue(environ)
    status = run()
    if status == EXIT_PREEMPTED:
        print_notice(requeue(environ))
    return status


def check_requeue(environ: Mapping[str, str]) -> None:
    """Raise UnavailableError without scontrol, and UsageError where Slurm cannot start the job again."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        raise UnavailableError(
            "--requeue has Slurm start the job again by scontrol, which is not on PATH, as in a container; an array of "
            "jobs that run one after the other does without it: docs/surviving.md"
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
