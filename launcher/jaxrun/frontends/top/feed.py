"""Asks a running job how far its ranks are, as long as somebody looks, and keeps what it has answered."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.analysis.verdict.straggler_text import format_straggler
from jaxrun.errors import JaxrunError
from jaxrun.frontends.top.job_files import JobFiles
from jaxrun.frontends.top.rates import CallRates
from jaxrun.frontends.top.rows import Order
from jaxrun.frontends.top.samples import take_samples
from jaxrun.frontends.top.screen import View
from jaxrun.records.rundir.overview_request import request_overview
from jaxrun.records.rundir.rundir import VERDICT_FILE
from jaxrun.records.rundir.running_job import RunningJob

INTERVAL_S = 0.5
_ASKING = "asking the job ..."
_MAX_SHARE = 0.5  # of the time, that a large job may be busy with answers
_CPU_OVERVIEWS = 4  # of which the first and the last say how much CPU time was used meanwhile


class Feed:
    """What is known of the job; the methods may be called from any thread."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._files = JobFiles(job.run_dir)
        self._started = self._files.started()
        self._overviews: deque[Overview] = deque(maxlen=_CPU_OVERVIEWS)
        self._rates = CallRates()
        self._trouble = ""
        self._attempt = 1
        self._lock = threading.Lock()

    def update(self) -> None:
        """Ask once. A launcher that does not answer is a trouble to show, and no error."""
        try:
            overview, trouble = request_overview(self._job), ""
        except JaxrunError as error:
            overview, trouble = None, str(error) if self.is_running else ""
        attempt = self._files.attempt()
        with self._lock:
            if attempt != self._attempt:
                self._overviews.clear()
            self._attempt, self._trouble = attempt, trouble
            if overview is not None:
                self._overviews.append(overview)
                self._rates.add(overview)

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

    def view(self, order: Order = Order.STANDING_OUT) -> View:
        """What is to be shown now."""
        with self._lock:
            overviews, trouble = tuple(self._overviews), self._trouble
            rate, history = self._rates.per_second(), self._rates.history()
        name = self._job.run_dir.name
        seconds = time.time() - self._started if self._started is not None else None
        if not overviews:
            return View(name, "", self._attempt, seconds, (), [], None, 0, trouble or _ASKING, order)
        last = overviews[-1]
        note = trouble or (format_straggler(last.straggler, last.hosts) + "." if last.straggler is not None else "")
        samples = take_samples(last, overviews[0] if len(overviews) > 1 else None, rate)
        return View(name, last.phase, self._attempt, seconds, samples, history, rate, last.calls_per_step, note, order)

    def last_line(self, rank: int) -> str:
        return self._files.last_line(rank, self._attempt)
