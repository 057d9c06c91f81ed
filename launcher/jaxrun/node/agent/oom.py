"""Finds out whether the kernel has killed a process because memory was short, from its log and the memory cgroup."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from jaxrun.files import procfs
from jaxrun.text import format_bytes

# Sample: `3,812,3514276391,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:73988kB,
#          anon-rss:64256kB, file-rss:5760kB, shmem-rss:0kB, UID:0 pgtables:184kB oom_score_adj:0`
_KILLED = re.compile(r"Killed process (?P<pid>\d+) .*?anon-rss:(?P<kb>\d+)kB")
_KMSG = Path("/dev/kmsg")
_MAX_RECORD_BYTES = 8192
_FORGOTTEN_S = 30.0  # a process that the kernel has killed may take seconds to return much memory
_KERNELS_PIDS = "pid:[4026531836]"  # the first namespace of process ids, whose number is fixed (PROC_PID_INIT_INO)


def kernel_log() -> Path | None:
    """Return the kernel's log; None where its process ids are not this process's, as in most containers."""
    try:
        return _KMSG if os.readlink("/proc/self/ns/pid") == _KERNELS_PIDS else None
    except OSError:
        return None


class OomWatch:
    """Watches for the kernel's kills from its creation on; `cgroup` and `log` are None if there is none."""

    def __init__(self, cgroup: str | None, log: Path | None) -> None:
        self._cgroup = cgroup
        self._accounted = procfs.count_oom_kills(cgroup)  # kills that are in the log, explain an end, or are forgotten
        self._log = _open_at_end(log)
        self._killed: dict[int, int] = {}  # pid → KiB that the process held
        self._counts = (-1, -1)  # at the last change: the cgroup's kills, and those that are accounted for
        self._changed_at = 0.0

    def explain(self, pid: int) -> str:
        """Return what the kernel reports about the SIGKILL of `pid`; empty if it reports no lack of memory."""
        self._read_log()
        if pid in self._killed:
            held = format_bytes(self._killed.pop(pid) * 2**10)
            return f"the kernel's log names it as out of memory: it held {held}"
        if procfs.count_oom_kills(self._cgroup) <= self._accounted:
            return ""
        self._accounted += 1
        limit = procfs.memory_limit(self._cgroup)
        known = "" if limit is None else f" (limit {format_bytes(limit)})"
        return f"its memory cgroup ran out of memory{known}"

    def forget_old(self, now: float) -> None:
        """Forget kills that no rank's end has followed: they ended other processes. Call it every second or so."""
        self._read_log()
        counts = procfs.count_oom_kills(self._cgroup), self._accounted
        if counts != self._counts:
            self._counts, self._changed_at = counts, now
        elif now - self._changed_at >= _FORGOTTEN_S:
            self._killed.clear()
            self._accounted = counts[0]

    def _read_log(self) -> None:
        for found in filter(None, map(_KILLED.search, self._records())):
            self._killed[int(found["pid"])] = int(found["kb"])
            self._accounted += 1

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


def _open_at_end(log: Path | None) -> int | None:
    if log is None:
        return None
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    return fd
