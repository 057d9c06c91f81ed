"""Follows a running job: its answers while someone watches, its pace, and the content of its run directory."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.analysis.lockstep.told_progress import find_told_step, format_told_step
from jaxrun.errors import JaxrunError
from jaxrun.files.regular_files import open_regular
from jaxrun.frontends.top.finding import describe_finding
from jaxrun.frontends.top.samples import take_samples
from jaxrun.frontends.top.view import Pace, View
from jaxrun.job_client.job_requests import request_overview
from jaxrun.job_client.running_job import RunningJob
from jaxrun.records.event_log.event_log import parse_line
from jaxrun.records.history.job_log import describe_sizes, read_attempts
from jaxrun.records.output.noise import NoiseFilter
from jaxrun.records.output.rank_logs import STREAMS, log_path
from jaxrun.records.rundir.recorded_files import read_job_events
from jaxrun.records.rundir.rundir import EVENTS_FILE, VERDICT_FILE, attempt_directory
from jaxrun.terminal import without_controls

INTERVAL_S = 0.5
_ASKING = "asking the job ..."
_MAX_SHARE = 0.5  # of the time, that a large job may be busy with answers
_CPU_OVERVIEWS = 4  # of which the first and the last say how much CPU time was used meanwhile
_TAIL_BYTES = 4096
_PACE_S = 10.0  # over which the rate of calls is taken
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Feed:
    """The known facts about the job; the methods may be called from any thread."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._started = read_start(job.run_dir)
        self._overviews: deque[Overview] = deque(maxlen=_CPU_OVERVIEWS)
        self._rate = CallRate()
        self._trouble = ""
        self._attempt = 1
        self._sizes = ""
        self._lock = threading.Lock()

    def update(self) -> None:
        """Ask once. A launcher that does not answer is a trouble to show, and no error."""
        try:
            overview, trouble = request_overview(self._job), ""
        except JaxrunError as error:
            overview, trouble = None, str(error) if self.is_running else ""
        attempt = latest_attempt(self._job.run_dir)
        with self._lock:
            if attempt != self._attempt:
                self._overviews.clear()
                self._sizes = read_sizes(self._job.run_dir)
            self._attempt, self._trouble = attempt, trouble
            if overview is not None:
                self._overviews.append(overview)
                self._rate.add(overview)

    def update_forever(self, on_update: Callable[[], None]) -> None:
        """Ask twice a second, less often where an answer takes long, until the job is over."""
        while self.is_running:
            began = time.monotonic()
            self.update()
            on_update()
            took = time.monotonic() - began
            time.sleep(max(INTERVAL_S - took, took * (1 / _MAX_SHARE - 1)))

    @property
    def is_running(self) -> bool:
        return self._job.is_running and not (self._job.run_dir / VERDICT_FILE).exists()

    def view(self) -> View:
        with self._lock:
            overviews, trouble = tuple(self._overviews), self._trouble
            rate = self._rate.per_second()
        name = self._job.run_dir.name
        seconds = time.time() - self._started if self._started is not None else None
        if not overviews:
            return View(name, "", self._attempt, seconds, (), Pace(), trouble or _ASKING)
        last = overviews[-1]
        told = find_told_step(last.flights)
        progress = format_told_step(told) if told is not None else ""
        samples = take_samples(last, overviews[0] if len(overviews) > 1 else None, rate)
        note = " · ".join(filter(None, (progress, trouble or describe_finding(last, samples), self._sizes)))
        pace = Pace(rate, last.calls_per_step, last.calls_made, last.idle_s)
        return View(name, last.phase, self._attempt, seconds, samples, pace, note, last.host_memory, told)

    def last_line(self, rank: int) -> str:
        return last_line(attempt_directory(self._job.run_dir, self._attempt), rank)


class CallRate:
    """How many calls the median rank makes per second."""

    def __init__(self) -> None:
        self._made: deque[tuple[float, float]] = deque()  # when the job was looked at, and calls made by then

    def add(self, overview: Overview) -> None:
        made = overview.calls_made
        if made is None:
            return
        if self._made and made < self._made[-1][1]:
            self._made.clear()  # another attempt
        self._made.append((overview.time, made))
        while len(self._made) > 2 and overview.time - self._made[0][0] > _PACE_S:
            self._made.popleft()

    def per_second(self) -> float | None:
        """The rate; None if unknown."""
        if len(self._made) < 2:
            return None
        (then, before), (at, made) = self._made[0], self._made[-1]
        return (made - before) / (at - then) if at > then else None


# ---- what the run directory says


def latest_attempt(run_dir: Path) -> int:
    """The number of the latest attempt, from 1."""
    number = 1
    while attempt_directory(run_dir, number + 1).is_dir():
        number += 1
    return number


def read_start(run_dir: Path) -> float | None:
    """When the job began, in seconds since the epoch; None if nothing says so."""
    with contextlib.suppress(OSError, ValueError):
        with open(open_regular(run_dir / EVENTS_FILE), encoding="utf-8", errors="replace") as file:
            file.readline()  # the header
            return parse_line(file.readline()).time
    return None


def read_sizes(run_dir: Path) -> str:
    """Return on how many hosts the job has run over time; empty if the number was always the same."""
    with contextlib.suppress(JaxrunError):
        return describe_sizes(read_attempts(read_job_events(run_dir)))
    return ""


def last_line(log_dir: Path, rank: int) -> str:
    """Return the last line that the rank wrote, to stdout or stderr; empty if nothing is known."""
    tails = [tail for stream in STREAMS if (tail := _tail(log_path(log_dir, rank, stream))) is not None and tail[1]]
    return max(tails, key=lambda tail: tail[0])[1] if tails else ""


def _tail(path: Path) -> tuple[float, str] | None:
    """When a log was written last, and its last line that says something."""
    try:
        file = open_regular(path)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        start = max(0, status.st_size - _TAIL_BYTES)
        return status.st_mtime, last_line_of(os.pread(file, _TAIL_BYTES, start), is_cut=start > 0)
    except OSError:
        return None
    finally:
        os.close(file)


def last_line_of(data: bytes, *, is_cut: bool = False) -> str:
    """The last line with a letter in it, as a terminal would show it, on one line and without colours.

    `is_cut`: the data begins somewhere within a line.
    """
    if is_cut and b"\n" in data[:-1]:
        data = data[data.find(b"\n") + 1 :]
    whole = data if data.endswith(b"\n") else data + b"\n"
    for line in reversed(NoiseFilter().remove(whole).decode(errors="replace").split("\n")):
        shown = next((part for part in reversed(_ESCAPES.sub("", line).split("\r")) if part.strip()), "")
        if shown:
            return without_controls(shown.strip()).replace("\t", " ")
    return ""
