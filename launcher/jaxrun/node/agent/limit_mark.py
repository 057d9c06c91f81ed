"""A mark that no process of a job loses by chance: a number of its own as the soft limit on file locks.

Linux has not enforced that limit since 2.4.25, but children inherit it, whatever they do to their environment, session
and descriptors, and /proc shows it.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from jaxrun.node.agent.process_tree import is_living

RLIMIT_LOCKS = 10  # the module has no name for it
_NAME = b"Max file locks"  # in /proc/PID/limits, before the soft limit


def new_limit() -> int:
    """A number that no other job has."""
    return int.from_bytes(os.urandom(8), "big") >> 2


def set_limit(number: int, pid: int = 0) -> None:
    """Mark a process, else this one, and all that it starts from now on; where that is forbidden, nothing is done."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: a hard limit below the number
        hard = resource.prlimit(pid, RLIMIT_LOCKS)[1]
        resource.prlimit(pid, RLIMIT_LOCKS, (number, hard))


def find_limited(number: int) -> Iterator[int]:
    """The living processes with this mark that may be killed: another user's could have copied it."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            with open(f"/proc/{pid}/limits", "rb") as file:
                words = file.read().partition(_NAME)[2].split(maxsplit=1)
            if words[:1] == [b"%d" % number] and is_living(pid):
                yield pid
