"""The handshake, by which both sides prove that they know the token, and what follows it: whoever stands between two
ends can change, repeat, leave out and reorder nothing.
"""

import pickle
import socket

import pytest
from handshakes import TOKEN, read

from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import HEAD_TO_AGENT
from jaxrun.protocol import auth
from jaxrun.protocol.agent_messages import SignalWorker
from jaxrun.protocol.auth import Challenge, ClientHandshake, ServerHandshake, Welcome, make_proof
from jaxrun.protocol.codec import MessageDecoder, encode
from jaxrun.protocol.gang_connection import GangMessageReader, GangMessageWriter
from jaxrun.protocol.gang_messages import GangMessageKind, pack
from jaxrun.protocol.message_tags import Tags, derive_tags, digest

NONCES = "server's nonce", "client's nonce"
CHANGED = "was changed, repeated or left out"


@pytest.fixture
def pair():
    server, client = socket.socketpair()
    client.setblocking(False)
    with server, client:
        yield server, client


def test_bytes_after_the_handshake_are_left_in_the_socket(pair):
    server, client = pair
    accepted, connected = ServerHandshake(server, TOKEN), ClientHandshake(client, TOKEN, 0)
    assert not connected.advance()
    client.send(b"from the client")
    assert accepted.advance()
    server.send(b"from the server")
    assert connected.advance() and accepted.number == 0
    assert accepted.tags is connected.tags is None  # between processes of one machine there is nobody
    assert (server.recv(100), client.recv(100)) == (b"from the client", b"from the server")


def test_a_server_that_does_not_know_the_token_is_refused(pair):
    server, client = pair
    handshake = ClientHandshake(client, TOKEN, 0)
    server.sendall(encode(Challenge(auth.HANDSHAKE_VERSION, "0" * 64)))
    assert not handshake.advance()
    response = read(server)
    server.sendall(encode(Welcome(response.proof)))  # reflected: the two roles prove different things
    with pytest.raises(ProtocolError, match="does not know this job's token"):
        handshake.advance()
    assert TOKEN not in repr(response)


@pytest.mark.parametrize("nonce", ["", "0" * 63, "0" * 63 + " ", "0" * 65, "G" * 64, "٣" * 64])
def test_a_value_that_is_not_a_nonce_is_not_proved(pair, nonce):
    """A proof joins nonces by spaces, so that another split of the same text would be proved with it."""
    server, client = pair
    server.sendall(encode(Challenge(auth.HANDSHAKE_VERSION, nonce)))
    with pytest.raises(ProtocolError):
        ClientHandshake(client, TOKEN, 0).advance()
    handshake = ServerHandshake(client, TOKEN)
    server.sendall(encode(auth.ChallengeResponse(0, nonce, "0" * 64)))
    with pytest.raises(ProtocolError, match="no valid nonce"):
        handshake.advance()


def test_a_server_cannot_skip_the_challenge(pair):
    server, client = pair
    server.sendall(encode(Welcome(make_proof(TOKEN, "server", 0, "", ""))))
    with pytest.raises(ProtocolError, match="does not know this job's token"):
        ClientHandshake(client, TOKEN, 0).advance()


def test_no_two_handshakes_have_a_nonce_in_common(pair):
    server, client = pair
    nonces = []
    for _ in range(2):
        ServerHandshake(server, TOKEN)
        nonces.append(read(client).nonce)
        ServerHandshake(server, TOKEN)
        assert not ClientHandshake(client, TOKEN, 0).advance()
        nonces.append(read(server).nonce)
    assert len(set(nonces)) == 4 and all(len(nonce) == 64 for nonce in nonces)


def test_a_proof_is_of_one_token_role_number_and_purpose_and_of_both_nonces():
    """Thus it can be neither reflected nor replayed."""
    one = {"token": TOKEN, "role": "client", "number": 3, "server_nonce": "a", "client_nonce": "b"}
    others = {"token": auth.new_token(), "role": "server", "number": 4, "server_nonce": "c", "client_nonce": "c"}
    others |= {"purpose": auth.Purpose.COPY}
    assert len({make_proof(**one), *(make_proof(**one | {name: other}) for name, other in others.items())}) == 7


def test_a_closed_connection_is_distinguished_from_an_unknown_token(pair):
    server, client = pair
    handshake = ClientHandshake(client, TOKEN, 0)
    server.sendall(encode(Challenge(auth.HANDSHAKE_VERSION, "0" * 64))[:-1])
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="closed the connection: it serves another job"):
        handshake.advance()
    client.close()
    with pytest.raises(ProtocolError, match="closed the connection before"):
        ServerHandshake(server, TOKEN).advance()


