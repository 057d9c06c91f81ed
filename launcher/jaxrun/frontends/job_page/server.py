"""Serves the page of one job, running or over, at 127.0.0.1, to whoever knows the token in its address.

The page asks for document.json every two seconds; only then is the job asked, so a page that nobody looks at costs
nothing. Nothing here changes the job.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qs

from jaxrun.errors import JaxrunError, UnavailableError, UsageError
from jaxrun.frontends.http_server import BACKLOG, HttpAnswer, HttpRequest, HttpServer, plain
from jaxrun.frontends.job_page.document import Attempt, LiveJob, live_document, read_outputs, whole_document
from jaxrun.frontends.job_page.page import format_page, policy
from jaxrun.frontends.top.feed import Feed
from jaxrun.job_client.running_job import RunningJob, find_running_job
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.records.history.collect import job_title
from jaxrun.records.history.job_log import read_attempts
from jaxrun.records.rundir.recorded_files import find_run_dir, has_ended, read_job_events, read_plan
from jaxrun.records.rundir.rundir import VERDICT_FILE
from jaxrun.terminal import in_one_line

ADDRESS = "127.0.0.1"
_UPDATE_S = 0.8  # for so long an answer of the job is shown again, to whoever asks
_RATES = 1800  # kept for the curve: an hour
_VERDICT_S = 2.0  # after the end of a job, for its verdict: a launcher that was killed leaves none


class JobPage:
    """The content of the page of one job.

    job:  None if it is over
    """

    def __init__(self, run_dir: Path, job: RunningJob | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._feed = Feed(job) if job is not None else None
        self._clock = clock
        self._rates: deque[tuple[float, float]] = deque(maxlen=_RATES)
        self._updated_at = float("-inf")
        self._attempts: list[Attempt] = []
        self._gone_at: float | None = None
        self._ended = ""  # the document, once the job is over

    def document(self, rank: int = 0, *, with_timeline: bool = False) -> str:
        """Return the content of document.json, with the output of this rank, and once the job is over with the chart.

        Raises JaxrunError if the files of the job cannot be read.
        """
        if self._ended:
            return self._ended
        live = self._follow() if self._feed is not None else None
        if live is None or self._has_ended():
            self._ended = json.dumps(whole_document(self._run_dir, live))
            return self._ended
        if with_timeline:
            return json.dumps(whole_document(self._run_dir, live, is_over=False))
        return json.dumps(live_document(self._run_dir, live, read_outputs(self._run_dir, [rank])))

    def output(self, rank: int, attempt: int = 0) -> str:
        """The end of what a rank has written in this attempt; 0 stands for the last."""
        return read_outputs(self._run_dir, [rank], attempt)[rank]

    def _has_ended(self) -> bool:
        """Whether the job is over, and has its verdict."""
        if self._feed is None or self._feed.is_running:
            return False
        self._gone_at = self._gone_at if self._gone_at is not None else self._clock()
        return (self._run_dir / VERDICT_FILE).exists() or self._clock() - self._gone_at > _VERDICT_S

    def _follow(self) -> LiveJob:
        """Ask the job, unless that was done a moment ago."""
        assert self._feed is not None
        now = self._clock()
        is_new = self._feed.is_running and now - self._updated_at >= _UPDATE_S
        if is_new:
            self._feed.update()
            self._updated_at = now
        view = self._feed.view()
        if is_new and view.pace.rate is not None and view.seconds is not None:
            self._rates.append((round(view.seconds, 1), round(view.pace.rate, 3)))
        if not self._attempts or view.attempt != self._attempts[-1].number:
            self._attempts = _read_attempts(self._run_dir)
        plan = read_plan(self._run_dir)
        title = job_title(plan, self._run_dir, plan.processes)
        return LiveJob(title, view, in_one_line(plan.tag), self._attempts, tuple(self._rates))


def _read_attempts(run_dir: Path) -> list[Attempt]:
    with contextlib.suppress(JaxrunError):
        logs = read_attempts(read_job_events(run_dir))
        return [Attempt(one.number, one.start, one.end, one.size, one.outcome) for one in logs]
    return []


class _PageServer:
    """Answers requests below the token only, and only from a browser that was given this machine's own address."""

    def __init__(self, page: JobPage, token: str, port: int) -> None:
        self._page = page
        self._token = token
        self._hosts = (f"{ADDRESS}:{port}", f"localhost:{port}")

    def answer(self, request: HttpRequest) -> HttpAnswer:
        if request.headers.get("host") not in self._hosts:  # a name that leads here
            return plain(HTTPStatus.FORBIDDEN)
        token, *rest = request.target.path.removeprefix("/").split("/")
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return plain(HTTPStatus.NOT_FOUND)
        if not rest:
            return HttpAnswer(HTTPStatus.FOUND, b"", headers={"Location": f"/{token}/"})
        try:
            return self._answer_to_owner(rest, parse_qs(request.target.query, keep_blank_values=True))
        except JaxrunError as error:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _answer_to_owner(self, path: list[str], query: Mapping[str, list[str]]) -> HttpAnswer:
        """Answer a request that has the token; `path` is what follows it. Raises JaxrunError."""
        rank, attempt = (query.get(name, ["0"])[0] for name in ("rank", "attempt"))
        is_number = all(one.isdecimal() and len(one) < 10 for one in (rank, attempt))
        if path == [""]:
            return _content(format_page(json.loads(self._page.document()), is_served=True), "text/html")
        if path == ["document.json"] and is_number:
            return _content(self._page.document(int(rank), with_timeline="timeline" in query), "application/json")
        if path == ["output"] and is_number:
            return _content(self._page.output(int(rank), int(attempt)), "text/plain")
        return plain(HTTPStatus.NOT_FOUND)


def _content(text: str, kind: str) -> HttpAnswer:
    headers = {
        "Content-Security-Policy": f"{policy(is_served=True)}; frame-ancestors 'none'",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HttpAnswer(HTTPStatus.OK, text.encode("utf-8", "backslashreplace"), f"{kind}; charset=utf-8", headers)


def find_job(path: Path | None) -> tuple[Path, RunningJob | None]:
    """Return the run directory that `path` means, by default the latest, and its job if that runs.

    Raises UsageError if there is none, or it cannot be asked.
    """
    run_dir = find_run_dir(path).resolve()
    try:
        return run_dir, find_running_job(run_dir, "jaxrun top --web")
    except UsageError:
        if not has_ended(run_dir):
            raise
        return run_dir, None


def serve_page(run_dir: Path, job: RunningJob | None, port: int, on_open: Callable[[str], None]) -> NoReturn:
    """Serve at this port, 0 for any, until Ctrl-C; `on_open` is called with the address of the page.

    Raises UnavailableError if the port cannot be used, UsageError if the files of a job that is over cannot be read.
    """
    token = secrets.token_urlsafe(18)
    page = JobPage(run_dir, job)
    if job is None:
        page.document()
    try:
        listening = socket.create_server((ADDRESS, port), backlog=BACKLOG)
    except OSError as error:
        raise UnavailableError(f"--web {port} cannot listen there: {error.strerror}; name another port") from None
    port = listening.getsockname()[1]
    loop = EventLoop()
    HttpServer(loop, listening, _PageServer(page, token, port).answer)
    on_open(f"http://{ADDRESS}:{port}/{token}/")
    while True:
        loop.run_once()
