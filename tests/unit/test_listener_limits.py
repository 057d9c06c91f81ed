"""How many strangers a listener bears: connections that prove nothing, descriptors that run out, and a log of them."""

import contextlib
import os
import resource
import select
import socket
import time

import pytest
from listener_thread import (
    LOOPBACK,
    TOKEN,
    answer_to,
    check_admits,
    is_closed,
    open_listener,
    pending_peer,
    read,
    server,
    wait_until,
)

from jaxrun.controller.supervisor.agent_receiver import DroppedPeers
from jaxrun.node.channel import listener as listener_module
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.protocol.codec import encode
from jaxrun.records.event_log.events import PeersDropped

__all__ = ["open_listener", "server"]  # fixtures


class Looped:
    """A listener in a loop that the test turns."""

    def __init__(self, stack, **options):
        self._stack = stack
        self.listener, self.loop = listen_on_tcp([LOOPBACK], TOKEN, everywhere=False), EventLoop()
        self.admitted, self.dropped = [], []
        self.listener.attach(self.loop, 0, self._admit, self.dropped.append, **options)
        stack.callback(self.loop.close)
        stack.callback(self.listener.close)

    def _admit(self, peer):
        self.admitted.append(peer)
        self._stack.callback(peer.connection.close)

    def connect(self, count):
        where = self.listener.addresses[0].ip, self.listener.addresses[0].port
        return [self._stack.enter_context(socket.create_connection(where)) for _ in range(count)]


@pytest.fixture
def make_looped():
    with contextlib.ExitStack() as stack:
        yield lambda **options: Looped(stack, **options)


def challenged(peers):
    """How many of these have got a challenge."""
    return len(select.select(peers, [], [], 0)[0])


def test_of_many_that_prove_nothing_the_oldest_are_dropped(monkeypatch, open_listener):
    monkeypatch.setattr(listener_module, "_MAX_UNPROVEN", 8)
    server = open_listener()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(pending_peer(server))[0] for _ in range(20)]
        wait_until(lambda: len(server.dropped) == 12)
        assert all(is_closed(peer) for peer in peers[:12])
        assert challenged(peers[12:]) == 0  # beyond what they have read, nothing has come, nor the end
        check_admits(server)
    assert server.dropped[0] == "a peer at 127.0.0.1 had proved nothing when others came"


def test_those_that_are_expected_have_places_beside_strangers(monkeypatch, make_looped):
    monkeypatch.setattr(listener_module, "_MAX_UNPROVEN", 8)
    looped = make_looped(expected=12)
    peers = looped.connect(20)
    wait_until(lambda: looped.loop.run_once(0.1) or challenged(peers) == 20)
    assert not looped.dropped
    peers += looped.connect(1)
    wait_until(lambda: looped.loop.run_once(0.1) or looped.dropped)


def test_who_answers_is_heard_before_he_is_dropped_for_others(monkeypatch, make_looped):
    """Though all that happened at once, and the loop has not seen it yet."""
    monkeypatch.setattr(listener_module, "_MAX_UNPROVEN", 1)
    looped = make_looped()
    (agent,) = looped.connect(1)
    looped.loop.run_once(60)
    challenge = read(agent)
    looped.connect(3)  # before the answer, so that the loop sees them first
    agent.sendall(encode(answer_to(challenge)))
    looped.loop.run_once(60)
    assert [peer.rank for peer in looped.admitted] == [0]


def test_one_turn_of_the_loop_accepts_a_bounded_number(monkeypatch, make_looped):
    """Or strangers that come faster than they are accepted would keep a job, or a gang, from all else."""
    monkeypatch.setattr(listener_module, "_ACCEPTED_AT_ONCE", 5)
    looped = make_looped()
    peers = looped.connect(12)
    looped.loop.run_once(60)
    assert challenged(peers) == 5


@pytest.mark.parametrize("left", ["none", "few"])
def test_without_descriptors_nobody_is_accepted_for_a_while_and_nothing_spins(monkeypatch, make_looped, left):
    monkeypatch.setattr(listener_module, "_OUT_OF_DESCRIPTORS_PAUSE_S", 0.3)
    looped = make_looped()
    (stranger,) = looped.connect(1)
    looped.loop.run_once(60)
    with contextlib.ExitStack() as held:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        looped.connect(1)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        if left == "few":
            held.enter_context(monkeypatch.context()).setattr(listener_module, "descriptors_for_peers", lambda: 0)
        else:
            held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.enter_context(open(os.devnull))
        turns, began = 0, time.monotonic()
        while time.monotonic() < began + 0.25:  # the loop blocks, and is free for the job
            looped.loop.run_once(0.05)
            turns += 1
        assert turns <= 8 and len(looped.dropped) == 1 and is_closed(stranger)
    later = looped.connect(1)
    wait_until(lambda: looped.loop.run_once(0.05) or challenged(later))


def test_a_loop_goes_on_after_its_listener_was_closed_for_lack_of_descriptors(monkeypatch, make_looped):
    """As that of a gang does, whose ranks have all come."""
    monkeypatch.setattr(listener_module, "_OUT_OF_DESCRIPTORS_PAUSE_S", 0.0)
    looped = make_looped()
    with monkeypatch.context() as short:
        short.setattr(listener_module, "descriptors_for_peers", lambda: 0)
        looped.connect(1)
        looped.loop.run_once(60)
    looped.listener.close()
    looped.loop.run_once(0)


def test_some_descriptors_are_for_no_peer(monkeypatch):
    for limit, highest in (((1024, 4096), 992), ((64, 4096), 56), ((resource.RLIM_INFINITY,) * 2, 2**31)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: limit)
        assert listener_module.descriptors_for_peers() == highest


def test_the_first_that_was_dropped_is_logged_at_once_and_all_others_of_a_minute_in_one_line():
    lines, now = [], [1000.0]
    peers = DroppedPeers(lines.append, lambda: now[0])
    assert peers.deadline() is None
    peers.add("a peer at 10.0.0.9 is no process of jaxrun: " + "x" * 5000)
    assert peers.deadline() <= now[0]
    peers.log()
    assert peers.deadline() is None
    for number in range(10_000):
        peers.add(f"a peer at 10.0.0.{number % 9} said nothing")
    assert peers.deadline() == 1060.0
    peers.log()
    peers.log()  # nothing more
    one, many = lines
    assert one.count == 1 and len(one.reason) == 200
    assert many == PeersDropped(10_000, "a peer at 10.0.0.0 said nothing")
