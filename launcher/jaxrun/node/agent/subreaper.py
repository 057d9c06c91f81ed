"""Kills what workers leave behind: as a subreaper, the agent or launcher inherits their orphaned descendants."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection

from jaxrun.node.agent.process_tree import TRACKER_GRACE_S, children, descendants, is_tracker, kill

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.002


def become_subreaper() -> None:
    """Become the new parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all(timeout: float = 5.0, *, spare: Collection[int] = ()) -> list[int]:
    """Kill and reap every child of this process, and all that become its children then; returns their pids.

    To be called when only the children `spare` are still wanted: the guard, which finishes this if the process is
    killed, and a fork server that waits for the next attempt.
    Resource trackers have a moment to end by themselves.
    """
    killed: set[int] = set()
    wanted = set(spare)
    began = time.monotonic()
    while (waited := time.monotonic() - began) < timeout:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            if wanted and (own := children(os.getpid())) and own <= wanted:
                break
            left = _descendants() - wanted
            if wanted and not left:
                break
            spared = set(filter(is_tracker, left)) if waited < TRACKER_GRACE_S else set()
            for pid in left - spared:
                kill(pid)
            killed |= left - spared
            time.sleep(_POLL_S)
    return sorted(killed)


def _descendants() -> set[int]:
    """Those of this process, also where the kernel does not list a process's children."""
    found = descendants(os.getpid())
    if not found:
        import psutil  # takes 20 ms

        found = {process.pid for process in psutil.Process().children(recursive=True)}
    return found
