"""The processes that a rank has started, as /proc shows them: live ones, and ended ones that it has not waited for."""

from __future__ import annotations

import os
from collections.abc import Iterator

from jaxrun.files import procfs
from jaxrun.node.agent.process_tree import is_tracker
from jaxrun.protocol.query_messages import ChildProcess

_MAX_CHILDREN = 16
_MAX_COMMAND_LENGTH = 60  # characters
_FORK_SERVER = "from multiprocessing.forkserver import main"  # its children belong to the program
_SPAWNED = "from multiprocessing.spawn import spawn_main"


def describe_children(pid: int) -> tuple[ChildProcess, ...]:
    """Return the children of a process, also those that it has not waited for, without multiprocessing's helpers."""
    own = _command(pid)
    found = sorted(_describe_children(pid, own, rank_command=own), key=lambda child: child.status is None)
    return tuple(found[:_MAX_CHILDREN])


def _describe_children(pid: int, own: str, rank_command: str) -> Iterator[ChildProcess]:
    for child in sorted(procfs.children(pid)):
        words = procfs.stat_words(child)
        if not words:
            continue
        if procfs.has_ended(words):
            yield ChildProcess(child, status=os.waitstatus_to_exitcode(int(words[procfs.EXIT_CODE])))
            continue
        command = _command(child)
        if _FORK_SERVER in command and command != own:  # its children have its command line, too
            yield from _describe_children(child, command, rank_command)
        elif not is_tracker(child):
            is_same = command == own or _SPAWNED in command
            is_fork = command == own == rank_command
            yield ChildProcess(child, "" if is_same else command[:_MAX_COMMAND_LENGTH], is_fork=is_fork)


def _command(pid: int) -> str:
    return b" ".join(procfs.command_line(pid)).decode(errors="replace")
