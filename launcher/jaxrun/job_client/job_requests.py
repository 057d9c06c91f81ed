"""Requests to a running job, and their answers: where all ranks are, how far they are, profiles of them, its end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.nccl_ras import NCCL_TIMEOUT_S
from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.verdict import stack_text
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.job_client.running_job import ANSWER_TIMEOUT_S, RequestRefused, RunningJob
from jaxrun.protocol.codec import from_content
from jaxrun.protocol.job_messages import Answer, EndOrder, OverviewRequest, ProfileRequest, StacksRequest
from jaxrun.records.rundir.recorded_files import read_verdict
from jaxrun.text import format_bytes, plural

PROFILE_DIR = "profile"  # in the run directory
_LEADS_S = (1.0, 4.0, 16.0)  # for the order to reach all ranks, at each attempt
_RETRY_S = 0.5
_STOP_NOTE_S = 1.5  # until a line says that a job takes longer to end
_STOP_WAIT_S = 60.0  # for one system call

T = TypeVar("T")


def request_overview(job: RunningJob) -> Overview:
    """Return how far all ranks are now. Raises UnavailableError if no answer comes."""
    return _parse(Overview, job.ask(OverviewRequest()))


def request_stacks(job: RunningJob, *, native: bool = False) -> JobStacks:
    """Return where all ranks are now; with `native`, with C frames. Raises UnavailableError if no answer comes."""
    timeout = ANSWER_TIMEOUT_S + NCCL_TIMEOUT_S + (NATIVE_STACKS_TIMEOUT_S if native else 0.0)
    return _parse(JobStacks, job.ask(StacksRequest(native), timeout))


def format_stacks(stacks: JobStacks, *, full: bool = False, native: bool = False) -> str:
    """Write where all ranks are, in groups; with `full` all frames of each rank, with `native` C frames, too."""
    if not stacks.dumps:
        return "no rank has stacks to show yet"
    frames = stack_text.format_all_frames(stacks.dumps, stacks.hosts) if full else ""
    natives = stack_text.format_by_text(stacks.natives or {}, stacks.hosts) if native else ""
    return "\n\n".join(filter(None, (stack_text.describe_stacks(stacks), natives or frames)))


def stop(job: RunningJob, *, now: bool, show: Callable[[str], None]) -> Verdict | None:
    """End the job, with `now` within a second, and wait until it is over; returns how it ended, None if unknown.

    `show` is called with a text if that takes a while. Raises UnavailableError if the launcher cannot be told.
    """
    job.send(EndOrder(gracefully=not now))
    if not job.wait_until_over(_STOP_NOTE_S):
        shorter = "" if now else "; jaxrun stop --now ends it within a second"
        show(f"the job of {job.run_dir} was told to end, which takes a while{shorter}")
        while not job.wait_until_over(_STOP_WAIT_S):
            pass
    job.check_connection()
    return read_verdict(job.run_dir)


def format_stopped(run_dir: Path, verdict: Verdict | None) -> str:
    """Return what `jaxrun stop` prints about a job that it has ended."""
    from jaxrun.analysis.verdict.verdict_text import headline_of

    text = f"the job of {run_dir} is over"
    return text if verdict is None else f"{text}: {headline_of(verdict).rstrip('.')}; exit {verdict.exit_code}"


def _parse(kind: type[T], answer: Answer) -> T:
    try:
        return from_content(kind, answer.content)
    except ProtocolError as error:
        raise UnavailableError(f"the launcher's answer cannot be read: {error}") from None


# ---- profiles


def take_profile(job: RunningJob, steps: int, output: Path | None, show: Callable[[str], None]) -> str:
    """Make all ranks profile the same `steps` steps; returns what was written, and how to look at it.

    output:  the directory for profiles, instead of the run directory's; `show` is called with a text about the progress

    Raises UsageError and UnavailableError.
    """
    directory = (output or job.run_dir / PROFILE_DIR).absolute()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--output {directory} is a file, not a directory. Name a new or an existing directory.")
    session = time.strftime("%Y_%m_%d_%H_%M_%S")  # as JAX names them
    answer = _ask_until_planned(job, steps, directory, session, show)
    return _describe(answer, directory, session)


def _ask_until_planned(
    job: RunningJob, steps: int, directory: Path, session: str, show: Callable[[str], None]
) -> Answer:
    """Ask again if some ranks have not made a call yet, and with more time if the order came too late for some."""
    shown, late = "", 0
    while True:
        request = ProfileRequest(steps, str(directory), session, _LEADS_S[late])
        try:
            return job.ask(request, None, lambda calls: show(f"profiling {plural(steps, 'step')}: {calls.text} ..."))
        except RequestRefused as refused:
            content = refused.answer.content or {}
            if not content.get("again") or late + 1 == len(_LEADS_S):
                raise UnavailableError(f"no profile of all ranks: {refused}") from None
            late += "files" in content
            if str(refused) != shown:
                shown = str(refused)
                show(f"{shown}; trying again")
        time.sleep(_RETRY_S)


def _describe(answer: Answer, directory: Path, session: str) -> str:
    files, size = int(answer.content["files"]), float(answer.content["bytes"])
    shown = Path(os.path.relpath(directory)) if directory.is_relative_to(Path.cwd()) else directory
    where = shown / "plugins" / "profile" / session
    command = shlex.join(["xprof", "--logdir", str(shown)])
    written = f"{plural(files, 'profile')}, {format_bytes(size)}, in {where}"
    written += f"; {answer.text}" if answer.text else ""
    return f"{written}\nto see them: {command}   (pip install xprof)"
