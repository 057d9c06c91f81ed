"""Serves the metrics of one job until it is over: `python -m jaxrun.frontends.metrics RUN_DIR LAUNCHER LISTENER`.

RUN_DIR is the job's run directory, LAUNCHER the process id of its launcher, LISTENER the descriptor of the listening
socket. The launcher starts this process, which ends by itself; it asks the job by its socket, once for each reading.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxrun.errors import JaxrunError
from jaxrun.frontends.http_server import HttpAnswer, HttpRequest, HttpServer, plain
from jaxrun.frontends.metrics.exposition import JobFacts, collect
from jaxrun.job_client.job_requests import request_overview
from jaxrun.job_client.running_job import RunningJob, wait_for_job
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.records.history.job_log import AttemptLog, read_attempts
from jaxrun.records.rundir.recorded_files import read_job_events, read_plan
from jaxrun.records.rundir.rundir import EVENTS_FILE

_UPDATE_S = 1.0  # for so long a reading is given again, to whoever asks
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class _JobCollector(Collector):
    """Asks the job each time that metrics are read."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        plan = read_plan(job.run_dir)
        name = Path(plan.program[0]).stem if plan.program else ""
        self._facts = JobFacts(plan.job_id, name, plan.tag, str(job.run_dir.absolute()))
        self._log_bytes = -1  # when it was read
        self._attempts: list[AttemptLog] = []

    def collect(self) -> Iterator[Metric]:
        try:
            overview = request_overview(self._job)
        except JaxrunError:
            overview = None
        self._read_log()
        return collect(self._facts, overview, self._attempts)

    def _read_log(self) -> None:
        """Read the event log, unless nothing was added since: it may be long."""
        with contextlib.suppress(JaxrunError, OSError):
            size = (self._job.run_dir / EVENTS_FILE).stat().st_size
            if size != self._log_bytes:
                self._attempts = read_attempts(read_job_events(self._job.run_dir))
                self._log_bytes = size


class MetricsPage:
    """The answers to readings. Strangers may read, too: whoever asks again at once gets the same content."""

    def __init__(self, collector: Collector, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._clock = clock
        self._content = b""
        self._made_at = float("-inf")

    def answer(self, request: HttpRequest) -> HttpAnswer:
        if request.target.path not in ("/", "/metrics"):
            return plain(HTTPStatus.NOT_FOUND)
        if self._clock() - self._made_at >= _UPDATE_S:
            self._content = generate_latest(self._registry)
            self._made_at = self._clock()
        return HttpAnswer(HTTPStatus.OK, self._content, _TEXT_FORMAT)


def main(run_dir: str, launcher: str, listener: str) -> None:
    for signum in (signal.SIGINT, signal.SIGQUIT):  # meant for the launcher
        signal.signal(signum, signal.SIG_IGN)
    job = wait_for_job(Path(run_dir), int(launcher))
    if job is None:
        return
    loop = EventLoop()
    server = HttpServer(loop, socket.socket(fileno=int(listener)), MetricsPage(_JobCollector(job)).answer)
    loop.add_reader(job.fileno(), 0, lambda: None)  # its end is noticed at once
    loop.run_until(lambda: not job.is_running)
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
