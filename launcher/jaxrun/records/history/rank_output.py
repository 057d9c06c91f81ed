"""Shows what the ranks of a job have printed, from their log files, as the job's own screen does; and follows it.

Only files are read, so it works wherever the run directory can be seen, whichever host the job's launcher runs on. The
files have no times: without following, the ranks come one after the other.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from jaxrun.analysis.verdict.verdict_text import headline_of
from jaxrun.errors import UsageError
from jaxrun.files.own_files import is_trusted
from jaxrun.files.regular_files import open_regular
from jaxrun.records.output.output import Output
from jaxrun.records.rundir.recorded_files import has_ended, read_plan, read_verdict
from jaxrun.records.rundir.rundir import EVENTS_FILE, JOB_FILE, VERDICT_FILE, attempt_directory
from jaxrun.terminal import TerminalFormat, without_controls
from jaxrun.text import Ranks, format_ranges, plural

_LOG_NAME = re.compile(r"rank-([0-9]{4,9})\.(out|err)")
_POLL_S = 0.1
_PIECE_BYTES = 2**18

_Piece = tuple[int, str, bytes]  # rank, stream, and what it has printed


class _LogFile(Struct):
    """One log file: the rank and stream whose bytes it has, and how many of them were shown."""

    rank: int
    stream: str
    shown: int = 0


class _AttemptLogs:
    """The log files of one attempt, some of which may appear later."""

    def __init__(self, directory: Path, ranks: Ranks | None, last_lines: int | None) -> None:
        self._directory = directory
        self._ranks = ranks
        self._last_lines = last_lines
        self._files: dict[str, _LogFile] = {}
        # Another user may write what steers a terminal.
        self._is_own = is_trusted(directory.stat().st_uid)

    def look(self) -> list[int]:
        """Look for new files; returns the ranks that have any."""
        for name in sorted(os.listdir(self._directory)):
            match = _LOG_NAME.fullmatch(name)
            if match and name not in self._files and _is_wanted(int(match[1]), self._ranks):
                self._files[name] = file = _LogFile(int(match[1]), match[2])
                if self._last_lines is not None:
                    file.shown = _start_of_last_lines(self._directory / name, self._last_lines)
        return sorted({file.rank for file in self._files.values()})

    def read(self) -> Iterator[_Piece]:
        """Yield what the files have got since the last call: rank, stream and bytes; stdout before stderr."""
        for name, file in sorted(self._files.items(), key=lambda item: (item[1].rank, item[1].stream == "err")):
            try:
                descriptor = open_regular(self._directory / name)
            except OSError:
                continue
            with open(descriptor, "rb") as source:
                source.seek(file.shown)
                while data := source.read(_PIECE_BYTES):
                    file.shown += len(data)
                    yield file.rank, file.stream, data if self._is_own else _without_controls(data)


def _is_wanted(rank: int, ranks: Ranks | None) -> bool:
    return ranks is None or any(rank in part for part in ranks)


def _without_controls(data: bytes) -> bytes:
    return without_controls(data.decode(errors="replace")).encode(errors="replace")


def _start_of_last_lines(path: Path, count: int) -> int:
    """Return where the last `count` lines of a file begin."""
    with open(open_regular(path), "rb") as file:
        at = size = file.seek(0, os.SEEK_END)
        needed = count + 1  # newlines: the one that ends the line before the first shown
        while at > 0:
            start = max(0, at - _PIECE_BYTES)
            file.seek(start)
            data = file.read(at - start)
            if at == size and not data.endswith(b"\n"):
                needed -= 1  # the last line has no newline yet
            found = data.count(b"\n")
            if found >= needed:
                cut = len(data)
                for _ in range(needed):
                    cut = data.rfind(b"\n", 0, cut)
                return start + cut + 1
            needed -= found
            at = start
        return 0


def last_attempt(run_dir: Path) -> int:
    """Return the number of the latest attempt that has a directory."""
    attempt = 1
    while attempt_directory(run_dir, attempt + 1).is_dir():
        attempt += 1
    return attempt


def show_output(
    run_dir: Path,
    *,
    ranks: Ranks | None = None,
    attempt: int | None = None,
    last_lines: int | None = None,
    follow: bool = False,
) -> None:
    """Print what the ranks have printed in an attempt, by default the latest, and with `follow` what they print until
    the job is over, then its verdict.

    ranks:       None for all
    last_lines:  of each file, to begin with; None for all

    Raises UsageError if there is no such attempt or rank.
    """
    number = attempt or last_attempt(run_dir)
    logs = _open_attempt(run_dir, number, ranks, last_lines)
    found = logs.look()
    if not follow:
        _check_found(run_dir, number, found, ranks)
    size = read_plan(run_dir).processes or max(found, default=0) + 1
    colour = TerminalFormat.at(1, os.environ).colour, TerminalFormat.at(2, os.environ).colour
    shown = frozenset(rank for rank in range(size) if _is_wanted(rank, ranks))
    output = Output(size, log_dir=None, open_logs=False, colour=colour, shown=shown)
    try:
        if follow:
            _show_followed(_follow(run_dir, number, ranks, last_lines, stays=attempt is not None), output)
            output.print_line(f"jaxrun: {_describe_end(run_dir)}")
        else:
            for piece in logs.read():
                output.show(*piece)
    finally:
        output.close()


def _follow(
    run_dir: Path, number: int, ranks: Ranks | None, last_lines: int | None, *, stays: bool
) -> Iterator[_Piece | int | None]:
    """Yield what comes until the job is over: output, the number of each new attempt, and None before each pause.

    stays:  of later attempts nothing is yielded
    """
    logs = _AttemptLogs(attempt_directory(run_dir, number), ranks, last_lines)
    while True:
        is_over = has_ended(run_dir)  # before the files are read: they are whole then
        logs.look()
        yield from logs.read()
        following = attempt_directory(run_dir, number + 1)
        if not stays and following.is_dir():
            number += 1
            yield number
            logs = _AttemptLogs(following, ranks, None)
        elif is_over:
            return
        else:
            yield None
            time.sleep(_POLL_S)


def _show_followed(news: Iterator[_Piece | int | None], output: Output) -> None:
    for one in news:
        if one is None:
            output.flush_due()
        elif isinstance(one, int):
            output.begin_attempt(None)
            output.print_line(f"jaxrun: attempt {one}")
        else:
            output.show(*one)
    output.begin_attempt(None)


# ---- lines, for programs


class OutputLine(Struct, frozen=True):
    """A line that a rank has printed: the rank, "out" or "err", and the text without its end.

    >>> next(jaxrun.Job().lines())
    OutputLine(rank=0, stream='out', text='hello')
    """

    rank: int
    stream: str
    text: str


def read_lines(
    run_dir: Path, *, ranks: Ranks | None = None, attempt: int | None = None, follow: bool = False
) -> Iterator[OutputLine]:
    """Yield the lines of an attempt, by default the latest, and with `follow` those that come until the job is over.

    ranks:  None for all

    Raises UsageError if there is no such attempt.
    """
    number = attempt or last_attempt(run_dir)
    logs = _open_attempt(run_dir, number, ranks, None)
    if follow:
        return _split_lines(_follow(run_dir, number, ranks, None, stays=attempt is not None))
    logs.look()
    return _split_lines(logs.read())


def _split_lines(news: Iterator[_Piece | int | None] | Iterator[_Piece]) -> Iterator[OutputLine]:
    """Yield whole lines; the last one of a rank without an end when its attempt is over."""
    partial: dict[tuple[int, str], bytes] = {}
    for one in news:
        if one is None:
            continue
        if isinstance(one, int):
            yield from _last_lines(partial)
            partial = {}
            continue
        rank, stream, data = one
        *lines, partial[rank, stream] = (partial.get((rank, stream), b"") + data).split(b"\n")
        yield from (OutputLine(rank, stream, line.decode(errors="replace")) for line in lines)
    yield from _last_lines(partial)


def _last_lines(partial: Mapping[tuple[int, str], bytes]) -> Iterator[OutputLine]:
    for (rank, stream), line in partial.items():
        if line:
            yield OutputLine(rank, stream, line.decode(errors="replace"))


def _describe_end(run_dir: Path) -> str:
    verdict = read_verdict(run_dir)
    if verdict is None:
        return f"the launcher of {run_dir} is gone, and left no verdict"
    headline = without_controls(headline_of(verdict)).rstrip(".")
    return headline if verdict.exit_code == 0 else f"{headline}; exit {verdict.exit_code}"


def _open_attempt(run_dir: Path, number: int, ranks: Ranks | None, last_lines: int | None) -> _AttemptLogs:
    directory = attempt_directory(run_dir, number)
    try:
        return _AttemptLogs(directory, ranks, last_lines)
    except OSError:
        count = plural(last_attempt(run_dir), "attempt")
        raise UsageError(f"{run_dir} has no attempt {number}; it has {count}") from None


def _check_found(run_dir: Path, number: int, found: list[int], ranks: Ranks | None) -> None:
    """Raise UsageError if no rank, or one of those that were asked for, has a log."""
    if found:
        return
    known = _AttemptLogs(attempt_directory(run_dir, number), None, None).look()
    if known and ranks is not None:
        raise UsageError(f"--rank names no rank of this job, whose logs are of ranks {format_ranges(known)}")
    state = "the job has not started its ranks yet" if (run_dir / EVENTS_FILE).exists() else f"it has no {JOB_FILE}"
    if (run_dir / VERDICT_FILE).exists():
        state = "no rank was started"
    raise UsageError(f"{run_dir} has no logs of ranks: {state}")
