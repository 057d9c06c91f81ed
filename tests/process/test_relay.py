"""A worker's output on its way to the head: what is kept where, what is sent, and when it has to wait."""

import os
import socket
import threading

import pytest
from listener_thread import wait_until

from jaxrun.node.agent.pipes import WINDOW_BYTES, Pipe, Relay, drain
from jaxrun.node.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT, Connection
from jaxrun.protocol.agent_messages import OutputChunk, OutputCredit, SignalWorker, StreamEnded, WorkerExited


@pytest.fixture
def connections():
    """The agent's end of a connection, and the head's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    agent, head = Connection(one, HEAD_TO_AGENT, None), Connection(other, AGENT_TO_HEAD, None)
    yield agent, head
    agent.close()
    head.close()


def receive(connection, enough, other=None):
    """Messages until there are enough; meanwhile the other side sends what waits."""
    arrived = []

    def is_enough():
        arrived.extend(connection.receive())
        if other is not None:
            other.flush()
        return enough(arrived)

    wait_until(is_enough)
    return arrived


def log(directory, rank, stream):
    return (directory / f"rank-{rank:04d}.{stream}").read_bytes()


def test_output_that_is_kept_here_and_shown_goes_both_ways(connections, tmp_path):
    agent, head = connections
    relay = Relay((3,), agent, str(tmp_path), shown=(3,))
    relay.write(3, "out", b"hello\n")
    relay.write(3, "err", b"\xff\n")
    relay.end_stream(3, "out")
    relay.close()
    assert log(tmp_path, 3, "out") == b"hello\n" and log(tmp_path, 3, "err") == b"\xff\n"
    found = receive(head, lambda found: len(found) == 3)
    assert found == [OutputChunk(3, "out", b"hello\n"), OutputChunk(3, "err", b"\xff\n"), StreamEnded(3, "out")]


def test_output_that_is_kept_here_and_not_shown_stays_here(connections, tmp_path):
    agent, head = connections
    relay = Relay((3,), agent, str(tmp_path), shown=())
    relay.write(3, "out", bytes(2 * WINDOW_BYTES))
    relay.end_stream(3, "out")
    assert not relay.congested and agent.unsent_bytes == 0 and head.receive() == []
    relay.close()
    assert len(log(tmp_path, 3, "out")) == 2 * WINDOW_BYTES


@pytest.mark.parametrize("shown", [(3,), ()])
def test_output_that_cannot_be_kept_here_is_sent_even_if_it_is_not_shown(connections, tmp_path, shown):
    agent, head = connections
    relay = Relay((3,), agent, "", shown=shown)
    relay.write(3, "err", b"hello\n")
    assert receive(head, bool) == [OutputChunk(3, "err", b"hello\n")]
    assert list(tmp_path.iterdir()) == []
    relay.close()


def test_output_for_the_log_alone_is_not_sent(connections, tmp_path):
    agent, head = connections
    relay = Relay((0,), agent, str(tmp_path), shown=(0,))
    relay.logs.write_file(0, "err", b"Traceback\n")
    assert log(tmp_path, 0, "err") == b"Traceback\n"
    assert agent.unsent_bytes == 0
    relay.write(0, "err", b"next\n")
    assert receive(head, bool) == [OutputChunk(0, "err", b"next\n")]
    relay.close()


def test_a_directory_that_cannot_be_written_costs_the_logs_and_not_the_job(connections, tmp_path, capsys):
    agent, head = connections
    relay = Relay((0,), agent, str(tmp_path / "gone"), shown=(0,))
    relay.write(0, "out", b"hello\n")
    assert receive(head, bool) == [OutputChunk(0, "out", b"hello\n")]
    assert "the job continues" in capsys.readouterr().err
    relay.close()


def test_a_head_that_consumes_nothing_stops_the_reading_after_a_window_and_credit_resumes_it(connections):
    agent, _ = connections
    relay = Relay((0,), agent, "", shown=(0,))
    piece = bytes(2**16)
    count = 0
    while not relay.congested:
        relay.write(0, "out", piece)
        count += 1
    assert count == WINDOW_BYTES // len(piece) + 1
    relay.add_credit(len(piece))
    assert not relay.congested
    relay.write(0, "out", piece)
    assert relay.congested
    relay.add_credit(count * len(piece))
    for _ in range(count - 1):  # all has been acknowledged, and the window is as wide as before
        relay.write(0, "out", piece)
    assert not relay.congested
    relay.write(0, "out", piece)
    assert relay.congested


def test_a_stuck_head_stops_the_worker_and_not_the_agent(connections):
    """A worker that writes for ever blocks in its pipe; the agent still receives and sends."""
    agent, head = connections
    relay = Relay((0,), agent, "", shown=(0,))
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    total = 4 * WINDOW_BYTES

    def write():
        left = total
        while left:
            left -= os.write(writing, b"x" * min(left, 2**16))
        os.close(writing)

    worker = threading.Thread(target=write, daemon=True)
    worker.start()
    read, ended = 0, False
    while not relay.congested:
        read += drain(Pipe(reading, 0, "out"), relay) or 0
    for _ in range(20):
        assert drain(Pipe(reading, 0, "out"), relay) == 0
    assert relay.congested and worker.is_alive()
    assert WINDOW_BYTES < read < WINDOW_BYTES + 2**19
    head.send(SignalWorker(10))
    assert receive(agent, bool) == [SignalWorker(10)]

    received = bytearray()
    while not ended or agent.unsent_bytes:  # the head consumes again
        for message in head.receive():
            if isinstance(message, OutputChunk):
                received += message.data
                head.send(OutputCredit(len(message.data)))
        for credit in agent.receive():
            relay.add_credit(credit.bytes)
        relay.flush_due()
        ended = ended or drain(Pipe(reading, 0, "out"), relay) is None
    worker.join(60)
    for message in receive(head, lambda found: any(isinstance(one, StreamEnded) for one in found), agent):
        received += getattr(message, "data", b"")
    assert bytes(received) == b"x" * total
    os.close(reading)


def test_the_window_leaves_room_for_messages(connections):
    """What waits in the agent is never much more than a window, so other messages arrive soon."""
    agent, head = connections
    relay = Relay((0,), agent, "", shown=(0,))
    assert relay.flush_due() is None
    while not agent.unsent_bytes:
        relay.write(0, "out", bytes(2**18))
    assert relay.flush_due() is not None
    while not relay.congested:
        relay.write(0, "out", bytes(2**18))
    assert agent.unsent_bytes < 2 * (WINDOW_BYTES + 2**18)
    agent.send(WorkerExited(0, -9))
    found = receive(head, lambda found: WorkerExited(0, -9) in found, agent)
    assert isinstance(found[-1], WorkerExited) and all(isinstance(message, OutputChunk) for message in found[:-1])
    assert relay.flush_due() is None