# ---- the tags of a connection


class Executed(Exception):
    """Code of somebody else has run."""


class Executes:
    def __reduce__(self):
        return _execute, ()


def _execute():
    raise Executed


def both_ends(rank=3, token=TOKEN, nonces=NONCES):
    return [derive_tags(token, rank, *nonces, is_server=side) for side in (True, False)]


def frame(tags, message):
    encoded = encode(message)
    return encoded + tags.next(digest(encoded))


def received_by_agent(raw, tags):
    """What an agent makes of these bytes."""
    return MessageDecoder(HEAD_TO_AGENT, tags=tags.received).feed(raw)


def test_each_direction_has_a_key_of_its_own():
    head, agent = both_ends()
    assert head.sent.next(b"x") != agent.sent.next(b"x")


@pytest.mark.parametrize("position", [0, 4, 10, -17, -16, -1])
def test_a_changed_byte_is_noticed(position):
    head, agent = both_ends()
    raw = bytearray(frame(head.sent, SignalWorker(15)))
    raw[position] ^= 1
    if position == 0:
        raw[position] ^= 1
        raw[3] -= 1  # a shorter length
    with pytest.raises(ProtocolError):
        received_by_agent(bytes(raw), agent)


def test_messages_are_neither_repeated_nor_left_out_nor_swapped():
    for order in ([0, 0], [1], [1, 0]):
        head, agent = both_ends()
        frames = [frame(head.sent, SignalWorker(number)) for number in (1, 2)]
        with pytest.raises(ProtocolError, match=CHANGED):
            received_by_agent(b"".join(frames[index] for index in order), agent)


@pytest.mark.parametrize("other", [{"rank": 4}, {"token": auth.new_token()}, {"nonces": ("an earlier", NONCES[1])}])
def test_a_message_of_another_connection_is_refused(other):
    _, agent = both_ends()
    head, _ = both_ends(**other)
    with pytest.raises(ProtocolError, match=CHANGED):
        received_by_agent(frame(head.sent, SignalWorker(1)), agent)


@pytest.fixture
def gang():
    """gang(key) → a writer and a reader of a gang's messages that are connected; the reader's key is b"key"."""
    one, other = socket.socketpair()
    with one, other:
        yield lambda key=b"key": (GangMessageWriter(one, Tags(key)), GangMessageReader(other, Tags(b"key")), one)


def test_nothing_is_unpickled_that_has_not_proved_where_it_comes_from(gang):
    writer, reader, _ = gang(b"somebody else's")
    writer.add(pack(GangMessageKind.CALL, 1, Executes(), share=False))
    writer.flush()
    with pytest.raises(ProtocolError, match=CHANGED):
        reader.receive().load()
    with pytest.raises(Executed):
        pickle.loads(pickle.dumps(Executes()))


def test_messages_of_a_gang_pass_with_their_arrays(gang):
    writer, reader, _ = gang()
    for value in (b"", bytearray(1000), {"a": [1, 2.5, "x"]}):
        message = pack(GangMessageKind.VALUE, 1, value, share=False, note=b"note")
        writer.add(message, message.digests())
        assert writer.flush()
        received = reader.receive()
        assert (received.load(), received.note) == (value, b"note")


def test_no_memory_is_taken_for_sizes_that_have_not_proved_where_they_come_from(gang):
    """A relay that passes a true handshake on, and then sends a header of its own."""
    _, reader, relay = gang()
    message = pack(GangMessageKind.VALUE, 1, bytes(100), share=False, note=b"note")
    header, sizes, body = (b"".join(part) for part in message.to_parts())
    forged = header[:12] + (2**31).to_bytes(4, "little") + (2**32).to_bytes(8, "little") + header[20:]
    relay.sendall(forged + bytes(16) + sizes + body)
    with pytest.raises(ProtocolError, match=CHANGED):
        reader.receive()


def test_a_message_for_which_there_is_no_memory_is_a_protocol_error(gang):
    _, reader, peer = gang()
    (header,), *_ = pack(GangMessageKind.VALUE, 1, b"", share=False).to_parts()
    huge = header[:16] + (2**63).to_bytes(8, "little") + header[24:]
    peer.sendall(huge + Tags(b"key").next(digest(huge)))
    with pytest.raises(ProtocolError, match="for which there is no memory"):
        reader.receive()
