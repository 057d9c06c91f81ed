"""Gang messages arrive unchanged, whole or in pieces, with shared memory or without."""

import contextlib
import gc
import os
import resource
import socket
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import ProtocolError
from jaxrun.protocol.gang_connection import GangMessageReader, GangMessageWriter
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, pack
from jaxrun.protocol.payload import make_memory_file

HEAVY = 2**18  # bytes from which arrays go into shared memory


def frame(message):
    """Its bytes on the way."""
    return b"".join(piece for part in message.to_parts() for piece in part)


class OneWay:
    """One direction of a connection; as a parent uses it, it never blocks."""

    def __init__(self, ours, theirs):
        self.outbox, self.inbox = GangMessageWriter(ours, None), GangMessageReader(theirs, None)

    def transfer(self, *messages):
        """Sends all of them, and receives as many."""
        for message in messages:
            self.outbox.add(message)
        received = []
        while len(received) < len(messages):
            self.outbox.flush()
            try:
                received.append(self.inbox.receive())
            except BlockingIOError:
                continue
        assert self.outbox.flush()
        return received

    def value(self, value, *, share):
        (received,) = self.transfer(pack(GangMessageKind.VALUE, 1, value, share=share))
        return received.load()


@contextlib.contextmanager
def sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in ours, theirs:
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's minimum
        yield ours, theirs


@pytest.fixture
def pair():
    with sockets() as ends:
        yield ends


@pytest.fixture
def one_way(pair):
    return OneWay(*pair)


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


arrays = st.builds(
    lambda size, dtype: np.arange(size).astype(dtype),
    st.sampled_from([0, 1, 63, 64, 65, 5000, HEAVY]),
    st.sampled_from(["u1", "f4", "c16"]),
)
values = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
messages = st.tuples(
    st.sampled_from(list(GangMessageKind)), st.integers(0, 2**32 - 1), values, st.booleans(), st.binary(max_size=9)
)


@given(st.lists(messages, max_size=4))
def test_messages_arrive_unchanged_and_in_order(sent):
    with sockets() as (ours, theirs):
        packed = [pack(kind, number, value, share=share, note=note) for kind, number, value, share, note in sent]
        received = OneWay(ours, theirs).transfer(*packed)
    for message, (kind, number, value, _, note) in zip(received, sent, strict=True):
        assert (message.kind, message.call, message.note) == (kind, number, note)
        assert same(message.load(), value)


def test_of_large_arrays_only_descriptors_are_sent_on_one_machine():
    assert len(frame(pack(GangMessageKind.CALL, 1, np.zeros(HEAVY), share=True))) < 1000
    assert len(frame(pack(GangMessageKind.CALL, 1, np.zeros(HEAVY), share=False))) > 8 * HEAVY


def test_a_message_may_arrive_byte_by_byte(pair):
    ours, theirs = pair
    inbox = GangMessageReader(theirs, None)
    *first, last = frame(pack(GangMessageKind.VALUE, 7, {"a": np.arange(9)}, share=False, note=b"note"))
    for byte in first:
        ours.send(bytes([byte]))
        with pytest.raises(BlockingIOError):
            inbox.receive()
    ours.send(bytes([last]))
    received = inbox.receive()
    assert received.note == b"note" and np.array_equal(received.load()["a"], np.arange(9))


@pytest.mark.parametrize("count", [9, HEAVY], ids=["small", "large"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "inline"])
def test_arrays_arrive_writable_and_each_receiver_has_its_own(one_way, share, count):
    original = np.arange(count)
    message = pack(GangMessageKind.CALL, 1, original, share=share)
    one, other = (received.load() for received in one_way.transfer(message, message))
    one[:] = -1
    other[0] = 5
    assert original[0] == 0 and (one == -1).all() and other[0] == 5 and other[1] == 1


