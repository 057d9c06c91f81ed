"""Reports how the program handles SIGINT and SIGTERM, and makes SIGTERM end the children that a rank forks.

A program handles SIGTERM if it has its own Python handler, or if it asks JAX whether the job is being preempted
(multihost_utils.reached_preemption_sync_point, which orbax calls).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from jaxrun.protocol.worker_messages import SignalHandlers
from jaxrun_runtime import stack_dumps
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.import_watch import call_after_import

_STDERR = 2
_mask = threading.local()
_set_handler = signal.signal  # without the reports below


def report_signal_handlers(channel: AgentChannel, rank: int) -> None:
    """Send SignalHandlers each time that the program changes how it handles SIGINT or SIGTERM."""
    reporter = _Reporter(channel, rank)
    reporter.watch_python_handlers()
    call_after_import("jax.experimental.multihost_utils", reporter.watch_preemption_sync)
    reporter.report()


class _Reporter:
    def __init__(self, channel: AgentChannel, rank: int) -> None:
        self._asks_jax = False  # whether the job is being preempted
        self._channel = channel
        self._rank = rank
        self._reported = SignalHandlers(rank, interrupt=False, termination=False)

    def watch_python_handlers(self) -> None:
        original: Callable[..., Any] = signal.signal

        @functools.wraps(original)
        def set_handler(signalnum: int, handler: Any) -> Any:
            before = original(signalnum, handler)
            if signalnum in (signal.SIGINT, signal.SIGTERM):
                self.report()
            return before

        signal.signal = set_handler

    def watch_preemption_sync(self, module: Any) -> None:
        original: Callable[..., Any] = module.reached_preemption_sync_point

        @functools.wraps(original)
        def reached(*args: Any, **kwargs: Any) -> Any:
            if not self._asks_jax:
                self._asks_jax = True
                self.report()
            return original(*args, **kwargs)

        module.reached_preemption_sync_point = reached

    def report(self) -> None:
        """Send a report if anything has changed since the last one."""
        current = SignalHandlers(
            self._rank,
            interrupt=_is_programs(signal.SIGINT),
            termination=self._asks_jax or _is_programs(signal.SIGTERM),
            own_termination=_is_programs(signal.SIGTERM),
        )
        if current != self._reported:
            self._reported = current
            with contextlib.suppress(AgentDisconnected):  # as in a process that the program has forked
                self._channel.send(current)


def _is_programs(signum: int) -> bool:
    handler = signal.getsignal(signum)
    return callable(handler) and (signum != signal.SIGINT or handler is not signal.default_int_handler)


def ignore_programs_signals() -> None:
    """Ignore each signal for which the program has a handler in Python. Call it in the main thread, after the program.

    Python gives up all handlers after the exit handlers, too. A handler that raises would break off the worker's end.
    """
    for signum in signal.valid_signals():
        if _is_programs(signum):
            _set_handler(signum, signal.SIG_IGN)


# ---- forks by the program


def watch_forks() -> None:
    """Make each child that this process forks from now on give up the rank's handlers.

    In a child, JAX's C++ handler would swallow SIGTERM, so that multiprocessing's Pool.terminate would wait forever.
    The fault handler would write the child's stacks into the file of the rank's stacks.
    """
    os.register_at_fork(before=_block_termination, after_in_parent=_restore_mask, after_in_child=_give_up_handlers)


def _block_termination() -> None:
    """Block SIGTERM until the child has its own handlers."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _give_up_handlers() -> None:
    """Let SIGTERM end the child, unless the program handles SIGTERM, and show a crash on its stderr."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Python does not see JAX's handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stack_dumps.give_up_in_fork()
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(_STDERR)
    _restore_mask()
