"""A connection never blocks, keeps the order, and delivers all that came before its end; the head's to its agents."""

import errno
import socket
import struct
import time

import pytest
from fakes import Screen
from listener_thread import wait_until
from test_silence import LIMIT, Clock

from jaxrun.controller.supervisor.host_watches import HostWatches
from jaxrun.controller.supervisor.remote_output import RemoteOutput
from jaxrun.controller.supervisor.transport import LinkHandler, Transport
from jaxrun.errors import ProtocolError
from jaxrun.node.agent.pipes import READ_BYTES
from jaxrun.node.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.silence import SilenceLimit
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import (
    AgentSignalled,
    JobInfo,
    OutputChunk,
    OutputCredit,
    Shutdown,
    SignalWorker,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.codec import MAX_FRAME_BYTES, encode
from jaxrun.protocol.worker_messages import Failed, Run

FAILURE = Failed(3, 1.0, "program", 1, "ValueError", "bad record", "Traceback\n")


def pair():
    """Two ends of one connection by TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@pytest.fixture
def ends():
    """The head's connection, and the agent's."""
    one, other = pair()
    head, agent = Connection(one, AGENT_TO_HEAD, None), Connection(other, HEAD_TO_AGENT, None)
    yield head, agent
    head.close()
    agent.close()


@pytest.fixture
def raw():
    """The head's connection, and the bare socket at its other end."""
    one, other = pair()
    head = Connection(one, AGENT_TO_HEAD, None)
    other.settimeout(60)
    yield head, other
    head.close()
    other.close()


def receive(connection, count=1, turn=lambda: time.sleep(0.001)):
    """`count` messages, or all until the connection is lost; meanwhile the other side takes its turns."""
    arrived = []
    wait_until(
        lambda: arrived.extend(connection.receive()) or turn() or len(arrived) >= count or connection.lost_reason
    )
    return arrived


def reset(connection):
    """Close it in the manner of a process that is killed with bytes unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_an_agents_connection_refuses_messages_for_the_head(ends):
    head, agent = ends
    head.send(WorkerSpawned(0, 1))
    with pytest.raises(ProtocolError, match="of no known type"):
        receive(agent)


def test_unsent_messages_wait_in_order_and_sending_never_blocks(ends):
    head, agent = ends
    data = bytes(range(256)) * 2**9
    count = 200
    for number in range(count):
        agent.send(OutputChunk(number, "out", data))
    agent.send(WorkerExited(0, 0))
    assert agent.unsent_bytes > 2**20 and not agent.lost_reason
    chunks = [OutputChunk(number, "out", data) for number in range(count)]
    assert receive(head, count + 1, agent.flush) == [*chunks, WorkerExited(0, 0)]
    assert agent.unsent_bytes == 0 and not head.lost_reason


def test_a_connection_whose_network_is_full_still_receives(ends):
    head, agent = ends
    while not agent.unsent_bytes:
        agent.send(OutputChunk(0, "out", bytes(2**18)))
    head.send(OutputCredit(7))
    assert receive(agent) == [OutputCredit(7)]


def test_the_last_messages_come_before_the_end_and_half_a_message_is_dropped(raw):
    head, peer = raw
    peer.sendall(encode(FAILURE) + encode(WorkerExited(3, 1)) + encode(FAILURE)[:-1])
    peer.close()
    assert receive(head, 3) == [FAILURE, WorkerExited(3, 1)]
    assert head.lost_reason == "the connection to its agent was closed"
    assert head.receive() == []


def test_a_peer_that_is_reset_is_lost_and_nothing_is_sent_to_it(raw):
    head, peer = raw
    reset(peer)
    assert receive(head) == []
    assert head.lost_reason == "the connection to its agent broke (Connection reset by peer)"
    head.send(Run())
    head.flush()
    assert head.unsent_bytes == 0


def test_the_last_messages_of_a_peer_that_vanished_are_received_after_sending_to_it(raw):
    head, peer = raw
    peer.sendall(encode(FAILURE) + encode(WorkerExited(3, 1)))
    peer.close()
    for _ in range(3):
        head.send(OutputCredit(1))
        time.sleep(0.01)
    assert head.receive() == [FAILURE, WorkerExited(3, 1)]


def test_a_gigantic_message_is_refused_and_the_largest_chunk_that_is_read_from_a_pipe_still_fits(ends):
    head, agent = ends
    with pytest.raises(ProtocolError, match=f"is longer than {MAX_FRAME_BYTES}"):
        agent.send(OutputChunk(0, "out", bytes(MAX_FRAME_BYTES)))
    agent.send(OutputChunk(0, "out", b"\xff" * READ_BYTES))
    assert receive(head, 1, agent.flush) == [OutputChunk(0, "out", b"\xff" * READ_BYTES)]


def test_small_messages_go_at_once_and_the_kernel_monitors_the_peer():
    one, other = pair()
    connection = Connection(one, AGENT_TO_HEAD, None)
    try:
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
        assert not one.getblocking()
    finally:
        connection.close()
        other.close()


class Unreachable:
    """A socket whose kernel has given up on the silent peer."""

    def send(self, data):
        raise TimeoutError(110, "Connection timed out")

    recv = send

    def getpeername(self):
        raise OSError(107, "Transport endpoint is not connected")

    def setblocking(self, *args):
        pass

    setsockopt = close = setblocking


@pytest.mark.parametrize("operation", [Connection.receive, lambda connection: connection.send(Shutdown(0))])
def test_the_reason_of_a_lost_connection_is_recorded(operation):
    connection = Connection(Unreachable(), AGENT_TO_HEAD, None)
    operation(connection)
    assert connection.lost_reason == "the connection to its agent broke (Connection timed out)"


# ---- the head's connections to the agents: what the network does not take, acknowledged output, and clocks

LARGE = JobInfo("", "x" * 2**20, ())
TIMES = 32  # more than a socket takes


@pytest.fixture
def loop():
    loop = EventLoop()
    yield loop
    loop.close()


LINK = 1  # the first


@pytest.fixture
def transport(loop, ends):
    """With the head's end of one connection, read in `loop`."""
    made = Transport(loop)
    assert made.add(ends[0]) == LINK
    made.watch(LINK)
    made.serve(LinkHandler(*[lambda *what: None] * 5))
    return made


def test_what_comes_between_two_attempts_waits_for_the_next_and_does_not_wake_the_loop(loop, ends, transport):
    head, agent = ends
    heard = []
    transport.hold()
    agent.send(AgentSignalled(1, 15))
    agent.close()
    assert loop.run_until(lambda: head.lost_reason, 20.0) and LINK in transport
    assert not loop.run_until(lambda: False, 0.05)
    transport.serve(
        LinkHandler(
            on_peer=heard.append,
            on_dropped=heard.append,
            on_messages=lambda link, messages: heard.extend(messages),
            on_lost=lambda link, why, is_silent: heard.append(why),
            on_nonsense=lambda link, error: heard.append(error),
        )
    )
    assert heard == []
    transport.handle_waiting()
    assert heard == [AgentSignalled(1, 15), "the connection to its agent was closed"] and LINK not in transport


def test_a_wait_for_the_end_of_agents_is_over_once_the_last_has_closed_its_connection(loop, ends, transport):
    head, agent = ends
    transport.hold()
    transport.wait_for_end(0.05)
    assert not head.lost_reason
    agent.close()
    transport.wait_for_end(20.0)
    assert head.lost_reason


def send_much(transport):
    for _ in range(TIMES):
        transport.send((LINK,), LARGE)


def test_bytes_that_the_network_does_not_take_are_sent_when_it_does(loop, ends, transport):
    head, agent = ends
    send_much(transport)
    assert head.unsent_bytes
    loop.run_once(0.0)
    assert head.unsent_bytes  # the agent has read nothing
    assert receive(agent, TIMES, lambda: loop.run_once(0.001)) == [LARGE] * TIMES
    assert not head.unsent_bytes
    transport.send((LINK,), OutputCredit(1))
    assert receive(agent, 1) == [OutputCredit(1)]


def test_a_host_that_was_asked_has_answered_also_where_more_is_on_its_way(loop, ends, transport, monkeypatch):
    head, agent = ends
    monkeypatch.setattr(
        Connection, "silence_s", lambda self, *, only_data=False: 60.0
    )  # so only what it acknowledges counts
    watches = HostWatches(transport, LIMIT, Clock())
    watches.ask()
    wait_until(lambda: not watches.unanswered())
    send_much(transport)
    assert head.acknowledged_bytes() < head.queued_bytes and watches.unanswered() == []
    watches.ask()
    assert watches.unanswered() == [LINK]
    assert len(receive(agent, TIMES, lambda: loop.run_once(0.001))) == TIMES
    wait_until(lambda: not watches.unanswered())
    watches.close()


def test_a_host_whose_agent_is_stopped_has_answered_once_anything_is_heard_of_its_kernel(transport, monkeypatch):
    watches = HostWatches(transport, LIMIT, clock := Clock())
    while not transport.connection(LINK).unsent_bytes:
        transport.send((LINK,), LARGE)
    monkeypatch.setattr(Connection, "silence_s", lambda self, *, only_data=False: clock.now - heard_at)
    heard_at = clock.now
    watches.ask()
    clock.now += 1.0
    assert watches.unanswered() == [LINK]
    heard_at = clock.now
    assert watches.unanswered() == []
    watches.close()


def test_beats_keep_a_host_busy_that_reads_and_reach_nobody(ends, transport):
    head, agent = ends
    watches = HostWatches(transport, LIMIT, clock := Clock())
    for _ in range(3):
        sent = head.queued_bytes
        assert watches.check() == ([], "") and head.queued_bytes > sent
        wait_until(lambda: head.acknowledged_bytes() == head.queued_bytes)
        sent = head.queued_bytes
        assert watches.check() == ([], "") and head.queued_bytes == sent  # not yet due
        clock.now += LIMIT.beat_interval
    transport.send((LINK,), OutputCredit(1))
    assert receive(agent) == [OutputCredit(1)]
    while not head.unsent_bytes:  # the agent is stopped
        transport.send((LINK,), LARGE)
    sent = head.queued_bytes
    assert watches.check() == ([], "") and head.queued_bytes == sent
    watches.close()


def test_many_agents_get_beats_less_often(ends, transport):
    head, _ = ends
    watches = HostWatches(transport, SilenceLimit.of_head(2.0, 1001), clock := Clock())
    sent = []
    for _ in range(3):
        watches.check()
        sent.append(head.queued_bytes)
        wait_until(lambda: head.acknowledged_bytes() == head.queued_bytes)
        clock.now += LIMIT.beat_interval
    assert 0 < sent[0] == sent[1] < sent[2]
    watches.close()


def test_the_head_loses_a_silent_host_and_says_where_probes_are_of_no_use(ends, transport, monkeypatch):
    head = ends[0]
    watches = HostWatches(transport, LIMIT, clock := Clock())
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: errno.EINPROGRESS)  # a firewall drops it
    notice = ""
    while not notice:
        lost, notice = watches.check()
        assert lost == []
        clock.now = watches.next_check
    monkeypatch.setattr(Connection, "silence_s", lambda self, *, only_data=False: 8.0)
    assert watches.check() == ([LINK], "") and head.lost_reason == "nothing was heard from its host for 8 s"
    reason = "such a host is lost after 8 s of silence, not after 2 s"
    assert notice == f"jaxrun: 127.0.0.1 answers no probes, as behind a firewall: {reason}"
    watches.close()


