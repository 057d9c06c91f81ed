"""Finds the job of a run directory while it runs, and asks its launcher: by a file, a signal, and another file."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jaxrun.analysis.diagnosis.nccl_ras import NCCL_TIMEOUT_S
from jaxrun.analysis.diagnosis.snapshot import Overview, Snapshot
from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S
from jaxrun.analysis.verdict import stack_text
from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.protocol.codec import from_content
from jaxrun.protocol.env import REQUEST_SIGNAL
from jaxrun.protocol.own_files import open_own_directory
from jaxrun.protocol.requests import Answer, AnswerState, OverviewRequest, ProfileRequest, Request, StacksRequest
from jaxrun.records.rundir import request_files
from jaxrun.records.rundir.jobs import has_open
from jaxrun.records.rundir.recorded_files import find_run_dir, read_plan
from jaxrun.records.rundir.rundir import EVENTS_FILE, LATEST_LINK, VERDICT_FILE
from jaxrun.text import format_bytes, plural

ANSWER_TIMEOUT_S = 5.0  # ranks on other hosts have 1.5 s of it
_CANNOT_ANSWER = (
    "the launcher of this job cannot be asked that: it is starting or ending, or of another version of jaxrun"
)
_POLL_S = 0.02
PROFILE_DIR = "profile"  # in the run directory
_LEADS_S = (1.0, 4.0, 16.0)  # for the order to reach all ranks, at each attempt
_RETRY_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose launcher runs on this host."""

    run_dir: Path
    pid: int

    @property
    def is_running(self) -> bool:
        return has_open(self.pid, self.run_dir / EVENTS_FILE)


class RequestRefused(UnavailableError):
    """The job's launcher has refused a request."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.text)
        self.answer = answer


def find_running_job(path: Path | None, command: str) -> RunningJob:
    """The job of the run directory `path`; with None the latest below the working directory.

    Raises UsageError if the job is over or cannot be asked from here; `command` is what to type elsewhere.
    """
    run_dir = find_run_dir(path)
    if run_dir.is_symlink() or run_dir.name == LATEST_LINK:
        run_dir = run_dir.resolve()
    if (run_dir / VERDICT_FILE).exists():
        raise _is_over(run_dir)
    launcher, here = read_plan(run_dir).launcher, os.uname().nodename
    if not launcher.host:
        raise UsageError(f"{run_dir} does not say which process runs its job; did another version of jaxrun write it?")
    if launcher.host != here:
        where = f"on {launcher.host}, not on {here}"
        raise UsageError(f"the launcher of this job runs {where}; type there: {command} {run_dir}")
    job = RunningJob(run_dir, launcher.pid)
    if not job.is_running:
        raise UsageError(
            f"the launcher of {run_dir} is gone, and left no verdict; to see what is known: jaxrun explain {run_dir}"
        )
    return job


def ask(
    job: RunningJob,
    request: Request,
    timeout: float | None = ANSWER_TIMEOUT_S,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Ask the job's launcher; returns its final answer. `on_progress` is called with the text of each earlier one.

    Raises RequestRefused, UnavailableError if no answer comes within `timeout` seconds, or, with None, before the
    job ends; UsageError if it cannot be asked.
    """
    number = f"{time.time_ns()}-{os.getpid()}"
    try:
        directory = open_own_directory(job.run_dir)
    except OSError as error:
        raise UsageError(f"cannot ask the job of {job.run_dir}: {error.strerror}") from None
    try:
        if not _handles(job.pid, REQUEST_SIGNAL):
            raise UsageError(_CANNOT_ANSWER)
        request_files.write_request(directory, number, request)
        _signal(job)
        return _wait_for_answer(job, directory, number, timeout, on_progress)
    except OSError as error:
        raise UsageError(f"cannot ask the job of {job.run_dir}: {error.strerror}") from None
    finally:
        request_files.remove_request(directory, number)
        os.close(directory)


def _wait_for_answer(
    job: RunningJob, directory: int, number: str, timeout: float | None, on_progress: Callable[[str], None]
) -> Answer:
    deadline = time.monotonic() + timeout if timeout is not None else None
    shown: Answer | None = None
    while True:
        running = job.is_running  # what has been answered before its end is there
        answer = request_files.read_answer(directory, number)
        if answer is not None and answer.state is AnswerState.DONE:
            return answer
        if answer is not None and answer.state is AnswerState.REFUSED:
            raise RequestRefused(answer)
        if answer is not None and answer != shown:
            shown = answer
            on_progress(answer.text)
        if not running:
            raise UnavailableError(
                f"the job ended before it answered; to see how it went: jaxrun explain {job.run_dir}"
            )
        if deadline is not None and time.monotonic() > deadline:
            raise UnavailableError(
                f"the launcher (process {job.pid}) has not answered in {timeout:g} s; is it stopped?"
            )
        time.sleep(_POLL_S)


def _signal(job: RunningJob) -> None:
    try:
        os.kill(job.pid, REQUEST_SIGNAL)
    except ProcessLookupError:
        raise _is_over(job.run_dir) from None
    except PermissionError:
        raise UsageError(f"process {job.pid}, the launcher, is another user's; only its owner may ask it") from None


def _is_over(run_dir: Path) -> UsageError:
    return UsageError(f"the job of {run_dir} is over; how it went: jaxrun explain {run_dir}")


def _handles(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal; without one, a real-time signal would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # the process has ended, or is another user's: os.kill says which
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (signum - 1) & 1)


# ---- where ranks are, and how far


def request_overview(job: RunningJob) -> Overview:
    """How far all ranks are now. Raises UnavailableError if no answer comes, UsageError if none can."""
    return _parse(Overview, ask(job, OverviewRequest()))


def request_snapshot(job: RunningJob, *, native: bool = False) -> Snapshot:
    """Where all ranks are now; with `native`, with C frames. Raises UnavailableError if no answer comes."""
    timeout = ANSWER_TIMEOUT_S + NCCL_TIMEOUT_S + (NATIVE_STACKS_TIMEOUT_S if native else 0.0)
    return _parse(Snapshot, ask(job, StacksRequest(native), timeout))


def format_stacks(snapshot: Snapshot, *, full: bool = False, native: bool = False) -> str:
    """Where all ranks are, in groups; with `full` all frames of each rank, with `native` C frames too."""
    if not snapshot.dumps:
        return "no rank has stacks to show yet"
    frames = stack_text.format_all_frames(snapshot.dumps, snapshot.hosts) if full else ""
    natives = stack_text.format_by_text(snapshot.natives or {}, snapshot.hosts) if native else ""
    return "\n\n".join(filter(None, (stack_text.format_snapshot(snapshot), natives or frames)))


def _parse(kind: type[T], answer: Answer) -> T:
    try:
        return from_content(kind, answer.content)
    except ProtocolError as error:
        raise UnavailableError(f"the launcher's answer cannot be read: {error}") from None


# ---- profiles


def take_profile(job: RunningJob, steps: int, output: Path | None, show: Callable[[str], None]) -> str:
    """Have all ranks profile the same `steps` steps; returns what was written, and how it is looked at.

    output:  the directory for profiles, instead of that in the run directory; `show` is called with what is under way.

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
    """Ask again where not all ranks have made a call yet, and with more time where the order came too late for some."""
    shown, late = "", 0
    while True:
        request = ProfileRequest(steps, str(directory), session, _LEADS_S[late])
        try:
            return ask(job, request, None, lambda calls: show(f"profiling {plural(steps, 'step')}: {calls} ..."))
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
