"""Kills what workers leave behind: as a subreaper, the agent or launcher inherits their orphaned descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.002


def become_subreaper() -> None:
    """Become the new parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all(timeout: float = 5.0, *, spare: int = 0) -> list[int]:
    """Kill and reap every child of this process, and all that become its children then; returns their pids.

    To be called when only the child `spare` is still wanted: the guard, which finishes this if the process is killed.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            if spare and _children() == {spare}:
                break
            found = _kill_descendants(spare)
            if spare and not found:
                break
            killed |= found
            time.sleep(_POLL_S)
    return sorted(killed)


def _children() -> set[int]:
    """The direct children, as the kernel lists them; empty where it does not."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found.update(map(int, file.read().split()))
    return found


def _kill_descendants(spare: int) -> set[int]:
    import psutil  # takes 20 ms, spent only where something was left

    found = [process for process in psutil.Process().children(recursive=True) if process.pid != spare]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    return {process.pid for process in found}
