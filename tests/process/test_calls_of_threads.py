"""Calls on a gang whose ranks, or callers, act in other threads."""

import select
import socket
import threading

import numpy as np
import pytest
from gang_by_hand import NUMBER, events, gang

from jaxrun.frontends.gang import call as call_module
from jaxrun.frontends.gang.call import GangCall
from jaxrun.protocol.gang_connection import GangMessageReader, GangMessageWriter
from jaxrun.protocol.gang_messages import GangMessageKind, pack

__all__ = ["gang"]  # a fixture


def test_a_sent_value_is_copied_when_it_is_sent(gang):
    """A rank may read late; the caller's arrays are the caller's again at once."""
    with gang.start_call() as call:
        value = np.zeros(2**12)
        for number in range(20):
            value[:] = number
            call.send(value, ranks=[0])
        thread = threading.Thread(target=call.receive, args=(60,))
        thread.start()
        assert gang.ranks[0].receive().load() == "task"
        assert [gang.ranks[0].receive().load().max() for _ in range(20)] == list(range(20))
        gang.ranks[0].returns()
        thread.join()


ARRIVING = {"the user's": (KeyboardInterrupt, "another Ctrl-C"), "another": (KeyError, "Ctrl-C, typed twice,")}


@pytest.mark.parametrize(("error", "key"), ARRIVING.values(), ids=ARRIVING)
def test_a_result_that_is_on_its_way_arrives_before_the_call_ends(gang, monkeypatch, capsys, error, key):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 0.01)
    parts = pack(GangMessageKind.RESULT, NUMBER, bytes(2**20), share=False, note=b"{}").to_parts()
    data, looks = b"".join(piece for part in parts for piece in part), []
    find = GangCall._find_worth_waiting

    def look(*args):
        looks.append(args)
        if len(looks) == 3:
            gang.ranks[0].connection.sendall(data[1000:100_000])
        if len(looks) == 5:
            gang.ranks[0].connection.sendall(data[100_000:100_100])
            threading.Thread(target=gang.ranks[0].connection.sendall, args=(data[100_100:],)).start()
        return find(*args)

    monkeypatch.setattr(GangCall, "_find_worth_waiting", look)
    with pytest.raises(error), gang.start_call() as call:
        gang.ranks[1].returns()
        gang.ranks[0].send(None, GangMessageKind.ENDED)
        gang.ranks[0].connection.sendall(data[:1000])
        events(call, 1)
        raise error
    assert len(looks) >= 5 and not gang.broken and gang.interrupts == 0  # nothing runs that could be interrupted
    assert capsys.readouterr().err == f"jaxrun: waiting for the result of rank 0; {key} stops the gang\n"


@pytest.mark.parametrize("error", [None, KeyError("mine")])
def test_a_first_interrupt_while_the_call_ends_stops_no_gang(gang, monkeypatch, error):
    monkeypatch.setattr(call_module, "INTERRUPT_TIMEOUT_S", 60.0)

    def interrupt():
        gang.on_interrupt = lambda: None
        threading.Thread(target=lambda: [rank.returns() for rank in gang.ranks]).start()
        raise KeyboardInterrupt

    gang.on_interrupt = interrupt
    with pytest.raises(KeyboardInterrupt):
        with gang.start_call():
            if error is not None:
                raise error
    assert (gang.stopped, gang.broken, gang.ended, gang.interrupts) == (False, "", 1, 1)


def test_a_call_that_another_thread_wants_is_left_to_it(gang):
    call = gang.start_call()
    with gang.lock:
        thread = threading.Thread(target=call.results)
        thread.start()
        call.finish()  # comes back, although the ranks still run
        assert call.running and not gang.ended
    for rank in gang.ranks:
        rank.returns()
    thread.join()
    assert gang.ended == 1


@pytest.mark.parametrize("share", [True, False], ids=["shared", "inline"])
def test_a_blocking_socket_waits_for_the_whole_message(share):
    value, received = np.arange(2**18), []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's minimum
        writer, reader = GangMessageWriter(ours, None), GangMessageReader(theirs, None)
        writer.add(pack(GangMessageKind.RESULT, 3, value, share=share))
        thread = threading.Thread(target=lambda: received.append(reader.receive().load()))
        thread.start()
        while not writer.flush():
            select.select([], [ours], [], 60)
        thread.join()
    assert np.array_equal(received[0], value)
