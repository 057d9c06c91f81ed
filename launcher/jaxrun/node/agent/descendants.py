"""The descendants of a process, remembered: after it has been killed they are nobody's, and nothing else may tell them.

A process that has begun a session of its own and cleared its environment bears no sign of its job. While its ancestor
lives, a subreaper, it is found by descent.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from jaxrun.node.agent.process_tree import children, descendants, is_tracker

_START_TIME = 19  # among the words of /proc/PID/stat after the name


class Descendants:
    """The descendants of `root` but for the process `spare`, as they were last seen, by process id and start time."""

    def __init__(self, root: int, spare: int) -> None:
        self._root = root
        self._spare = spare
        self._known: dict[int, int] = {}

    def update(self) -> None:
        """Add those that are new, and forget those that have ended. May come while `root` is dying: none is lost."""
        self._known = {pid: start for pid, start in self._known.items() if _start_time(pid) == start}
        self._add(descendants(self._root))

    def add_children(self) -> None:
        """Add the children of `root` alone: its own, and orphans. Takes a fraction of the time of `update`."""
        self._add(children(self._root))

    def living(self) -> set[int]:
        """Those that have not ended."""
        return {pid for pid, start in self._known.items() if _start_time(pid) == start}

    def freeze(self, find_others: Callable[[], set[int]]) -> None:
        """Stop all but resource trackers, and add what they have started since: none can slip away or end meanwhile.

        So with what `find_others` returns, too.
        """
        stopped: set[int] = set()
        while todo := (self.living() | find_others()) - stopped:
            for pid in todo:
                if not is_tracker(pid):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGSTOP)
            stopped |= todo
            self._add(todo.union(*map(children, todo)))

    def _add(self, pids: set[int]) -> None:
        for pid in pids - self._known.keys() - {self._spare}:
            if start := _start_time(pid):
                self._known[pid] = start


def _start_time(pid: int) -> int:
    """When the process was started, in ticks since the machine was; 0 for one that has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
        return 0 if words[0] in (b"Z", b"X") else int(words[_START_TIME])
    return 0
