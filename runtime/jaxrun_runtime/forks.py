"""Forks by the program: a child gives up what belongs to its rank alone.

JAX's C++ handler of SIGTERM would swallow that signal in a child, so that multiprocessing's Pool.terminate would wait
for ever; the fault handler would write the child's stacks among the rank's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading

from jaxrun.protocol.env import STACKS_SIGNAL

_STDERR = 2
_mask = threading.local()


def watch_forks() -> None:
    """From now on each child that this process forks gives up the rank's handlers."""
    os.register_at_fork(before=_block_termination, after_in_parent=_restore_mask, after_in_child=_give_up_handlers)


def _block_termination() -> None:
    """A SIGTERM that reaches the child before it has its own handlers must wait for them."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _give_up_handlers() -> None:
    """In the child: SIGTERM ends it unless the program handles that itself, and a crash is shown on its stderr."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # for Python, which does not see JAX's handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.unregister(STACKS_SIGNAL)
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(_STDERR)
    _restore_mask()
