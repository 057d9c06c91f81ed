"""Reads the state of a job from Slurm (`scontrol show job`), and continues a preempted job (--requeue).

Asking Slurm to start the job again is the last thing that this launcher does. The new launcher continues in the same
run directory, which it finds by the job's number, because that stays the same.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping

from msgspec import Struct

from jaxrun.errors import (
    EXIT_PREEMPTED,
    EXIT_SIGNAL_BASE,
    EXIT_TIMEOUT,
    EXIT_UNAVAILABLE,
    UnavailableError,
    UsageError,
)
from jaxrun.spec.backends.batch_script import BatchPhase, BatchState, parse_time_limit, run_command
from jaxrun.terminal import print_notice

_UNFINISHED_STATES = {
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED",
    "RESIZING", "RESV_DEL_HOLD", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED",
}  # fmt: skip
# In these states Slurm's own ExitCode is meaningless, or not what the user wants to know.
_EXIT_STATUS_BY_STATE = {
    "BOOT_FAIL": EXIT_UNAVAILABLE,
    "CANCELLED": EXIT_SIGNAL_BASE + 15,
    "DEADLINE": EXIT_TIMEOUT,
    "NODE_FAIL": EXIT_UNAVAILABLE,
    "OUT_OF_MEMORY": EXIT_SIGNAL_BASE + 9,
    "PREEMPTED": EXIT_PREEMPTED,
    "TIMEOUT": EXIT_TIMEOUT,
}


class JobState(Struct, frozen=True):
    """The output of `scontrol show job`; `nodes` is empty until the job runs, `output` if the job has no output file.

    requeue:  whether Slurm may start the job again
    is_batch: whether it has a batch script; without one, Slurm cannot start it again
    """

    state: str
    reason: str
    nodes: str
    output: str
    restarts: int
    exit_code: int
    exit_signal: int
    requeue: bool
    is_batch: bool

    @property
    def is_over(self) -> bool:
        return self.state not in _UNFINISHED_STATES

    @property
    def exit_status(self) -> int:
        """The exit status of a command that represents the job."""
        code = EXIT_SIGNAL_BASE + self.exit_signal if self.exit_signal else self.exit_code
        return _EXIT_STATUS_BY_STATE.get(self.state, code)

    @property
    def batch_state(self) -> BatchState:
        phases = {"PENDING": BatchPhase.PENDING, "RUNNING": BatchPhase.RUNNING}
        return BatchState(
            phase=BatchPhase.OVER if self.is_over else phases.get(self.state, BatchPhase.BETWEEN),
            name=self.state,
            reason=self.reason,
            nodes=self.nodes,
            output=self.output,
            restarts=self.restarts,
            exit_status=self.exit_status,
            is_plain=self.state in ("COMPLETED", "FAILED"),
        )


def parse_job_state(text: str) -> JobState | None:
    """Parse the output of `scontrol show job`; None if it contains no state."""
    found = {
        name: value for name, value in re.findall(r"^   .*?\b(JobState|StdOut|NodeList)=(.*)$", text, re.MULTILINE)
    }
    state = re.match(r"(\S+)(?: Reason=(\S+))?", found.get("JobState", ""))
    counts = re.search(r"^   Requeue=(\d).*\bRestarts=(\d+) BatchFlag=(\d).*\bExitCode=(\d+):(\d+)", text, re.MULTILINE)
    if state is None or counts is None:
        return None
    nodes = found.get("NodeList", "")
    return JobState(
        state=state[1],
        reason=state[2] or "",
        nodes="" if nodes == "(null)" else nodes,
        output=found.get("StdOut", ""),
        requeue=counts[1] != "0",
        restarts=int(counts[2]),
        is_batch=counts[3] != "0",
        exit_code=int(counts[4]),
        exit_signal=int(counts[5]),
    )


def query_job_state(job: str, environ: Mapping[str, str]) -> JobState | None:
    """Ask Slurm's controller for the state of `job`, a number; None if the controller does not answer.

    Raises UnavailableError if it does not know the job.
    """
    done = run_command(["scontrol", "show", "job", job], environ)
    if done is not None and "Invalid job id" in done.stderr:
        raise UnavailableError(f"Slurm does not know job {job}")
    return parse_job_state(done.stdout) if done is not None and done.returncode == 0 else None


def query_batch_state(job: str, environ: Mapping[str, str]) -> BatchState | None:
    """Ask for the state of `job` as all schedulers have it. Raises UnavailableError as `query_job_state` does."""
    state = query_job_state(job, environ)
    return state.batch_state if state is not None else None


def end_of_allocation(environ: Mapping[str, str], now: float) -> float | None:
    """When Slurm will end the job of `environ`, in seconds since the epoch; None without a job or a limit."""
    told = environ.get("SLURM_JOB_END_TIME", "")  # set by Slurm 23.02 and later
    if told.isdecimal():
        return float(told)
    number = environ.get("SLURM_JOB_ID", "")
    done = run_command(["squeue", "--noheader", f"--jobs={number}", "--format=%L"], environ) if number else None
    left = parse_time_limit(done.stdout.strip()) if done is not None else None
    return now + left if left is not None else None


# ---- --requeue


def run_requeued(environ: Mapping[str, str], run: Callable[[], int]) -> int:
    """Call `run` to run the job, and requeue the job if it was preempted; returns the exit status of `jaxrun`.

    Raises UsageError or UnavailableError if the job could not be requeued.
    """
    _check_requeue(environ)
    status = run()
    if status == EXIT_PREEMPTED:
        print_notice(_requeue(environ))
    return status


def _check_requeue(environ: Mapping[str, str]) -> None:
    """Raise UnavailableError if scontrol is missing, and UsageError if Slurm cannot start the job again."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        raise UnavailableError(
            "--requeue needs scontrol, which is not on PATH (for example, in a container); without it, use an array of "
            "jobs that run one after the other: docs/clusters/slurm.md"
        )
    job = environ["SLURM_JOB_ID"]
    state = query_job_state(job, environ)
    if state is not None and not state.is_batch:
        raise UsageError(
            f"--requeue is for a batch job, which Slurm can start again, and Slurm job {job} is an interactive one; "
            "leave it out, or submit the job with --submit"
        )
    if state is not None and not state.requeue:
        raise UsageError(f"--requeue: Slurm job {job} was submitted with --no-requeue; leave out one of the two")


def _requeue(environ: Mapping[str, str]) -> str:
    """Make Slurm start this job again, unless it was cancelled; returns a line that says what happened.

    A job that Slurm itself ends, whether or not it starts it again, is no longer RUNNING. `scontrol requeue` would
    revive a job that its user has cancelled.
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
        return f"Slurm itself ends job {name}, and decides whether to start it again"
    words = ["scontrol", "requeue", name]
    done = subprocess.run(
        words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        return f"Slurm did not start job {name} again: {done.stderr.strip()}; {by_hand}"
    return f"Slurm will start job {name} again (restart {state.restarts + 1})"
