"""The processes that a rank has started, as /proc shows them: live ones, and ended ones that it has not waited for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jaxrun.node.agent.process_tree import children, is_tracker
from jaxrun.protocol.snapshot_messages import ChildProcess

_STATE, _EXIT_CODE = 0, 49  # among the words of /proc/PID/stat after the name
_MAX_CHILDREN = 16
_MAX_COMMAND_LENGTH = 60  # characters
_FORK_SERVER = "from multiprocessing.forkserver import main"  # its children belong to the program
_SPAWNED = "from multiprocessing.spawn import spawn_main"


def describe_children(pid: int) -> tuple[ChildProcess, ...]:
    """Return the children of a process, also those that it has not waited for, without multiprocessing's helpers."""
    found = sorted(_describe_children(pid, _command(pid)), key=lambda child: child.status is None)
    return tuple(found[:_MAX_CHILDREN])


def _describe_children(pid: int, own: str) -> Iterator[ChildProcess]:
    for child in sorted(children(pid)):
        words = _stat(child)
        if not words:
            continue
        if words[_STATE] in (b"Z", b"X"):
            yield ChildProcess(child, status=os.waitstatus_to_exitcode(int(words[_EXIT_CODE])))
            continue
        command = _command(child)
        if _FORK_SERVER in command and command != own:  # its children have its command line, too
            yield from _describe_children(child, command)
        elif not is_tracker(child):
            is_same = command == own or _SPAWNED in command
            yield ChildProcess(child, "" if is_same else command[:_MAX_COMMAND_LENGTH])


def _stat(pid: int) -> list[bytes]:
    """Return the words after the name; empty for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return []


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""
