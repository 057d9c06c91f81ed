"""The only module that prints: brings what the workers write to the log files and, prefixed, to the screen.

One thread uses an `Output`; nothing here blocks it but the log files' disk. When text is shown is decided
here, how it looks in lines.py and screen.py; spool.py delivers it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from jaxrun.output.rank_logs import RankLogs
from jaxrun.output.screen import RankStream, Screen, rank_prefix
from jaxrun.output.stderr_tail import StderrTails

STREAMS = ("out", "err")
PARTIAL_LINE_DELAY_S = 0.3  # seconds until an unfinished line, such as a prompt, is shown
PROGRESS_BAR_INTERVAL_S = 3.0  # seconds between two states of an unfinished progress bar
MAX_PARTIAL_BYTES = 2**16  # bytes of an unfinished line that are held back
CONGESTED_POLL_S = 0.05


class Output:
    """Everything that a job writes: the workers' bytes on screen and in files, and jaxrun's own words."""

    def __init__(
        self,
        size: int,
        *,
        log_dir: Path | None,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        colour: tuple[bool, bool] = (False, False),
        shown: frozenset[int] | None = None,
        open_logs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log_dir` exists and gets rank-0003.out, rank-0003.err and so on; None keeps no files.

        `colour`: whether stdout, stderr are terminals that want it. `shown`: the ranks that the screen shows,
        None for all. `open_logs`: open all log files now, and not only those that are written to.
        """
        self._clock = clock
        self._logs: RankLogs | None = None
        self._waiting: dict[RankStream, float] = {}  # since when it has had text that is not shown
        self._tails = StderrTails()
        out = Screen(stdout_fd, "stdout", colour=colour[0])
        same = _same_file(stdout_fd, stderr_fd)
        self._err = out if same else Screen(stderr_fd, "stderr", colour=colour[1])
        self._screens = (out,) if same else (out, self._err)
        self._streams = {
            (rank, stream): RankStream(screen, rank_prefix(rank, size, colour=screen.colour))
            for rank in (range(size) if shown is None else sorted(shown))
            for stream, screen in zip(STREAMS, (out, self._err), strict=True)
        }
        if log_dir is not None:
            voices = [(r, s) for r in range(size) for s in STREAMS] if open_logs else []
            self._logs = RankLogs(log_dir, voices, self.print_line)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """What was just read from the worker's "out" or "err"."""
        self.log(rank, stream, data)
        self._tails.add(rank, stream, data)
        self.show(rank, stream, data)

    def show(self, rank: int, stream: str, data: bytes) -> None:
        """On the screen only: what its agent has logged elsewhere."""
        voice = self._streams.get((rank, stream))
        if voice is None:
            return
        whole = voice.buffer.feed(data)
        if whole:
            voice.show(whole)
        if not voice.buffer.pending:
            self._waiting.pop(voice, None)
        elif len(voice.buffer.pending) > MAX_PARTIAL_BYTES:
            self._show_partial(voice)
        elif whole or voice not in self._waiting:
            self._waiting[voice] = self._clock()

    def log(self, rank: int, stream: str, data: bytes) -> None:
        """Into that rank's file only: what the screen shows in another form."""
        if self._logs is not None:
            self._logs.write(rank, stream, data)

    def bytes_written(self, rank: int) -> int:
        """Bytes that the worker has written so far."""
        return self._tails.bytes_written(rank)

    def stderr_tail(self, rank: int) -> str:
        """The last lines that the worker wrote to its stderr, at most `TAIL` bytes."""
        return self._tails.text(rank)

    def end_stream(self, rank: int, stream: str) -> None:
        """That pipe has ended: its last line is shown now, with a newline if it lacks one."""
        voice = self._streams.get((rank, stream))
        if voice is not None:
            self._waiting.pop(voice, None)
            voice.show(voice.buffer.finish())

    def flush_due(self) -> float | None:
        """Shows what has waited long enough; seconds until the next call, None if nothing waits."""
        self._report_lost_screens()
        now = self._clock()
        wait = CONGESTED_POLL_S if self.congested else float("inf")
        for voice, since in list(self._waiting.items()):
            due = since + PARTIAL_LINE_DELAY_S
            if voice.buffer.is_progress_bar:
                due = max(due, voice.bar_shown_at + PROGRESS_BAR_INTERVAL_S)
            if not voice.buffer.has_partial:
                del self._waiting[voice]
            elif due <= now:
                self._show_partial(voice)
            else:
                wait = min(wait, due - now)
        return None if wait == float("inf") else wait

    def print_line(self, text: str) -> None:
        """jaxrun's own words, on stderr, in lines of their own."""
        if not text.endswith("\n"):
            text += "\n"
        self._err.write(self._err.interleaver.interrupt() + text.encode(errors="backslashreplace"))

    @property
    def congested(self) -> bool:
        """The screen takes no more, and no more can be kept for it: stop reading the workers."""
        return any(screen.spool.full for screen in self._screens)

    def close(self, timeout: float | None = None) -> bool:
        """Returns when all was delivered or its reader has gone; False if `timeout` seconds were not enough.

        May be called again, also after a signal handler has raised out of it.
        """
        for rank, stream in self._streams:
            self.end_stream(rank, stream)
        if self._logs is not None:
            self._logs.close()
        deadline = None if timeout is None else time.monotonic() + timeout
        done = True
        for screen in self._screens:  # stderr last: it is told what became of stdout
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done = screen.spool.close(left) and done
            self._report_lost_screens()
        return done

    def _show_partial(self, voice: RankStream) -> None:
        self._waiting.pop(voice, None)
        if voice.buffer.is_progress_bar:
            voice.bar_shown_at = self._clock()
        voice.show(voice.buffer.flush_partial())

    def _report_lost_screens(self) -> None:
        for screen in self._screens:
            loss = screen.new_loss()
            if loss:
                rest = "is only in the log files" if self._logs is not None else "is dropped"
                self.print_line(f"jaxrun: {loss}; the workers' output from here on {rest}, the job goes on")


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
