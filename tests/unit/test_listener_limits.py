"""How many strangers a listener bears: connections that prove nothing, and descriptors that run out."""

import contextlib
import os
import resource
import socket
import time

import pytest
from listener_thread import (
    LOOPBACK,
    TOKEN,
    answer_to,
    check_admits,
    is_closed,
    open_listeners,
    pending_peer,
    read,
    wait_until,
)

from jaxrun.channel import listener as listener_module
from jaxrun.channel.event_loop import EventLoop
from jaxrun.channel.listener import listen_on_tcp
from jaxrun.protocol.codec import encode


@pytest.fixture
def open_listener():
    """open_listener(*INTERFACES) serves a listener until the test ends."""
    with open_listeners() as start:
        yield start


@pytest.fixture
def server(open_listener):
    return open_listener()


def test_hundreds_of_silent_peers_delay_no_agent(server):
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((server.address.ip, server.address.port)))
        check_admits(server)


def test_of_many_that_prove_nothing_the_oldest_are_dropped(monkeypatch, open_listener):
    monkeypatch.setattr(listener_module, "_MAX_UNPROVEN", 8)
    server = open_listener()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(pending_peer(server))[0] for _ in range(20)]
        wait_until(lambda: len(server.dropped) == 12)
        assert all(is_closed(peer) for peer in peers[:12])
        assert len(server.listener._pending) == 8
        check_admits(server)
    assert server.dropped[0] == "a peer at 127.0.0.1 had proved nothing when others came"


def test_those_that_are_expected_have_places_beside_strangers(monkeypatch):
    monkeypatch.setattr(listener_module, "_MAX_UNPROVEN", 8)
    listener, loop = listen_on_tcp([LOOPBACK], TOKEN, everywhere=False), EventLoop()
    dropped = []
    listener.attach(loop, 0, lambda peer: None, dropped.append, expected=12)
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(listener.close)
        for _ in range(20):
            stack.enter_context(socket.create_connection((listener.addresses[0].ip, listener.addresses[0].port)))
        deadline = time.monotonic() + 5
        while len(listener._pending) < 20:
            assert time.monotonic() < deadline and not dropped
            loop.run_once(0.1)


def test_who_answers_is_heard_before_he_is_dropped_for_others(monkeypatch):
    """Though all that happened at once, and the loop has not seen it yet."""
    monkeypatch.setattr(listener_module, "_MAX_UNPROVEN", 1)
    listener, loop = listen_on_tcp([LOOPBACK], TOKEN, everywhere=False), EventLoop()
    admitted = []
    listener.attach(loop, 0, admitted.append)
    where = listener.addresses[0].ip, listener.addresses[0].port
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(listener.close)
        agent = stack.enter_context(socket.create_connection(where))
        loop.run_once(5)
        agent.sendall(encode(answer_to(read(agent))))
        for _ in range(3):
            stack.enter_context(socket.create_connection(where))
        listener._accept(listener.sockets[0])
        assert [peer.rank for peer in admitted] == [0]
        stack.enter_context(admitted[0].connection)


def test_one_turn_of_the_loop_accepts_a_bounded_number(monkeypatch):
    """Or strangers that come faster than they are accepted would keep a job, or a gang, from all else."""
    monkeypatch.setattr(listener_module, "_ACCEPTED_AT_ONCE", 5)
    listener, loop = listen_on_tcp([LOOPBACK], TOKEN, everywhere=False), EventLoop()
    listener.attach(loop, 0, lambda peer: None)
    where = listener.addresses[0].ip, listener.addresses[0].port
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(listener.close)
        for _ in range(12):
            stack.enter_context(socket.create_connection(where))
        listener._accept(listener.sockets[0])
        assert len(listener._pending) == 5


@pytest.mark.parametrize("short", ["none is left", "few are left"])
def test_without_descriptors_nobody_is_accepted_for_a_while_and_nothing_spins(monkeypatch, short):
    monkeypatch.setattr(listener_module, "_OUT_OF_DESCRIPTORS_PAUSE_S", 0.3)
    listener, loop = listen_on_tcp([LOOPBACK], TOKEN, everywhere=False), EventLoop()
    dropped, admitted = [], []
    listener.attach(loop, 0, admitted.append, dropped.append)
    where = listener.addresses[0].ip, listener.addresses[0].port
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(listener.close)
        stranger, other = (stack.enter_context(socket.socket()) for _ in range(2))
        stranger.connect(where)
        loop.run_once(5)
        held = stack.enter_context(contextlib.ExitStack())
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        other.connect(where)
        if short == "few are left":
            monkeypatch.setattr(listener_module, "_descriptors_for_peers", lambda: 0)
        else:
            held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.enter_context(open(os.devnull))
        turns, began = 0, time.monotonic()
        while time.monotonic() < began + 0.25:  # the loop blocks, and is free for the job
            loop.run_once(0.05)
            turns += 1
        assert turns <= 8 and len(dropped) == 1 and is_closed(stranger)
        held.close()
        monkeypatch.undo()
        later = stack.enter_context(socket.create_connection(where))
        later.setblocking(False)
        challenges = []
        deadline = time.monotonic() + 30
        while not challenges:
            assert time.monotonic() < deadline
            loop.run_once(0.05)
            with contextlib.suppress(BlockingIOError):
                challenges.append(read(later))


def test_some_descriptors_are_for_no_peer(monkeypatch):
    for limit, highest in (((1024, 4096), 992), ((64, 4096), 56), ((resource.RLIM_INFINITY,) * 2, 2**31)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: limit)
        assert listener_module._descriptors_for_peers() == highest
