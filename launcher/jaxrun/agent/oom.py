"""Was it the kernel that killed a process for want of memory? Its log and the memory cgroup say so."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

# Sample: `3,812,3514276391,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:73988kB,
#          anon-rss:64256kB, file-rss:5760kB, shmem-rss:0kB, UID:0 pgtables:184kB oom_score_adj:0`
_KILLED = re.compile(r"Killed process (?P<pid>\d+) .*?anon-rss:(?P<kb>\d+)kB")
_KMSG = Path("/dev/kmsg")
_ROOT = Path("/sys/fs/cgroup")
_RECORD = 8192
_KILLS = ("memory.events", "memory.oom_control")  # of version 2, of version 1
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 2**60


class OomWatch:
    """Notes the kernel's kills from its creation on; `cgroup` and `log` are None where there is none."""

    def __init__(self, cgroup: Path | None, log: Path | None = _KMSG) -> None:
        self._cgroup = cgroup
        self._kills = _kills(cgroup)
        self._log = _open_at_end(log)
        self._killed: dict[int, int] = {}  # process → KiB that it held

    def explain(self, pid: int) -> str:
        """What the kernel says about the SIGKILL of `pid`; empty if it says nothing of memory."""
        self._killed.update(_killed(self._records()))
        counted = _kills(self._cgroup) > self._kills
        self._kills += counted
        if pid in self._killed:
            held = _size(self._killed.pop(pid) * 2**10)
            return f"the kernel's log names it as out of memory: it held {held}"
        return f"its memory cgroup ran out of memory{_limit(self._cgroup)}" if counted else ""

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _records(self) -> Iterable[str]:
        while self._log is not None:
            try:
                record = os.read(self._log, _RECORD)
            except BrokenPipeError:
                continue  # an old message was overwritten while we read
            except OSError:
                return
            if not record:
                return
            yield record.decode(errors="replace")


def memory_cgroup(membership: str, root: Path = _ROOT) -> Path | None:
    """The directory of a process's memory cgroup, version 1 or 2, from the text of its /proc/…/cgroup.

    In a container the path may be the host's; then it is the root that the container sees.
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
            if any((directory / name).exists() for name in _KILLS):
                return directory
    return None


def own_memory_cgroup() -> Path | None:
    """The memory cgroup of this process."""
    try:
        return memory_cgroup(Path("/proc/self/cgroup").read_text())
    except OSError:
        return None


def _killed(records: Iterable[str]) -> dict[int, int]:
    matches = (_KILLED.search(text) for text in records)
    return {int(match["pid"]): int(match["kb"]) for match in matches if match}


def _kills(cgroup: Path | None) -> int:
    """How many processes the kernel has killed in this cgroup."""
    for text in _texts(cgroup, _KILLS):
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def _limit(cgroup: Path | None) -> str:
    for text in _texts(cgroup, _LIMITS):
        with contextlib.suppress(ValueError):  # "max" is no limit
            limit = int(text)
            return f" (limit {_size(limit)})" if limit < _UNLIMITED else ""
    return ""


def _texts(cgroup: Path | None, names: Iterable[str]) -> Iterable[str]:
    if cgroup is None:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield (cgroup / name).read_text()


def _open_at_end(log: Path | None) -> int | None:
    if log is None:
        return None
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    return fd


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
