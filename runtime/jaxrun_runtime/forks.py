"""Forks by the program: a child gives up what belongs to its rank alone, and the head learns where they were made.

JAX's C++ handler of SIGTERM would swallow that signal in a child, so that multiprocessing's Pool.terminate would wait
for ever; the fault handler would write the child's stacks among the rank's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from types import FrameType

from jaxrun.protocol import frames
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.worker_messages import ChildForked
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected

_MAX_PLACES = 20  # that are reported
_STDERR = 2
_SUBPROCESS = "_execute_child"  # the function of `subprocess` that forks if there is a preexec_fn; the child execs


def watch_forks(channel: AgentChannel, rank: int) -> None:
    """From now on each child that this process forks gives up the rank's handlers, and new places are reported."""
    forks = _Forks(channel, rank)
    os.register_at_fork(
        before=forks.block_termination, after_in_parent=forks.report, after_in_child=forks.give_up_handlers
    )


class _Forks:
    def __init__(self, channel: AgentChannel, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._reported: set[str] = set()
        self._mask = threading.local()

    def block_termination(self) -> None:
        """A SIGTERM that reaches the child before it has its own handlers must wait for them."""
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def report(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)
        place = find_fork_place(sys._getframe())
        if place and place not in self._reported and len(self._reported) < _MAX_PLACES:
            self._reported.add(place)
            with contextlib.suppress(AgentDisconnected):
                self._channel.send(ChildForked(self._rank, time.time(), place))

    def give_up_handlers(self) -> None:
        """In the child: SIGTERM ends it unless the program handles that itself, and a crash is shown on its stderr."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # for Python, which does not see JAX's handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.unregister(STACKS_SIGNAL)
        with contextlib.suppress(OSError, ValueError):
            faulthandler.enable(_STDERR)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)


def find_fork_place(frame: FrameType | None) -> str:
    """Where the program forked, "loader.py:12 make_pool"; empty for a subprocess, whose child executes something else.

    That is the innermost frame of the program, or of a package where the program has none.
    """
    packaged = ""
    while frame is not None:
        code = frame.f_code
        if code.co_name == _SUBPROCESS:
            return ""
        place = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        if frames.is_programs(code.co_filename):
            return place
        if frames.is_package(code.co_filename) and not frames.is_ours(code.co_filename):
            packaged = packaged or place
        frame = frame.f_back
    return packaged
