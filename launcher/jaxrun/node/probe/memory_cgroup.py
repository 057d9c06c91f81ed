"""The memory cgroup of this process, of version 1 or 2, and its limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

KILL_COUNT_FILES = ("memory.events", "memory.oom_control")  # of version 2, of version 1
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 2**60  # version 1 writes a huge number for no limit


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
            if any((directory / name).exists() for name in KILL_COUNT_FILES):
                return directory
    return None


def own_memory_cgroup() -> Path | None:
    """The memory cgroup of this process."""
    try:
        return memory_cgroup(Path("/proc/self/cgroup").read_text())
    except OSError:
        return None


def memory_limit(cgroup: Path | None) -> int | None:
    """The bytes that the processes of this cgroup may use together; None for no limit."""
    for text in read_files(cgroup, _LIMIT_FILES):
        with contextlib.suppress(ValueError):  # "max" is no limit
            limit = int(text)
            return limit if limit < _UNLIMITED_BYTES else None
    return None


def read_files(cgroup: Path | None, names: Iterable[str]) -> Iterable[str]:
    if cgroup is None:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield (cgroup / name).read_text()
