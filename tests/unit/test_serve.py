"""How a rank finds its gang's parent: each side against the other."""

import os
import select
import socket

import pytest

from jaxrun.errors import ProtocolError
from jaxrun.gang.rank_listener import RankListener
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TOKEN
from jaxrun_runtime import gang_connect


@pytest.fixture(params=[False, True], ids=["on one machine", "over TCP"])
def meeting(request):
    made = RankListener(far=request.param)
    yield made
    made.close()


def connect(meeting, **changes):
    environ = meeting.environ | changes
    return gang_connect.connect(environ[GANG_ADDRESS], environ.get(GANG_TOKEN, ""))


def welcome(meeting):
    """Who has come; waits until somebody has."""
    assert select.select([meeting.arrived], [], [], 20)[0]
    return meeting.welcome()


def test_ranks_come_one_after_the_other(meeting):
    for number in range(3):
        with connect(meeting) as rank, welcome(meeting) as parent:
            rank.sendall(b"%d" % number)
            assert parent.recv(10) == b"%d" % number
            parent.sendall(b"hello")
            assert rank.recv(10) == b"hello"
            assert rank.gettimeout() is None and parent.gettimeout() is None
    assert meeting.welcome() is None and not select.select([meeting.arrived], [], [], 0)[0]


def test_afterwards_nobody_can_come_and_nothing_is_left(meeting):
    where = dict(meeting.environ)
    assert meeting.directory.is_dir() and meeting.directory.stat().st_mode & 0o077 == 0
    meeting.close()
    meeting.close()
    assert not meeting.directory.exists()
    with pytest.raises((OSError, ProtocolError)):
        gang_connect.connect(where[GANG_ADDRESS], where.get(GANG_TOKEN, ""))


def test_over_tcp_a_stranger_is_not_let_in():
    meeting = RankListener(far=True)
    try:
        with pytest.raises(ProtocolError, match="hung up before it had proved"):
            connect(meeting, **{GANG_TOKEN: "guess"})
        with connect(meeting), welcome(meeting):
            assert meeting.accept() is None
    finally:
        meeting.close()


def test_the_next_address_is_tried_where_one_leads_nowhere():
    meeting = RankListener(far=True)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
    kind, _, addresses = meeting.environ[GANG_ADDRESS].partition(":")
    try:
        with connect(meeting, **{GANG_ADDRESS: f"{kind}:{nowhere},{addresses}"}), welcome(meeting):
            pass
    finally:
        meeting.close()


def test_an_address_in_brackets_is_ipv6():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(TimeoutError), pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxrun.protocol.handshake._PATIENCE", 0.01)
            gang_connect.connect(f"tcp:[::1]:{port}", "token")
        listener.accept()[0].close()


@pytest.mark.parametrize("where", ["", "tcp:"])
def test_without_an_address_it_is_told_who_starts_it(where):
    with pytest.raises(ProtocolError, match=r"this program is started by jaxrun\.Gang"):
        gang_connect.connect(where, "token")


def test_a_rank_without_a_parent_ends_with_a_sentence(monkeypatch):
    monkeypatch.setenv(GANG_ADDRESS, "unix:/nowhere/at/all")
    with pytest.raises(SystemExit, match=r"cannot reach the Python process that its gang belongs to.*No such file"):
        gang_connect.main()
    assert GANG_ADDRESS not in os.environ
