"""Was it the kernel that killed a process for want of memory? Asked of its log and of the job's memory cgroup."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_KILLED = re.compile(r"Killed process (?P<pid>\d+) .*?anon-rss:(?P<kb>\d+)kB")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 2**60


class OomWatch:
    """Counts the kills in this process's memory cgroup, from its creation on."""

    def __init__(self, cgroup: Path | None = None) -> None:
        self._cgroup = cgroup if cgroup is not None else _memory_cgroup()
        self._before = self._kills()
        self._log = _open_kernel_log()

    def explain(self, pid: int) -> str:
        """What the kernel says about the SIGKILL of `pid`; empty if it says nothing of memory."""
        for line in self._messages():
            match = _KILLED.search(line)
            if match and int(match["pid"]) == pid:
                return f"the kernel's log names it as out of memory: it held {int(match['kb']) / 2**20:.1f} GiB"
        if self._kills() > self._before:
            return f"its memory cgroup ran out of memory{self._limit()}"
        return ""

    def _messages(self) -> Iterator[str]:
        while self._log is not None:
            try:
                yield os.read(self._log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # an old message was overwritten while we read
            except OSError:
                return

    def _kills(self) -> int:
        if self._cgroup is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (self._cgroup / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill":
                        return int(value)
        return 0

    def _limit(self) -> str:
        for name in _LIMITS:
            with contextlib.suppress(OSError, ValueError):
                limit = int((self._cgroup / name).read_text())  # type: ignore[operator]
                if limit < _UNLIMITED:
                    return f" (limit {limit / 2**30:.1f} GiB)"
        return ""


def _memory_cgroup() -> Path | None:
    """The directory of this process's memory cgroup, version 1 or 2; None where none is mounted."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                return Path("/sys/fs/cgroup/memory" + path)
            if not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
                return Path("/sys/fs/cgroup" + path)
    return None


def _open_kernel_log() -> int | None:
    """The kernel's log from now on; None where this user may not read it."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return None
    return fd
