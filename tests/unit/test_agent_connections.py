"""The head's connections to the agents: what the network does not take, acknowledged output, and clocks."""

import socket
import time
from types import SimpleNamespace

import pytest

from jaxrun.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT, Connection
from jaxrun.channel.event_loop import EventLoop
from jaxrun.protocol.agent_messages import JobInfo, OutputChunk, OutputCredit
from jaxrun.supervisor.connections import AgentConnections
from jaxrun.supervisor.remote_output import RemoteOutput

LARGE = JobInfo("", "x" * 2**20, ())
TIMES = 32  # more than a socket takes


@pytest.fixture
def loop():
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def ends(loop):
    """The head's end of a connection, which has a reader in `loop`, and the agent's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    head, agent = Connection(one, AGENT_TO_HEAD, None), Connection(other, HEAD_TO_AGENT, None)
    loop.add_reader(head.fileno(), 0, lambda: None)
    yield head, agent
    head.close()
    agent.close()


def receive(agent, count, turn=lambda: time.sleep(0.001)):
    arrived = []
    deadline = time.monotonic() + 20
    while len(arrived) < count and time.monotonic() < deadline:
        arrived += agent.receive()
        turn()
    return arrived


def test_bytes_that_the_network_does_not_take_are_sent_when_it_does(loop, ends):
    head, agent = ends
    connections = AgentConnections(loop)
    connections.add(0, head)
    for _ in range(TIMES):
        connections.send((0,), LARGE)
    assert head.unsent_bytes
    loop.run_once(0.0)
    assert head.unsent_bytes  # the agent has read nothing
    assert receive(agent, TIMES, lambda: loop.run_once(0.001)) == [LARGE] * TIMES
    assert not head.unsent_bytes
    connections.send((0,), OutputCredit(1))
    assert receive(agent, 1) == [OutputCredit(1)]


def test_a_host_has_answered_a_probe_also_where_more_is_on_its_way(loop, ends):
    head, agent = ends
    connections = AgentConnections(loop)
    connections.add(0, head)
    connections.probe()
    deadline = time.monotonic() + 10
    while connections.unanswered_ranks() and time.monotonic() < deadline:
        time.sleep(0.001)
    for _ in range(TIMES):
        connections.send((0,), LARGE)
    assert head.acknowledged_bytes() < head.queued_bytes and connections.unanswered_ranks() == []
    connections.probe()
    assert connections.unanswered_ranks() == [0]
    assert len(receive(agent, TIMES + 2, lambda: loop.run_once(0.001))) == TIMES + 2


def test_a_silent_host_is_given_up_eight_seconds_after_its_last_word(loop, ends, monkeypatch):
    head, _ = ends
    connections = AgentConnections(loop)
    connections.add(3, head)
    assert not connections.has_unconfirmed
    connections.send((3,), OutputCredit(1))
    assert connections.has_unconfirmed
    deadline = time.monotonic() + 10
    while connections.has_unconfirmed and time.monotonic() < deadline:
        assert connections.give_up_silent() == []
    assert head.silence_s() is None  # all has arrived
    for _ in range(TIMES):
        connections.send((3,), LARGE)
    assert (
        head.silence_s() < 8 and connections.give_up_silent() == []
    )  # its agent reads nothing, but its kernel answers
    monkeypatch.setattr(Connection, "silence_s", lambda self: 8.0)
    assert connections.give_up_silent() == [(3, head)]
    assert head.lost_reason == "nothing was heard from its host for 8 s (Connection timed out)"


def test_an_idle_loop_does_not_wake_up_to_send(loop, ends, monkeypatch):
    head, agent = ends
    connections = AgentConnections(loop)
    connections.add(0, head)
    for _ in range(TIMES):
        connections.send((0,), LARGE)
    flushed = []
    monkeypatch.setattr(Connection, "flush", lambda self: flushed.append(self))
    began = time.monotonic()
    loop.run_once(0.1)
    assert time.monotonic() - began >= 0.09 and not flushed
    monkeypatch.undo()
    receive(agent, TIMES, lambda: loop.run_once(0.001))
    monkeypatch.setattr(Connection, "flush", lambda self: flushed.append(self))
    loop.run_once(0.0)  # all has been sent, and the socket has room
    assert not flushed


def test_the_last_messages_are_sent_without_the_loop_as_far_as_time_allows(loop, ends):
    head, agent = ends
    connections = AgentConnections(loop)
    connections.add(0, head)
    for _ in range(TIMES):
        connections.send((0,), LARGE)
    connections.flush(0.01)
    assert head.unsent_bytes  # the agent has read nothing
    assert receive(agent, TIMES, lambda: connections.flush(0.01)) == [LARGE] * TIMES
    connections.flush(60.0)  # returns at once


def test_the_head_grants_credit_for_the_output_that_it_consumed(loop, ends):
    head, agent = ends
    written = []
    screen = SimpleNamespace(congested=False, write=lambda *chunk: written.append(chunk))
    connections = AgentConnections(loop)
    connections.add(0, head)
    output = RemoteOutput(screen, connections)
    output.handle(0, head, OutputChunk(0, "out", bytes(2**15)))
    output.acknowledge()
    time.sleep(0.01)
    assert agent.receive() == []
    output.handle(0, head, OutputChunk(0, "err", bytes(2**16)))
    screen.congested = True
    output.acknowledge()
    assert agent.receive() == []
    screen.congested = False
    output.acknowledge()
    output.acknowledge()
    assert receive(agent, 1) == [OutputCredit(2**15 + 2**16)]
    assert [(rank, stream, len(data)) for rank, stream, data in written] == [(0, "out", 2**15), (0, "err", 2**16)]
    output.handle(0, head, OutputChunk(0, "out", bytes(2**16)))
    output.forget(head)
    output.acknowledge()
    assert agent.receive() == []
