"""Serves the metrics of one job until it is over: `python -m jaxrun.frontends.metrics RUN_DIR LAUNCHER LISTENER`.

RUN_DIR is the job's run directory, LAUNCHER the process id of its launcher, LISTENER the descriptor of the listening
socket. The launcher starts this process, which ends by itself; it asks the job by its socket, once for each reading.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxrun.errors import JaxrunError
from jaxrun.frontends.metrics.exposition import JobFacts, collect
from jaxrun.records.history.job_log import AttemptLog, read_attempts
from jaxrun.records.rundir.job_requests import request_overview
from jaxrun.records.rundir.recorded_files import read_job_events, read_plan
from jaxrun.records.rundir.rundir import EVENTS_FILE
from jaxrun.records.rundir.running_job import RunningJob, wait_for_job

_CHECK_S = 1.0  # whether the job is over


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


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Readings come every few seconds, and nobody wants a line for each."""


def main(run_dir: str, launcher: str, listener: str) -> None:
    for signum in (signal.SIGINT, signal.SIGQUIT):  # meant for the launcher
        signal.signal(signum, signal.SIG_IGN)
    job = wait_for_job(Path(run_dir), int(launcher))
    if job is None:
        return
    registry = CollectorRegistry()
    registry.register(_JobCollector(job))
    with socket.socket(fileno=int(listener)) as listening:
        server = _Server(listening.getsockname()[:2], _QuietHandler, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        server.server_name, server.server_port = "jaxrun", listening.getsockname()[1]
        server.setup_environ()
        server.set_app(make_wsgi_app(registry))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while not job.wait_until_over(_CHECK_S):
            pass
        server.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
