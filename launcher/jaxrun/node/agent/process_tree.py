"""The processes that a worker has started, as /proc shows them, and Python's resource trackers among them.

A resource tracker unlinks the shared memory that processes leave behind, as soon as the last of them has died, and then
ends. So trackers are spared for a moment when all others are killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal

TRACKER_GRACE_S = 1.0  # for trackers to end by themselves, once the processes that they serve have been killed

# Of multiprocessing and of loky: `from multiprocessing.resource_tracker import main;main(5)`
_TRACKER_CODE = re.compile(rb"^from [\w.]*resource_tracker import main", re.MULTILINE)


def children(pid: int) -> set[int]:
    """The direct children, as the kernel lists them; empty where it does not."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def descendants(pid: int) -> set[int]:
    """The children, their children and so on."""
    found: set[int] = set()
    todo = children(pid)
    while todo:
        found |= todo
        todo = {child for parent in todo for child in children(parent)} - found
    return found


def group_members(group: int) -> set[int]:
    """The living processes of a process group."""
    return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _living_group(pid) == group}


def is_tracker(pid: int) -> bool:
    """Whether the process is a resource tracker."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return _TRACKER_CODE.search(file.read().replace(b"\0", b"\n")) is not None
    return False


def kill_group(group: int) -> None:
    """Kill the process group of this leader but for its resource trackers; a group that has ended is left alone."""
    trackers = set(filter(is_tracker, descendants(group)))
    kill(group)
    if not trackers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    for pid in group_members(group) - trackers:
        kill(pid)


def kill(pid: int) -> None:
    """Kill a process; one that has ended is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _living_group(pid: int) -> int:
    """The process group; 0 for a process that has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        state, _, group = file.read().rpartition(b")")[2].split()[:3]
        return 0 if state == b"Z" else int(group)
    return 0
