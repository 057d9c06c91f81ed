"""The handshake: both sides prove that they know the token, and nobody else gets through."""

import socket

import pytest

from jaxrun.errors import ProtocolError
from jaxrun.protocol import auth
from jaxrun.protocol.auth import Challenge, ClientHandshake, Rejected, ServerHandshake, Welcome, make_proof
from jaxrun.protocol.codec import MessageDecoder, encode, message_types

TOKEN = auth.new_token()


@pytest.fixture
def pair():
    server, client = socket.socketpair()
    client.setblocking(False)
    with server, client:
        yield server, client


def shake_hands(pair, server_token=TOKEN, client_token=TOKEN):
    """Return what became of server and client: True, or the error."""
    sides = [ServerHandshake(pair[0], server_token), ClientHandshake(pair[1], client_token, 3)]
    outcomes = [None, None]
    for _ in range(3):
        for index in (1, 0):
            if outcomes[index] is None:
                try:
                    outcomes[index] = sides[index].advance() or None
                except ProtocolError as error:
                    outcomes[index] = str(error)
                    pair[index].close()
    assert sides[0].rank == (3 if outcomes[0] is True else -1)
    return outcomes


def test_a_peer_that_knows_the_token_is_admitted(pair):
    assert shake_hands(pair) == [True, True]


def test_bytes_after_the_handshake_are_left_in_the_socket(pair):
    server, client = pair
    accepted, connected = ServerHandshake(server, TOKEN), ClientHandshake(client, TOKEN, 0)
    assert not connected.advance()
    client.send(b"from the client")
    assert accepted.advance()
    server.send(b"from the server")
    assert connected.advance()
    assert (server.recv(100), client.recv(100)) == (b"from the client", b"from the server")


def test_another_token_is_refused_and_the_server_proves_nothing(pair):
    assert shake_hands(pair, client_token="guess") == [
        "does not know the job's token",
        "refuses: it does not know the token of this job",
    ]


def receive(connection):
    decoder = MessageDecoder(message_types(auth.ToClient | auth.ToServer))
    while not (found := decoder.feed(connection.recv(decoder.missing_bytes))):
        pass
    return found[0]


def test_a_server_that_does_not_know_the_token_is_refused(pair):
    server, client = pair
    handshake = ClientHandshake(client, TOKEN, 0)
    server.sendall(encode(Challenge(auth.HANDSHAKE_VERSION, "nonce")))
    assert not handshake.advance()
    response = receive(server)
    server.sendall(encode(Welcome(response.proof)))  # reflected: the two roles prove different things
    with pytest.raises(ProtocolError, match="does not know this job's token"):
        handshake.advance()
    assert TOKEN not in repr(response)


def test_a_server_cannot_skip_the_challenge(pair):
    server, client = pair
    server.sendall(encode(Welcome(make_proof(TOKEN, "server", 0, "", ""))))
    with pytest.raises(ProtocolError, match="does not know this job's token"):
        ClientHandshake(client, TOKEN, 0).advance()


def test_no_two_handshakes_are_alike(pair):
    server, client = pair
    challenges = []
    for _ in range(2):
        ServerHandshake(server, TOKEN)
        challenges.append(receive(client).nonce)
    assert len(set(challenges)) == 2 and all(len(nonce) == 64 for nonce in challenges)


def test_a_closed_connection_is_distinguished_from_an_unknown_token(pair):
    server, client = pair
    handshake = ClientHandshake(client, TOKEN, 0)
    server.sendall(encode(Challenge(auth.HANDSHAKE_VERSION, "nonce"))[:-1])
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="hangs up"):
        handshake.advance()
    client.close()
    with pytest.raises(ProtocolError, match="closed the connection before"):
        ServerHandshake(server, TOKEN).advance()


def test_a_reason_to_refuse_is_passed_on(pair):
    server, client = pair
    server.sendall(encode(Rejected("it is full")))
    with pytest.raises(ProtocolError, match="refuses: it is full"):
        ClientHandshake(client, TOKEN, 0).advance()
