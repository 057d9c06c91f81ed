"""What the run directory says of a job while it runs: its attempt, when it began, and the last line of each rank."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from jaxrun.records.event_log.event_log import parse_line
from jaxrun.records.output.noise import NoiseFilter
from jaxrun.records.output.rank_logs import STREAMS, log_path
from jaxrun.records.rundir.recorded_files import open_regular
from jaxrun.records.rundir.rundir import EVENTS_FILE, attempt_directory
from jaxrun.terminal import without_controls

_TAIL_BYTES = 4096
_ATTEMPT = re.compile(r"attempt-(\d{1,6})")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The run directory of a job."""

    run_dir: Path

    def attempt(self) -> int:
        """The number of the latest attempt, from 1."""
        with contextlib.suppress(OSError):
            found = (_ATTEMPT.fullmatch(name) for name in os.listdir(self.run_dir))
            return max((int(match[1]) for match in found if match), default=1)
        return 1

    def started(self) -> float | None:
        """When the job began, in seconds since the epoch; None where nothing says so."""
        with contextlib.suppress(OSError, ValueError):
            with open(open_regular(self.run_dir / EVENTS_FILE), encoding="utf-8", errors="replace") as file:
                return parse_line(file.readline()).time
        return None

    def last_line(self, rank: int, attempt: int) -> str:
        """What the rank wrote last, to stdout or stderr; empty where nothing is known."""
        paths = (log_path(attempt_directory(self.run_dir, attempt), rank, stream) for stream in STREAMS)
        tails = [tail for path in paths if (tail := _tail(path)) is not None and tail[1]]
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
