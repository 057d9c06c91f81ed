"""Finds out whether the kernel has killed a process because memory was short, from its log and the memory cgroup.

The cgroup is of version 1 or 2, and says how much memory its processes may use.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from jaxrun.text import format_bytes

# Sample: `3,812,3514276391,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:73988kB,
#          anon-rss:64256kB, file-rss:5760kB, shmem-rss:0kB, UID:0 pgtables:184kB oom_score_adj:0`
_KILLED = re.compile(r"Killed process (?P<pid>\d+) .*?anon-rss:(?P<kb>\d+)kB")
_KMSG = Path("/dev/kmsg")
_MAX_RECORD_BYTES = 8192
_KILL_COUNT_FILES = ("memory.events", "memory.oom_control")  # of version 2, of version 1
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 2**60  # version 1 writes a huge number for no limit


class OomWatch:
    """Watches for the kernel's kills from its creation on; `cgroup` and `log` are None if there is none."""

    def __init__(self, cgroup: Path | None, log: Path | None = _KMSG) -> None:
        self._cgroup = cgroup
        self._kill_count = _count_kills(cgroup)
        self._log = _open_at_end(log)
        self._killed: dict[int, int] = {}  # pid → KiB that the process held

    def explain(self, pid: int) -> str:
        """Return what the kernel reports about the SIGKILL of `pid`; empty if it reports no lack of memory."""
        for found in filter(None, map(_KILLED.search, self._records())):
            self._killed[int(found["pid"])] = int(found["kb"])
        counted = _count_kills(self._cgroup) > self._kill_count
        self._kill_count += counted
        if pid in self._killed:
            held = format_bytes(self._killed.pop(pid) * 2**10)
            return f"the kernel's log names it as out of memory: it held {held}"
        limit = memory_limit(self._cgroup)
        known = "" if limit is None else f" (limit {format_bytes(limit)})"
        return f"its memory cgroup ran out of memory{known}" if counted else ""

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _records(self) -> Iterable[str]:
        while self._log is not None:
            try:
                record = os.read(self._log, _MAX_RECORD_BYTES)
            except BrokenPipeError:
                continue  # an old message was overwritten while we were reading
            except OSError:
                return
            if not record:
                return
            yield record.decode(errors="replace")


def _count_kills(cgroup: Path | None) -> int:
    for text in _read_files(cgroup, _KILL_COUNT_FILES):
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def _open_at_end(log: Path | None) -> int | None:
    if log is None:
        return None
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    return fd


def memory_cgroup(membership: str, root: Path = _ROOT) -> Path | None:
    """Find the directory of a process's memory cgroup, version 1 or 2, by the text of its /proc/…/cgroup.

    In a container the path may be the host's; the cgroup is then the root that the container sees.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = root / "memory"
        elif not controllers:
            base = root
        else:
            continue
        for directory in (base / path.lstrip("/"), base):
            if any((directory / name).exists() for name in _KILL_COUNT_FILES):
                return directory
    return None


def own_memory_cgroup() -> Path | None:
    try:
        return memory_cgroup(Path("/proc/self/cgroup").read_text())
    except OSError:
        return None


def memory_limit(cgroup: Path | None) -> int | None:
    """Return the bytes that the processes of this cgroup may use together; None for no limit."""
    for text in _read_files(cgroup, _LIMIT_FILES):
        with contextlib.suppress(ValueError):  # "max" means no limit
            limit = int(text)
            return limit if limit < _UNLIMITED_BYTES else None
    return None


def _read_files(cgroup: Path | None, names: Iterable[str]) -> Iterable[str]:
    if cgroup is None:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield (cgroup / name).read_text()
