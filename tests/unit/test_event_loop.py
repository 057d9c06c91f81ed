"""The event loop: readable descriptors in their order, deadlines, work before each wait; signals as a descriptor."""

import math
import os
import select
import signal
import socket
import time

import pytest

from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.channel.event_loop import EventLoop


@pytest.fixture
def pipes():
    """Three readable pipes, as (reading, writing) ends."""
    made = [os.pipe() for _ in range(3)]
    for _, write in made:
        os.write(write, b"x")
    yield made
    for end in {end for pipe in made for end in pipe}:
        os.close(end)


@pytest.fixture
def loop():
    made = EventLoop()
    yield made
    made.close()


def test_ready_descriptors_are_served_in_order(loop, pipes):
    served = []
    for order, (read, _) in zip((2, 0, 1), pipes, strict=True):
        loop.add_reader(read, order, lambda order=order: served.append(order))
    loop.run_once(0)
    assert served == [0, 1, 2]


def test_a_forgotten_descriptor_is_not_served_and_can_be_watched_again(loop, pipes):
    served = []
    read, _ = pipes[0]
    loop.add_reader(read, 0, lambda: served.append("before"))
    loop.remove_reader(read)
    assert not loop.has_reader(read)
    loop.run_once(0)
    loop.add_reader(read, 0, lambda: served.append("again"))
    assert loop.has_reader(read)
    loop.run_once(None)
    assert served == ["again"]


def test_a_closed_loop_watches_nothing(pipes):
    """Between two attempts the job's socket still sends events to those who follow."""
    made, (read, _) = EventLoop(), pipes[0]
    made.add_reader(read, 0, lambda: None)
    made.close()
    made.set_writer(read, lambda: None)
    made.remove_reader(read)
    assert not made.has_reader(read)


def test_forgetting_a_missing_entry_does_nothing(loop, pipes):
    read, _ = pipes[0]
    loop.remove_reader(read)
    loop.remove_reader(-1)  # what a closed socket calls its descriptor
    other = os.dup(read)
    loop.add_reader(other, 0, lambda: None)
    os.close(other)
    loop.remove_reader(other)
    loop.run_once(0)


def test_one_that_serves_may_forget_another(loop, pipes):
    served = []
    (first, _), (second, _), _ = pipes
    loop.add_reader(first, 0, lambda: loop.remove_reader(second))
    loop.add_reader(second, 1, lambda: served.append(second))
    loop.run_once(0)  # it was ready when the wait ended
    loop.run_once(0)
    assert served == [second]


def test_a_timer_is_called_once_its_deadline_has_passed(pipes):
    now, called = [100.0], []
    deadlines = {"late": 101.0, "early": None}
    loop = EventLoop(lambda: now[0])
    for name in deadlines:
        loop.add_timer(lambda name=name: deadlines[name], lambda name=name: called.append(name))
    loop.run_once(0)
    now[0] = 101.0
    loop.run_once(0)
    assert called == ["late"]
    deadlines.update(late=None, early=100.5)  # a deadline that is over before it is set
    loop.run_once()
    assert called == ["late", "early"]
    loop.close()


def test_pollers_are_called_before_each_wait_and_limit_it(loop):
    calls = []
    loop.add_poller(lambda: calls.append("never") or None)
    loop.add_poller(lambda: calls.append("soon") or 0.0)
    loop.run_once()
    loop.run_once()
    assert calls == ["never", "soon"] * 2


def test_a_wait_without_end_is_one_that_the_kernel_takes(loop, pipes):
    served = []
    loop.add_reader(pipes[0][0], 0, lambda: served.append(0))
    loop.run_once(math.inf)
    assert served == [0]


def test_a_descriptor_that_can_be_written_to_calls_back_until_its_writer_is_removed(loop):
    ours, theirs = socket.socketpair()
    called = []
    with ours, theirs:
        loop.set_writer(ours.fileno(), lambda: called.append("no reader"))
        loop.add_reader(ours.fileno(), 0, lambda: called.append("read"))
        loop.run_once(0)
        loop.set_writer(ours.fileno(), lambda: called.append("write"))
        loop.run_once(0)
        loop.set_writer(ours.fileno(), None)
        loop.run_once(0)
        theirs.send(b"x")
        loop.run_once(0)
    assert called == ["write", "read"]


def test_a_closed_part_takes_away_what_it_has_registered_and_no_more(loop, pipes):
    served = []
    (kept, _), (removed, _), _ = pipes
    part = loop.part()
    loop.add_reader(kept, 0, lambda: served.append("loop"))
    part.add_reader(removed, 1, lambda: served.append("part"))
    part.add_poller(lambda: served.append("poller"))
    part.add_timer(lambda: -1.0, lambda: served.append("timer"))
    loop.run_once(0)
    assert served == ["poller", "loop", "part", "timer"]
    served.clear()
    part.close()
    part.close()
    loop.run_once(0)
    assert served == ["loop"] and loop.has_reader(kept) and not loop.has_reader(removed)


def test_a_wait_ends_with_its_condition_or_its_limit_and_serves_the_whole_loop_meanwhile(loop, pipes):
    served, steps = [], []
    (read, _), _, _ = pipes

    def count():
        served.append(1)

    loop.add_reader(read, 0, count)
    assert loop.run_until(lambda: True, 0.0) and served == []
    assert loop.run_until(lambda: len(served) == 3, after_step=lambda: steps.append(len(served)))
    assert served == [1] * 3 and steps == [1, 2, 3]
    loop.remove_reader(read)
    began = time.monotonic()
    assert not loop.run_until(lambda: False, 0.05)
    assert 0.05 <= time.monotonic() - began < 5.0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_asks_for_the_end_ends_a_wait_and_every_signal_stays_for_whoever_reads_next(loop, signum):
    loop.add_timer(lambda: 0.0, lambda: None)  # so that the loop turns
    turns = iter(range(50))
    with SignalPipe(USED) as pipe:
        os.kill(os.getpid(), signum)
        is_met = loop.run_until(lambda: next(turns) == 40, signals=pipe)
        assert is_met == (signum != signal.SIGTERM)
        assert pipe.receive() == [signum] and not loop.has_reader(pipe.fileno())


# ---- signals that can be read from a descriptor


USED = (signal.SIGUSR1, signal.SIGTERM)


@pytest.fixture
def install():
    """install(SIGNAL, HANDLER), until the test ends."""
    before = []
    yield lambda signum, handler: before.append((signum, signal.signal(signum, handler)))
    for signum, handler in before:
        signal.signal(signum, handler)


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


def test_signals_that_others_handle_or_that_were_ignored_at_the_start_are_not_reported(install):
    seen = []
    install(signal.SIGUSR2, lambda *_: seen.append(1))
    install(signal.SIGUSR1, signal.SIG_IGN)
    with SignalPipe(USED) as pipe:
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), signum)
        assert pipe.receive() == [] and signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert seen == [1]
