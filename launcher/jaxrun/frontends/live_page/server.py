"""Serves the page of one running job, at 127.0.0.1, to whoever knows the token in its address.

The page asks for data.json once a second; only then is the job asked, so a page that nobody looks at costs nothing.
Once the job is over, `run` is the page of `jaxrun explain --html`. Nothing here changes the job.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxrun.analysis.verdict.verdict_text import headline_of
from jaxrun.errors import JaxrunError, UnavailableError
from jaxrun.frontends.top.feed import Feed, latest_attempt
from jaxrun.frontends.top.view_document import view_content
from jaxrun.records.history.explain import format_run_page
from jaxrun.records.output.rank_logs import STREAMS, log_path
from jaxrun.records.rundir.recorded_files import open_regular, read_verdict
from jaxrun.records.rundir.rundir import attempt_directory
from jaxrun.records.rundir.running_job import RunningJob
from jaxrun.terminal import without_controls

ADDRESS = "127.0.0.1"
_UPDATE_S = 0.8  # for so long an answer of the job is shown again, to whoever asks
_RATES = 1800  # kept for the curve: half an hour
_TAIL_BYTES = 16_384  # of each of a rank's logs
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
# The page of `jaxrun explain --html` is one file: its script and style stand in it.
_RUN_POLICY = _POLICY.replace("'self'", "'unsafe-inline'", 2)
_FILES = {"": "text/html", "live.css": "text/css", "live.js": "text/javascript"}


class LivePage:
    """The content of the page of one job; the methods may be called from any thread."""

    def __init__(self, job: RunningJob, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._feed = Feed(job)
        self._rates: deque[tuple[float, float]] = deque(maxlen=_RATES)
        self._updated_at: float | None = None
        self._lock = threading.Lock()

    def data(self) -> dict[str, Any]:
        """The content of data.json: the document of `jaxrun top --json`, the rates so far, and how the job ended."""
        with self._lock:
            now = self._clock()
            is_running = self._feed.is_running
            if is_running and (self._updated_at is None or now - self._updated_at >= _UPDATE_S):
                self._feed.update()
                self._updated_at = now
            view = self._feed.view()
            if self._updated_at == now and view.pace is not None:
                self._rates.append((round(now, 1), view.pace))
            verdict = None if is_running else read_verdict(self._job.run_dir)
            return {
                "top": view_content(self._job.run_dir, view),
                "rates": list(self._rates),
                "is_over": not is_running,
                "verdict": without_controls(headline_of(verdict)) if verdict is not None else "",
            }

    def output(self, rank: int) -> str:
        """The end of what a rank has written, stdout before stderr."""
        directory = attempt_directory(self._job.run_dir, latest_attempt(self._job.run_dir))
        parts = [_tail(log_path(directory, rank, stream)) for stream in STREAMS]
        return "\n".join(filter(None, parts))

    def run(self) -> str:
        """Return the page of what all ranks did. Raises JaxrunError if there is none."""
        return format_run_page(self._job.run_dir)


def _tail(path: Path) -> str:
    try:
        with open(open_regular(path), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return without_controls(file.read().decode(errors="replace"))
    except OSError:
        return ""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET below the token only, and only to a browser that was given this machine's own address."""

    def __init__(self, page: LivePage, token: str, *arguments: Any) -> None:
        self._page = page
        self._token = token
        super().__init__(*arguments)

    def do_GET(self) -> None:
        _, port = self.connection.getsockname()
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):  # a name that leads here
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        address = urlsplit(self.path)
        _, token, *rest = address.path.split("/")
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        name = "/".join(rest)
        if not rest:
            self._answer("", "text/plain", status=HTTPStatus.FOUND, location=f"/{token}/")
        elif name in _FILES:
            self._answer(_read(name or "live.html"), _FILES[name])
        elif name == "data.json":
            self._answer(json.dumps(self._page.data()), "application/json")
        elif name == "output" and (rank := parse_qs(address.query).get("rank", [""])[0]).isdecimal():
            self._answer(self._page.output(int(rank)), "text/plain")
        elif name == "run":
            self._answer_run()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer_run(self) -> None:
        try:
            self._answer(self._page.run(), "text/html", policy=_RUN_POLICY)
        except JaxrunError as error:
            self._answer(str(error), "text/plain")

    def _answer(
        self, text: str, kind: str, *, policy: str = _POLICY, status: HTTPStatus = HTTPStatus.OK, location: str = ""
    ) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **({"Location": location} if location else {}),
        }
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """The page asks once a second, and nobody wants a line for each."""


def _read(name: str) -> str:
    return files("jaxrun.frontends.live_page").joinpath(name).read_text(encoding="utf-8")


def open_page(job: RunningJob, port: int) -> tuple[ThreadingHTTPServer, str]:
    """Listen at this port, 0 for any; returns the server, which is not running yet, and the address of the page.

    Raises UnavailableError if the port cannot be used.
    """
    token = secrets.token_urlsafe(18)
    try:
        server = ThreadingHTTPServer((ADDRESS, port), partial(_Handler, LivePage(job), token))
    except OSError as error:
        raise UnavailableError(f"--web {port} cannot listen there: {error.strerror}; name another port") from None
    server.daemon_threads = True
    return server, f"http://{ADDRESS}:{server.server_port}/{token}/"
