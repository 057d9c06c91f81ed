"""Signals that can be read from a descriptor."""

import os
import select
import signal

import pytest

from jaxrun.agent.signals import SignalPipe

USED = (signal.SIGUSR1, signal.SIGTERM)


@pytest.fixture
def usr2():
    """A handler that somebody else has installed."""
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
    yield seen
    signal.signal(signal.SIGUSR2, before)


def _readable(pipe):
    return bool(select.select([pipe], [], [], 0)[0])


def test_signals_arrive_in_order_and_once():
    with SignalPipe(USED) as pipe:
        assert not _readable(pipe) and pipe.receive() == []
        for signum in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), signum)
        assert _readable(pipe)
        assert pipe.receive() == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
        assert pipe.receive() == []


def test_handlers_and_descriptors_are_given_back():
    handlers = [signal.getsignal(signum) for signum in USED]
    descriptors = os.listdir("/proc/self/fd")
    with SignalPipe(USED):
        assert [signal.getsignal(signum) for signum in USED] != handlers
    assert [signal.getsignal(signum) for signum in USED] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_signals_with_handlers_of_others_are_not_reported(usr2):
    with SignalPipe(USED) as pipe:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert pipe.receive() == []
    assert usr2 == [1]


def test_signals_that_the_launcher_was_started_to_ignore_stay_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with SignalPipe(USED) as pipe:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert pipe.receive() == [] and signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_sigchld_is_taken_even_if_it_was_ignored():
    # Whoever ignores it cannot wait for its children: they vanish without a status.
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with SignalPipe((signal.SIGCHLD,)) as pipe:
            pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
            assert pipe.receive() == [signal.SIGCHLD]
    finally:
        signal.signal(signal.SIGCHLD, before)
