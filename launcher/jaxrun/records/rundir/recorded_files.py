"""Reads the files that jobs have left, whoever they are: a FIFO in the place of one, say, keeps nobody waiting."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from jaxrun.analysis.verdict import verdict
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import UsageError
from jaxrun.records.event_log.event_log import EventLog, parse_lines
from jaxrun.records.rundir.rundir import EVENTS_FILE, VERDICT_FILE

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: str | Path) -> int:
    """Return a descriptor of a file. Raises OSError, also where it is no regular file."""
    file = os.open(path, _READ)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is no regular file")


def read_text(path: Path) -> str:
    """Return what a file says. Raises OSError."""
    with open(open_regular(path), encoding="utf-8", errors="replace") as file:
        return file.read()


def read_verdict(run_dir: Path) -> Verdict | None:
    """Return how a job ended; None where it runs, its launcher was killed, or the file cannot be understood."""
    with contextlib.suppress(OSError, ValueError):
        return verdict.from_json(read_text(run_dir / VERDICT_FILE))
    return None


def read_job_events(run_dir: Path) -> EventLog:
    """Return what the event log holds; nothing where there is none. Raises UsageError where it cannot be read."""
    path = run_dir / EVENTS_FILE
    try:
        with open(open_regular(path), encoding="utf-8", errors="replace") as file:
            return parse_lines(file)
    except FileNotFoundError:
        return EventLog()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}.") from None


def parse_json(text: str) -> Any:
    """Raises ValueError, for what is nested too deep as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