def test_an_idle_loop_does_not_wake_up_to_send(loop, ends, transport, monkeypatch):
    _, agent = ends
    send_much(transport)
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


def test_the_last_messages_are_sent_without_the_loop_as_far_as_time_allows(loop, ends, transport):
    head, agent = ends
    send_much(transport)
    transport.flush(0.01)
    assert head.unsent_bytes  # the agent has read nothing
    assert receive(agent, TIMES, lambda: transport.flush(0.01)) == [LARGE] * TIMES
    transport.flush(60.0)  # returns at once


def test_the_head_grants_credit_for_the_output_that_it_consumed(ends, transport):
    _, agent = ends
    screen = Screen()
    output = RemoteOutput(screen, transport)
    output.handle(3, LINK, OutputChunk(3, "out", bytes(2**15)))
    output.acknowledge()
    assert agent.receive() == []
    output.handle(3, LINK, OutputChunk(3, "err", bytes(2**16)))
    screen.congested = True
    output.acknowledge()
    assert agent.receive() == []
    screen.congested = False
    output.acknowledge()
    output.acknowledge()
    assert receive(agent, 1) == [OutputCredit(2**15 + 2**16)]
    assert [(rank, stream, len(data)) for rank, stream, data in screen.written] == [
        (3, "out", 2**15),
        (3, "err", 2**16),
    ]
    output.handle(3, LINK, OutputChunk(3, "out", bytes(2**16)))
    output.forget(LINK)
    output.acknowledge()
    assert agent.receive() == []


