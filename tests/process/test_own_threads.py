"""Threads of jaxrun's own in a rank leave the program's signals to the program's threads."""

from __future__ import annotations

import queue
import signal

from jaxrun.protocol.env import FAULT_HANDLER_SIGNAL
from jaxrun_runtime.own_threads import start_thread


def blocked_signals() -> set[int]:
    """Return the signals that the calling thread blocks."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_such_a_thread_blocks_what_the_program_may_handle_and_nothing_that_it_has_caused() -> None:
    before, found = blocked_signals(), queue.Queue[set[int]]()
    start_thread(lambda: found.put(blocked_signals()), "jaxrun-test")
    blocked = found.get(timeout=60)
    assert blocked >= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM}
    assert not blocked & {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, FAULT_HANDLER_SIGNAL}
    assert blocked_signals() == before
