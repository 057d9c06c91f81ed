"""How a rank and its parent prove to each other over TCP that they know the gang's token."""

import socket
import threading

import pytest

from jaxrun.errors import ProtocolError
from jaxrun.protocol import handshake

REFUSED = "does not know the token"
HUNG_UP = "hung up before it had proved"


@pytest.fixture
def pair():
    parent, rank = socket.socketpair()
    with parent, rank:
        yield parent, rank


def meet(pair, parents, ranks):
    """What became of both sides, which hang up where they do not like the other: an error, or None."""
    ended = {}

    def side(name, function, connection, token):
        try:
            ended[name] = function(connection, token)
        except (OSError, ProtocolError) as error:
            ended[name] = error
            connection.close()

    rank = threading.Thread(target=side, args=("rank", handshake.enter, pair[1], ranks))
    rank.start()
    side("parent", handshake.admit, pair[0], parents)
    rank.join()
    return ended["parent"], ended["rank"]


def test_who_knows_the_token_is_in_and_may_take_his_time_afterwards(pair):
    assert meet(pair, "secret", "secret") == (None, None)
    assert [end.gettimeout() for end in pair] == [None, None]
    pair[0].sendall(b"first byte")
    assert pair[1].recv(100) == b"first byte"


def test_who_has_another_token_is_refused_and_learns_no_proof(pair):
    parent, rank = meet(pair, "secret", "guess")
    assert isinstance(parent, ProtocolError) and REFUSED in str(parent)
    assert isinstance(rank, ProtocolError) and HUNG_UP in str(rank)


def test_a_parent_that_does_not_know_the_token_is_refused(pair):
    parent, rank = pair
    rank.settimeout(None)
    answers = []

    def pretend():
        parent.sendall(bytes(32))
        answers.append(parent.recv(64, socket.MSG_WAITALL))
        parent.sendall(bytes(32))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ProtocolError, match=REFUSED):
        handshake.enter(rank, "secret")
    thread.join()
    assert len(answers[0]) == 64


def test_a_proof_that_is_sent_back_proves_nothing(pair):
    """A stranger who returns what he was sent: the two roles prove different things."""
    parent, rank = pair

    def echo():
        parent.sendall(nonce := bytes(32))
        answer = parent.recv(64, socket.MSG_WAITALL)
        assert nonce not in answer
        parent.sendall(answer[32:])

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(ProtocolError, match=REFUSED):
        handshake.enter(rank, "secret")
    thread.join()


def test_no_two_meetings_are_alike(pair):
    """What one rank proved cannot be shown again by somebody who listened."""
    parent, rank = pair
    seen = []
    for _ in range(2):
        thread = threading.Thread(target=handshake.admit, args=(parent, "secret"))
        thread.start()
        handshake.enter(rank, "secret")
        thread.join()
    for _ in range(2):
        listener = threading.Thread(target=_refused, args=(parent,))
        listener.start()
        seen.append(rank.recv(32, socket.MSG_WAITALL))
        rank.sendall(bytes(64))
        listener.join()
    assert len(set(seen)) == 2


def _refused(connection):
    with pytest.raises(ProtocolError, match=REFUSED):
        handshake.admit(connection, "secret")


@pytest.mark.parametrize("side", [handshake.admit, handshake.enter])
@pytest.mark.parametrize("sent", [b"", b"too short"])
def test_who_hangs_up_is_told_from_who_does_not_know(pair, side, sent):
    pair[1].sendall(sent)
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match=HUNG_UP):
        side(pair[0], "secret")


@pytest.mark.parametrize("side", [handshake.admit, handshake.enter])
def test_who_says_nothing_is_not_waited_for(pair, side, monkeypatch):
    monkeypatch.setattr(handshake, "_PATIENCE", 0.01)
    with pytest.raises(TimeoutError):
        side(pair[0], "secret")