TOKEN = auth.new_token()


def test_both_ends_of_a_connection_over_tcp_have_tags_and_messages_pass():
    client, server = pair()
    server.settimeout(60)
    client.setblocking(False)
    accepted, connected = auth.ServerHandshake(server, TOKEN), auth.ClientHandshake(client, TOKEN, 3)
    while not connected.advance():
        accepted.advance()
    head = Connection(server, AGENT_TO_HEAD, accepted.tags)
    agent = Connection(client, HEAD_TO_AGENT, connected.tags)
    for number in range(3):
        head.send(SignalWorker(number))
        assert receive(agent) == [SignalWorker(number)]
        agent.send(WorkerSpawned(3, number))
        assert receive(head) == [WorkerSpawned(3, number)]
    head.close()
    agent.close()


def test_a_host_is_probed_as_soon_as_it_connects_so_that_it_is_lost_in_time_also_at_the_start(
    ends, transport, monkeypatch
):
    head = ends[0]
    watches = HostWatches(transport, LIMIT, clock := Clock())
    watches.begin(head)
    probe, probed = socket.socket.connect_ex, []
    answers = iter([True])  # to the first probe; then it has lost its power
    monkeypatch.setattr(
        socket.socket,
        "connect_ex",
        lambda self, address: probed.append(0) or (probe(self, address) if next(answers, False) else errno.EINPROGRESS),
    )
    monkeypatch.setattr(Connection, "silence_s", lambda self, *, only_data=False: clock.now - begun)
    begun = clock.now
    lost: list[int] = []
    while not lost and clock.now - begun < 10:
        clock.now = watches.next_check
        lost, notice = watches.check()
        assert notice == ""
    assert head.lost_reason == "nothing was heard from its host for 2 s" and clock.now - begun < 3.0
    before = len(probed)
    watches.begin(head)  # as if it came back: nothing is known of it any more
    assert len(probed) > before
    watches.close()
