"""`jaxrun top`: shows a running job on the whole terminal until it is over or someone quits; or once, as text."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxrun.analysis.verdict.verdict_text import headline_of
from jaxrun.errors import EXIT_SIGNAL_BASE, JaxrunError
from jaxrun.frontends.top.feed import INTERVAL_S, Feed
from jaxrun.frontends.top.view import View, render, render_pages
from jaxrun.job_client.job_requests import format_stacks, request_stacks
from jaxrun.job_client.running_job import RunningJob, wait_for_job
from jaxrun.records.rundir.recorded_files import read_verdict
from jaxrun.terminal import PROSE_WIDTH, TerminalFormat, without_controls

_QUIT, _STACKS = "q", "s"
_ESCAPE = b"\x1b"
_FOLLOW_S = 1.0


def read_once(job: RunningJob) -> View:
    """Return how far the job is, after half a second, in which the CPU time of its ranks is measured."""
    return _read(Feed(job))


def _read(feed: Feed) -> View:
    feed.update()
    time.sleep(INTERVAL_S)
    feed.update()
    return feed.view()


def follow(job: RunningJob) -> Iterator[View]:
    """Yield how far the job is, once a second, until it is over."""
    feed = Feed(job)
    yield _read(feed)
    while True:
        time.sleep(_FOLLOW_S)
        if not feed.is_running:
            return
        feed.update()
        yield feed.view()


def show_once(job: RunningJob, environ: Mapping[str, str]) -> None:
    """Print how far the job is, after half a second, in which the CPU time of its ranks is measured.

    Raises UnavailableError and UsageError if it does not answer.
    """
    feed = Feed(job)
    _read(feed)
    console = _console(environ)
    _print(console, render(feed.view(), console.width, None, feed.last_line))


def watch(job: RunningJob, environ: Mapping[str, str], *, verdict_follows: bool = False) -> None:
    """Show the job on the terminal until it is over, with how it went, or until someone quits.

    verdict_follows:  another process says how the job has ended, if there is a verdict
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    screen = _Screen(job, _console(environ))
    if screen.run():
        screen.print_last()
        if not verdict_follows or read_verdict(job.run_dir) is None:
            _print(screen.console, [Text(_headline(job))])


def watch_from_start(run_dir: Path, launcher: int, environ: Mapping[str, str]) -> None:
    """Show the job of --live, as soon as there is one, until its launcher has a verdict, which it prints itself.

    Ctrl-C at the terminal is meant for the launcher.
    """
    for signum in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    job = wait_for_job(run_dir, launcher)
    if job is not None:
        watch(job, environ, verdict_follows=True)


class _Screen:
    """The terminal, and what it shows."""

    def __init__(self, job: RunningJob, console: Console) -> None:
        self._job = job
        self.console = console
        self._feed = Feed(job)
        self._pages = ""  # what is shown in the place of the rows
        self._is_new = threading.Event()

    def run(self) -> bool:
        """Show the job; returns False if someone has quit before its end."""
        threading.Thread(target=self._feed.update_forever, args=(self._is_new.set,), daemon=True).start()
        with Live(screen=True, auto_refresh=False, console=self.console) as live, Keyboard(sys.stdin.fileno()) as keys:
            shown_at = float("-inf")
            while True:
                if self._is_new.is_set() or time.monotonic() >= shown_at + INTERVAL_S:
                    self._is_new.clear()
                    if not self._feed.is_running:
                        return True
                    live.update(join_lines(self._lines()), refresh=True)
                    shown_at = time.monotonic()
                for key in keys.wait(INTERVAL_S / 5):
                    if key == _QUIT:
                        return False
                    self._on_key(key)
                    shown_at = float("-inf")

    def print_last(self) -> None:
        """Leave on the terminal what was shown last."""
        view = replace(self._feed.view(), phase="over after")
        _print(self.console, render(view, self.console.width, None, self._feed.last_line))

    def _on_key(self, key: str) -> None:
        if self._pages:
            self._pages = ""
        elif key == _STACKS:
            try:
                self._pages = format_stacks(request_stacks(self._job))
            except JaxrunError as error:
                self._pages = f"no stacks: {error}"

    def _lines(self) -> list[Text]:
        width, height = self.console.size
        if self._pages:
            return render_pages(without_controls(self._pages), width, height)
        return render(self._feed.view(), width, height, self._feed.last_line)


class Keyboard:
    """Context manager that reads from the terminal `fd` by keys, which are not echoed; Ctrl-C stays a signal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_open = True

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSANOW)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSANOW, self._before)

    def wait(self, timeout: float) -> str:
        """The keys that were typed, at the latest after so many seconds; those with escape sequences are left out."""
        if not select.select([self._fd] if self._is_open else [], [], [], timeout)[0]:
            return ""
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        self._is_open = bool(data)  # else the terminal has been closed
        return "" if data.startswith(_ESCAPE) and len(data) > 1 else data.decode(errors="replace")


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    """End by this signal, with the terminal as it was."""
    raise SystemExit(EXIT_SIGNAL_BASE + signum)


def _console(environ: Mapping[str, str]) -> Console:
    """The terminal, with colours where it wants them; or the pipe or file in its place."""
    terminal = TerminalFormat.at(1, environ)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that it cannot show, as in what a rank has written
    return Console(
        width=PROSE_WIDTH if terminal.width is None else None,
        no_color=not terminal.colour,
        highlight=False,
        markup=False,
        emoji=False,
    )


def join_lines(lines: Iterable[Text]) -> Text:
    return Text("\n").join(lines)


def _print(console: Console, lines: Iterable[Text]) -> None:
    console.print(join_lines(lines), soft_wrap=True)


def _headline(job: RunningJob) -> str:
    """Write how the job has ended, in one line."""
    deadline = time.monotonic() + INTERVAL_S  # a launcher that was killed leaves none
    while time.monotonic() < deadline:
        if (verdict := read_verdict(job.run_dir)) is not None:
            return without_controls(f"jaxrun: {headline_of(verdict)}")
        time.sleep(INTERVAL_S / 10)
    return f"the launcher of this job is gone, and left no verdict; to see what is known: jaxrun explain {job.run_dir}"


def is_terminal() -> bool:
    """Whether someone is at a terminal and can type."""
    return os.isatty(0) and os.isatty(1)
