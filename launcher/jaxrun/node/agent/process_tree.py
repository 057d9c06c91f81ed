"""The processes that workers have started, as /proc shows them, and how to kill them all.

Nothing of a job may survive it. There are several ways to end such processes, because each is for a fault that the
others do not handle; a test in tests/process covers that fault:

  subreaper, kill_all       The owner (an agent or the launcher) lives: it inherits daemons of ranks, in sessions of
                            their own, whose parents have ended. test_remote_agent
  end of the channel        A rank that waits for its agent, which has gone; before the rank joins, and in a wrapper or
                            a process namespace, the kernel sends it no signal. test_worker: it ends by itself
  parent death signal,      A rank in a call of C++, or stopped, whose agent was killed, perhaps with the guard.
  of a rank                 test_worker: it dies with its agent
  parent death signal,      A fork server that is stopped and so does not see the end of its channel, as by a guard that
  of a fork server          was killed before it had killed what it stopped. test_forkserver
  guard, by the mark        The owner was killed: what ranks have started since the guard last looked. test_guard
  guard, by descent         The owner was killed: what has no mark, as after `env -i`, or from a fork server that
                            another process has made. test_guard
  guard, by group           The launcher was killed: its mpirun or srun, which ends what it has started on other hosts
                            if it gets a SIGTERM first, test_guard; and what a rank from such a fork server has forked
                            since the guard last looked. test_gang_faults

The owner, an agent or the launcher, is a subreaper, which inherits the orphans among its descendants. Once it has been
killed, these are nobody's: the guard (guard.py) remembers them (Descendants). Python's resource trackers unlink the
shared memory that processes leave behind, as soon as the last of them has died, and then end: so they are given a
moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Collection

from jaxrun.files import procfs

_MAX_ANCESTORS = 8  # that are examined; there may be a wrapper script or two among them
TRACKER_GRACE_S = 1.0  # for trackers to end by themselves, once the processes that they serve have been killed

# Of multiprocessing and of loky: `from multiprocessing.resource_tracker import main;main(5)`
_TRACKER_CODE = re.compile(rb"^from [\w.]*resource_tracker import main", re.MULTILINE)


def command_lines_above() -> list[list[str]]:
    """The command lines of the processes above this one, the parent first."""
    found, pid = [], os.getppid()
    for _ in range(_MAX_ANCESTORS):
        stat = procfs.stat_words(pid)
        if not stat:
            break
        found.append([os.fsdecode(word) for word in procfs.command_line(pid)])
        pid = int(stat[procfs.PARENT])
        if pid <= 1:
            break
    return found


def is_tracker(pid: int) -> bool:
    return _TRACKER_CODE.search(b"\n".join(procfs.command_line(pid))) is not None


def kill_group(group: int) -> None:
    """Kill this leader's process group except for its resource trackers; a group that has ended is left alone."""
    trackers = set(filter(is_tracker, procfs.descendants(group)))
    kill(group)
    if not trackers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    for pid in procfs.group_members(group) - trackers:
        kill(pid)


def kill_rest_of_group(group: int) -> None:
    """Kill what a leader, which has been reaped, has left in its process group, resource trackers included."""
    for pid in procfs.group_members(group):
        kill(pid)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.002


def become_subreaper() -> None:
    """Become the new parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all(timeout: float = 5.0, *, keep: Collection[int] = ()) -> list[int]:
    """Kill and reap every child of this process, and all that become its children then; returns their pids.

    To be called when only the children `keep` are still wanted: the guard, which finishes this if the process is
    killed, and a fork server that waits for the next attempt.
    Resource trackers have a moment to end by themselves.
    """
    killed: set[int] = set()
    wanted = set(keep)
    began = time.monotonic()
    while (waited := time.monotonic() - began) < timeout:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            if wanted and (own := procfs.children(os.getpid())) and own <= wanted:
                break
            left = procfs.descendants(os.getpid()) - wanted
            if wanted and not left:
                break
            kept = set(filter(is_tracker, left)) if waited < TRACKER_GRACE_S else set()
            for pid in left - kept:
                kill(pid)
            killed |= left - kept
            time.sleep(_POLL_S)
    return sorted(killed)


class Descendants:
    """The descendants of `root` except the process `but`, as last seen, by process id and start time."""

    def __init__(self, root: int, but: int) -> None:
        self._root = root
        self._but = but
        self._known: dict[int, int] = {}

    def update(self) -> None:
        """Add new ones, and forget those that have ended. May be called while `root` is dying: none is lost."""
        self._known = {
            pid: start for pid, start in self._known.items() if procfs.stat_of_living(pid, procfs.START_TICKS) == start
        }
        self._add(procfs.descendants(self._root))

    def add_children(self) -> None:
        """Add the children of `root` alone: its own, and orphans. Takes a fraction of the time of `update`."""
        self._add(procfs.children(self._root))

    def living(self) -> set[int]:
        return {pid for pid, start in self._known.items() if procfs.stat_of_living(pid, procfs.START_TICKS) == start}

    def freeze(self, find_others: Callable[[], set[int]]) -> None:
        """Stop all except resource trackers, and add what they have started since: none can escape or end meanwhile.

        The same is done with the result of `find_others`.
        """
        stopped: set[int] = set()
        while todo := (self.living() | find_others()) - stopped:
            for pid in todo:
                if not is_tracker(pid):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGSTOP)
            stopped |= todo
            self._add(todo.union(*map(procfs.children, todo)))

    def _add(self, pids: set[int]) -> None:
        for pid in pids - self._known.keys() - {self._but}:
            if start := procfs.stat_of_living(pid, procfs.START_TICKS):
                self._known[pid] = start
