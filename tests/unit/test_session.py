"""What follows the handshake: whoever stands between two ends can change, repeat, leave out and reorder nothing."""

import pickle
import socket

import pytest

from jaxrun.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT, Connection
from jaxrun.errors import ProtocolError
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import SignalWorker, WorkerSpawned
from jaxrun.protocol.codec import MessageDecoder, encode
from jaxrun.protocol.gang_messages import GangMessageKind, GangMessageReader, GangMessageWriter, pack
from jaxrun.protocol.session import Session, Tags, derive_session, digest

TOKEN = auth.new_token()
NONCES = "server's nonce", "client's nonce"


class Executed(Exception):
    """Code of somebody else has run."""


class Executes:
    def __reduce__(self):
        return _execute, ()


def _execute():
    raise Executed


@pytest.fixture
def tcp():
    """The two ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server, _ = listening.accept()
    client.settimeout(10)
    server.settimeout(10)
    with client, server:
        yield server, client


def sessions(rank=3, token=TOKEN, nonces=NONCES):
    return [derive_session(token, rank, *nonces, is_server=side) for side in (True, False)]


def frame(tags, message):
    encoded = encode(message)
    return encoded + tags.next(digest(encoded))


def received_by_agent(raw, session):
    """What an agent makes of these bytes."""
    return MessageDecoder(HEAD_TO_AGENT, tags=session.received).feed(raw)


def test_both_ends_of_a_connection_over_tcp_have_the_session_and_messages_pass(tcp):
    server, client = tcp
    client.setblocking(False)
    accepted, connected = auth.ServerHandshake(server, TOKEN), auth.ClientHandshake(client, TOKEN, 3)
    while not connected.advance():
        accepted.advance()
    head = Connection(server, AGENT_TO_HEAD, accepted.session)
    agent = Connection(client, HEAD_TO_AGENT, connected.session)
    for number in range(3):
        head.send(SignalWorker(number))
        assert agent.receive() == [SignalWorker(number)]
        agent.send(WorkerSpawned(3, number))
        assert head.receive() == [WorkerSpawned(3, number)]


def test_between_processes_of_one_machine_there_is_nobody_and_so_no_session():
    server, client = socket.socketpair()
    with server, client:
        client.setblocking(False)
        accepted, connected = auth.ServerHandshake(server, TOKEN), auth.ClientHandshake(client, TOKEN, 3)
        while not connected.advance():
            accepted.advance()
        assert accepted.session is connected.session is None


def test_what_the_head_sends_is_accepted_as_it_is():
    head, agent = sessions()
    raw = frame(head.sent, SignalWorker(1)) + frame(head.sent, SignalWorker(2))
    assert received_by_agent(raw, agent) == [SignalWorker(1), SignalWorker(2)]


@pytest.mark.parametrize("position", [0, 4, 10, -17, -16, -1])
def test_a_changed_byte_is_noticed(position):
    head, agent = sessions()
    raw = bytearray(frame(head.sent, SignalWorker(15)))
    raw[position] ^= 1
    if position == 0:
        raw[position] ^= 1
        raw[3] -= 1  # a shorter length
    with pytest.raises(ProtocolError):
        received_by_agent(bytes(raw), agent)


def test_messages_are_neither_repeated_nor_left_out_nor_swapped():
    for order in ([0, 0], [1], [1, 0]):
        head, agent = sessions()
        frames = [frame(head.sent, SignalWorker(number)) for number in (1, 2)]
        with pytest.raises(ProtocolError, match="was changed, repeated or left out"):
            received_by_agent(b"".join(frames[index] for index in order), agent)


def test_a_message_does_not_come_back_to_its_sender():
    _, agent = sessions()
    raw = frame(agent.sent, SignalWorker(1))
    with pytest.raises(ProtocolError, match="was changed, repeated or left out"):
        received_by_agent(raw, agent)


@pytest.mark.parametrize("other", [{"rank": 4}, {"token": auth.new_token()}, {"nonces": ("an earlier", NONCES[1])}])
def test_a_message_of_another_connection_is_none_of_this_one(other):
    _, agent = sessions()
    head, _ = sessions(**other)
    with pytest.raises(ProtocolError, match="was changed, repeated or left out"):
        received_by_agent(frame(head.sent, SignalWorker(1)), agent)


def test_nothing_is_unpickled_that_has_not_proved_where_it_comes_from():
    one, other = socket.socketpair()
    with one, other:
        writer = GangMessageWriter(one, Tags(b"somebody else's key"))
        reader = GangMessageReader(other, Tags(b"the key of the gang"))
        writer.add(pack(GangMessageKind.CALL, 1, Executes(), share=False))
        writer.flush()
        with pytest.raises(ProtocolError, match="was changed, repeated or left out"):
            reader.receive().load()
    with pytest.raises(Executed):
        pickle.loads(pickle.dumps(Executes()))


def test_messages_of_a_gang_pass_with_their_arrays():
    one, other = socket.socketpair()
    with one, other:
        writer, reader = GangMessageWriter(one, Tags(b"key")), GangMessageReader(other, Tags(b"key"))
        for value in (b"", bytearray(1000), {"a": [1, 2.5, "x"]}):
            message = pack(GangMessageKind.VALUE, 1, value, share=False, note=b"note")
            writer.add(message, message.digest())
            assert writer.flush()
            received = reader.receive()
            assert (received.load(), received.note) == (value, b"note")


def test_both_ends_derive_the_same_keys():
    head, agent = sessions()
    assert isinstance(head, Session)
    assert head.sent.next(b"x") == agent.received.next(b"x")
    assert agent.sent.next(b"x") == head.received.next(b"x")
    assert head.sent.next(b"x") != agent.sent.next(b"x")
