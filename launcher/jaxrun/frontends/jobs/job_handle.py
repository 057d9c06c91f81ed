"""jaxrun.Job and jaxrun.jobs: what running and finished jobs have left in their run directories, as values."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from jaxrun.analysis.verdict.goodput_text import Goodput
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.analysis.verdict.verdict_text import headline_of
from jaxrun.errors import UsageError
from jaxrun.files.regular_files import open_regular
from jaxrun.job_client.job_requests import format_stacks, request_stacks
from jaxrun.job_client.job_requests import stop as end_job
from jaxrun.job_client.running_job import find_running_job
from jaxrun.records.event_log.event_log import EventLog, LoggedEvent
from jaxrun.records.history.goodput import account
from jaxrun.records.history.job_log import AttemptLog, RankLog, read_attempts
from jaxrun.records.history.rank_output import OutputLine, read_lines
from jaxrun.records.rundir.job_numbers import read_numbers
from jaxrun.records.rundir.jobs import RecordedJob, find_job, list_jobs, read_job
from jaxrun.records.rundir.recorded_files import find_run_dir, has_ended, read_job_events, read_verdict
from jaxrun.records.rundir.rundir import EVENTS_FILE
from jaxrun.text import format_status

_POLL_S = 0.1


class JobRank(Struct, frozen=True):
    """One rank of a job, in its latest attempt.

    status:  the exit status, negative for a signal; None while it runs, or if nothing says so
    state:   "starting", "running", or how it ended, in a few words

    >>> [rank.state for rank in jaxrun.Job().ranks]
    ['finished', 'finished']
    """

    rank: int
    host: str
    pid: int
    status: int | None
    state: str


class Job:
    """A job that has a run directory: running or over. Each property reads the files anew.

    run_dir:  the run directory, or the job's number or name in `jaxrun list`; None: the latest job here

    Raises UsageError if there is no such job. Other hosts' jobs can be read, too, where the directory can be seen.

    >>> job = jaxrun.Job()
    >>> job
    <Job 1: jaxrun-runs/…, done>
    >>> job.running, job.exit_code, job.processes
    (False, 0, 2)
    >>> [line.text for line in job.lines(ranks=[1])]
    ['hello']
    """

    def __init__(self, run_dir: str | os.PathLike[str] | int | None = None) -> None:
        word = None if run_dir is None else str(run_dir) if isinstance(run_dir, int) else os.fspath(run_dir)
        found = find_job(word) if word is not None else None
        self.run_dir: Path = find_run_dir(found or (Path(word) if word is not None else None)).absolute()

    @property
    def number(self) -> int | None:
        """Its number, as commands take it; None if its file system has no links."""
        return read_numbers(self.run_dir.parent).get(self.run_dir.name)

    @property
    def state(self) -> str:
        """How it went, or goes, in a few words: "running", "done", "failed, exit 1", …"""
        return self._record.state

    @property
    def running(self) -> bool | None:
        """Whether it runs; None if only the host of its launcher knows."""
        return self._record.running

    @property
    def verdict(self) -> Verdict | None:
        """How it ended and why: the content of verdict.json. None while it runs, or if jaxrun itself was killed."""
        return read_verdict(self.run_dir)

    @property
    def exit_code(self) -> int | None:
        """The command line's exit code; None while it runs, or if jaxrun itself was killed."""
        verdict = self.verdict
        return None if verdict is None else verdict.exit_code

    @property
    def headline(self) -> str:
        """What happened, in one sentence; empty while it runs."""
        verdict = self.verdict
        return "" if verdict is None else headline_of(verdict)

    @property
    def program(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return self._record.command

    @property
    def processes(self) -> int:
        """How many ranks it has."""
        return self._record.processes

    @property
    def tag(self) -> str:
        """The note that was given with `tag`."""
        return self._record.tag

    @property
    def started(self) -> float:
        """When it began, in seconds since the epoch."""
        return self._record.started

    @property
    def seconds(self) -> float | None:
        """How long it took, or has taken so far; None if nothing says so."""
        return self._record.seconds

    @property
    def goodput(self) -> Goodput | None:
        """What its time was worth, until now if it runs; None as long as no steps were seen."""
        verdict = self.verdict
        found = verdict.goodput if verdict is not None else None
        found = found or account(read_attempts(read_job_events(self.run_dir)))
        return found if found.is_known else None

    @property
    def ranks(self) -> tuple[JobRank, ...]:
        """The ranks of its latest attempt that have been started, by number."""
        attempts = read_attempts(read_job_events(self.run_dir))
        if not attempts:
            return ()
        is_over = self.running is False
        last = attempts[-1]
        return tuple(
            JobRank(rank, log.host, log.pid, log.status, _state_of(rank, log, last, is_over=is_over))
            for rank, log in sorted(last.ranks.items())
        )

    def lines(
        self, *, ranks: Sequence[int] | None = None, attempt: int | None = None, follow: bool = False
    ) -> Iterator[OutputLine]:
        """Yield the lines that its ranks have printed in an attempt, by default the latest, rank by rank.

        ranks:   only of these; None: of all
        follow:  continue, with lines as they come, until the job is over

        Raises UsageError if there is no such attempt.
        """
        wanted = None if ranks is None else tuple(range(rank, rank + 1) for rank in ranks)
        return read_lines(self.run_dir, ranks=wanted, attempt=attempt, follow=follow)

    def events(self, *, follow: bool = False) -> Iterator[LoggedEvent]:
        """Yield the events of its log: the time, the attempt and the message of each.

        follow:  continue, with events as they come, until the job is over

        Raises UsageError if the log cannot be read.
        """
        if not follow:
            return iter(read_job_events(self.run_dir))
        path = self.run_dir / EVENTS_FILE
        return iter(EventLog(_follow_lines(path, self.run_dir), str(path)))

    def stacks(self, *, full: bool = False) -> str:
        """Return where all ranks of the running job are, in groups; with `full`, all frames of each.

        Raises UsageError or UnavailableError if the job cannot be asked.
        """
        link = find_running_job(self.run_dir, "jaxrun stacks")
        try:
            return format_stacks(request_stacks(link), full=full)
        finally:
            link.close()

    def stop(self, *, now: bool = False) -> Verdict | None:
        """End the running job as SIGTERM to its jaxrun does, and wait until it is over; returns how it ended.

        now:  give it half a second to end, not --signal-grace

        Raises UsageError if it is over, or cannot be asked from here.
        """
        link = find_running_job(self.run_dir, "jaxrun stop")
        try:
            return end_job(link, now=now, show=lambda text: None)
        finally:
            link.close()

    def wait(self, timeout: float | None = None) -> Verdict | None:
        """Wait until the job is over; returns how it ended, None if jaxrun itself was killed.

        Raises TimeoutError after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not has_ended(self.run_dir):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the job of {self.run_dir} is not over after {timeout:g} s")
            time.sleep(_POLL_S)
        return self.verdict

    @property
    def _record(self) -> RecordedJob:
        return read_job(self.run_dir)

    def __repr__(self) -> str:
        number = f" {self.number}" if self.number is not None else ""
        return f"<Job{number}: {os.path.relpath(self.run_dir)}, {self.state}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.run_dir == other.run_dir

    def __hash__(self) -> int:
        return hash(self.run_dir)


def jobs(directory: str | os.PathLike[str] | None = None) -> tuple[Job, ...]:
    """Return the jobs that have left a run directory, the newest last.

    directory:  where to look: what jaxrun-runs is in, or another directory of run directories; None: here

    Raises UsageError if a `directory` that is given cannot be read.

    >>> jaxrun.jobs()[-1].program
    ('hello.py',)
    """
    try:
        _, found = list_jobs(Path(directory) if directory is not None else None)
    except UsageError:
        if directory is not None:
            raise
        return ()
    return tuple(Job(each.path.absolute()) for each in found)


def _state_of(rank: int, log: RankLog, attempt: AttemptLog, *, is_over: bool) -> str:
    failure = next((mark for mark in log.marks if mark.is_failure), None)
    if failure is not None:
        return f"{failure.name}: {failure.detail}" if failure.detail else failure.name
    if rank in attempt.stopped and log.status is not None:
        return "stopped with the others"
    if log.status is not None:
        return format_status(log.status) if log.status else "finished"
    if is_over:
        return "no end is recorded"
    return "running" if attempt.run_at is not None else "starting"


def _follow_lines(path: Path, run_dir: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file until the job is over."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None
    with open(descriptor, "rb") as file:
        partial = b""
        while True:
            is_over = has_ended(run_dir)  # before the file is read: it is whole then
            for line in file:
                partial += line
                if partial.endswith(b"\n"):
                    yield partial
                    partial = b""
            if is_over:
                return
            time.sleep(_POLL_S)