def test_a_memory_file_may_be_written_again(one_way):
    file = make_memory_file()
    for value in (np.arange(HEAVY), np.arange(HEAVY // 2), np.ones(2 * HEAVY)):
        message = pack(GangMessageKind.VALUE, 1, value, share=True, file=file)
        assert message.payload.file is file
        assert same(one_way.transfer(message)[0].load(), value)


def shared_memory():
    """The links of this process's descriptors of shared memory, which has no name in any file system."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the directory itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.startswith("/memfd:")]


def test_descriptors_are_closed_with_the_values(one_way):
    gc.collect()
    before = len(shared_memory())
    values = [one_way.transfer(pack(GangMessageKind.VALUE, 1, np.zeros(HEAVY), share=True)) for _ in range(3)]
    assert len(shared_memory()) == before + 3
    del values
    gc.collect()
    assert len(shared_memory()) == before


def test_a_message_with_copied_buffers_does_not_change_with_the_senders_arrays(one_way):
    value = np.zeros(HEAVY // 16)
    one_way.outbox.add(pack(GangMessageKind.VALUE, 1, value, share=True).with_copied_buffers())
    assert not one_way.outbox.flush()
    value[:] = 1
    sent = [pack(GangMessageKind.VALUE, 1, one, share=True) for one in (value, np.zeros(HEAVY))]
    first, second = one_way.transfer(*sent)
    assert (first.load() == 0).all() and (second.load() == 1).all()


def test_an_object_is_first_offered_to_reduce(one_way):
    def reduce(value):
        return (str, ("was complex",)) if isinstance(value, complex) else NotImplemented

    message = pack(GangMessageKind.RESULT, 1, [1j, 2, len], share=True, reduce=reduce)
    (received,) = one_way.transfer(message)
    assert received.load() == ["was complex", 2, len]


class Unloadable:
    """A value whose unpickling raises."""

    def __reduce__(self):
        return int, ("x",)


def test_an_error_of_unpickling_is_raised_and_a_message_may_be_empty(one_way):
    bad, empty = one_way.transfer(
        pack(GangMessageKind.VALUE, 1, Unloadable(), share=True), GangMessage(GangMessageKind.END_CALL, 12)
    )
    with pytest.raises(ValueError, match="invalid literal"):
        bad.load()
    assert (empty.kind, empty.call, bytes(empty.payload.body)) == (GangMessageKind.END_CALL, 12, b"")


@pytest.mark.parametrize("sent", [0, 10, 45], ids=["nothing", "part of the header", "part of the body"])
def test_the_end_of_the_stream_raises_eof_error(pair, sent):
    ours, theirs = pair
    ours.send(frame(pack(GangMessageKind.VALUE, 1, "x" * 1000, share=False))[:sent])
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        GangMessageReader(theirs, None).receive()


def _head(magic=b"JXP1", kind=2, buffers=0):
    return struct.pack("<4sBBxxIIQIxxxx", magic, kind, 0, 0, 0, 0, buffers)


INVALID_MESSAGES = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another version": _head(magic=b"JXP9"),
    "no kind": _head(kind=0),
    "an unknown kind": _head(kind=200),
    "buffers without end": _head(buffers=2**31),
}


@pytest.mark.parametrize("data", INVALID_MESSAGES.values(), ids=INVALID_MESSAGES)
def test_an_invalid_message_is_refused(pair, data):
    ours, theirs = pair
    assert len(data) >= len(_head())
    ours.send(data)
    with pytest.raises(ProtocolError, match="not a message of this version"):
        GangMessageReader(theirs, None).receive()


def test_descriptors_that_were_lost_in_transit_are_reported(pair):
    """A process that may open no more files gets the message, but not its descriptors."""
    ours, theirs = pair
    message = pack(GangMessageKind.VALUE, 1, np.zeros(HEAVY), share=True)
    outbox, inbox = GangMessageWriter(ours, None), GangMessageReader(theirs, None)
    outbox.add(message)
    outbox.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    holes = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                holes.append(os.dup(ours.fileno()))
        with pytest.raises(ProtocolError, match="too many files are open"):
            inbox.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            os.close(hole)
