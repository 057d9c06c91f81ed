"""The hosts that a job must not use: those of --exclude-hosts, and those in the --quarantine file, which jobs share.

A line of the file has a host, the time, and the reason; text after `#` is a comment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.spec.backends.slurm_allocation import expand_node_list
from jaxrun.spec.job.job import Job

# O_NONBLOCK: do not wait for the reader of a pipe.
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


def excluded_hosts(job: Job) -> dict[str, str]:
    """Return the hosts that the job must not use, with the reasons. Raises UsageError."""
    excluded = _read(job.quarantine) if job.quarantine else {}
    return excluded | dict.fromkeys(_parse(job.exclude_hosts, "--exclude-hosts"), "--exclude-hosts")


def _parse(text: str, source: str) -> tuple[str, ...]:
    try:
        return expand_node_list(text) if text else ()
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _read(path: Path) -> dict[str, str]:
    """Return the hosts in a file, with the reasons; empty if the file does not exist yet."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(errno.EINVAL, "it is not a regular file")  # reading a pipe would wait for its writer
        text = path.read_text() if path.exists() else ""
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise OSError(0, "it, or its directory, cannot be written")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not a text file")
        raise UsageError(f"--quarantine {path} cannot be used: {reason}; name a file of your own") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        hosts, _, reason = line.partition("#")[0].strip().partition(" ")
        found |= dict.fromkeys(_parse(hosts, f"--quarantine {path}, line {number}"), f"{path}: {reason.strip()}")
    return found


def add_to_quarantine(path: Path, reasons: Mapping[str, str]) -> None:
    """Append a line for each host in one write, because other jobs may append, too. Raises OSError.

    If the last line of the file lacks its newline, that comes first; otherwise the next host would become part of it.
    """
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    lines = [f"{host} {now} {' '.join(reason.replace('#', ' ').split())}\n" for host, reason in reasons.items()]
    file = os.open(path, _APPEND, 0o666)
    try:
        size = os.fstat(file).st_size
        is_ended = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        os.write(file, ("" if is_ended else "\n").encode() + "".join(lines).encode())
    finally:
        os.close(file)
