"""Parcels over a socket pair: what is put in comes out, whole or in pieces, with shared memory or without."""

import gc
import os
import pickle
import socket
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import ProtocolError
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, GangMessageReader, GangMessageWriter, pack
from jaxrun.protocol.payload import SharedBuffer

HEAVY = 2**18  # bytes from which arrays go into shared memory


class Way:
    """One direction of a connection; as a parent uses it, it never blocks."""

    def __init__(self, ours, theirs):
        self.outbox, self.inbox = GangMessageWriter(ours), GangMessageReader(theirs)

    def carry(self, *parcels):
        """Put all of them, and take as many."""
        for parcel in parcels:
            self.outbox.add(parcel)
        came = []
        while len(came) < len(parcels):
            self.outbox.flush()
            try:
                came.append(self.inbox.receive())
            except BlockingIOError:
                continue
        assert self.outbox.flush()
        return came

    def value(self, value, *, share):
        (came,) = self.carry(pack(GangMessageKind.VALUE, 1, value, share=share))
        return came.load()


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in ours, theirs:
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least
        yield ours, theirs


@pytest.fixture
def way(pair):
    return Way(*pair)


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
def test_what_is_put_in_comes_out_in_order(sent):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        parcels = [pack(kind, number, value, share=share, note=note) for kind, number, value, share, note in sent]
        came = Way(ours, theirs).carry(*parcels)
    for parcel, (kind, number, value, _, note) in zip(came, sent, strict=True):
        assert (parcel.kind, parcel.call, parcel.note) == (kind, number, note)
        assert same(parcel.load(), value)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "inline"])
def test_a_blocking_socket_waits_for_the_whole(share):
    ours, theirs = socket.socketpair()
    value = np.arange(HEAVY)
    with ours, theirs:
        outbox = GangMessageWriter(ours)
        outbox.add(pack(GangMessageKind.RESULT, 3, value, share=share))
        sender = threading.Thread(target=outbox.flush)
        sender.start()
        came = GangMessageReader(theirs).receive().load()
        sender.join()
    assert np.array_equal(came, value)


def test_it_may_arrive_byte_by_byte(pair):
    ours, theirs = pair
    inbox = GangMessageReader(theirs)
    *first, last = b"".join(pack(GangMessageKind.VALUE, 7, {"a": np.arange(9)}, share=False, note=b"note").to_frame())
    for byte in first:
        ours.send(bytes([byte]))
        with pytest.raises(BlockingIOError):
            inbox.receive()
    ours.send(bytes([last]))
    came = inbox.receive()
    assert came.note == b"note" and np.array_equal(came.load()["a"], np.arange(9))


@pytest.mark.parametrize("count", [9, HEAVY], ids=["small", "large"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "inline"])
def test_arrays_arrive_writable_and_each_receiver_has_its_own(share, count):
    original = np.arange(count)
    parcel = pack(GangMessageKind.CALL, 1, original, share=share)
    came = []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            came += [received.load() for received in Way(ours, theirs).carry(parcel)]
    one, other = came
    one[:] = -1
    other[0] = 5
    assert original[0] == 0 and (one == -1).all() and other[0] == 5 and other[1] == 1


def test_large_arrays_stay_out_of_the_stream(way):
    """What is sent on one machine is a descriptor, however large the array."""
    frame = b"".join(pack(GangMessageKind.CALL, 1, np.zeros(HEAVY), share=True).to_frame())
    assert len(frame) < 1000
    assert len(b"".join(pack(GangMessageKind.CALL, 1, np.zeros(HEAVY), share=False).to_frame())) > 8 * HEAVY


def test_several_parcels_with_descriptors_keep_theirs(way):
    blocks = [SharedBuffer(8) for _ in range(6)]
    for number, block in enumerate(blocks):
        block.memory[0] = number
    sent = [
        pack(GangMessageKind.VALUE, 1, (blocks[:2], np.full(HEAVY, 1)), share=True),
        pack(GangMessageKind.VALUE, 1, "no descriptor", share=True),
        pack(GangMessageKind.VALUE, 1, blocks[2:5], share=True),
        pack(GangMessageKind.VALUE, 1, (np.full(HEAVY, 2), blocks[5]), share=True),
    ]
    first, second, third, fourth = (parcel.load() for parcel in way.carry(*sent))
    assert [block.memory[0] for block in first[0]] == [0, 1] and (first[1] == 1).all()
    assert second == "no descriptor"
    assert [block.memory[0] for block in third] == [2, 3, 4]
    assert (fourth[0] == 2).all() and fourth[1].memory[0] == 5


def test_both_sides_of_a_block_see_the_same_memory(pair):
    ours, theirs = pair
    there, back = Way(ours, theirs), Way(theirs, ours)
    block = SharedBuffer(100)
    received = there.value({"block": block}, share=True)["block"]
    returned = back.value([received], share=True)[0]
    received.memory[99] = 7
    assert (block.nbytes, block.memory[99], returned.memory[99]) == (100, 7, 7)
    returned.memory[0] = 9
    assert block.memory[0] == 9 and len(received.memory) == 100


def test_a_block_that_appears_twice_in_a_value_is_one(way):
    block = SharedBuffer(4)
    one, other = way.value((block, block), share=True)
    assert one is other


def test_a_block_goes_nowhere_else(way):
    block = SharedBuffer(4)
    for attempt in (lambda: pickle.dumps(block), lambda: pack(GangMessageKind.VALUE, 1, block, share=False)):
        with pytest.raises(pickle.PicklingError, match="in a gang's messages only"):
            attempt()


def test_more_blocks_than_one_message_can_bear_are_refused_where_they_are_sent(way):
    blocks = [SharedBuffer(1) for _ in range(31)]
    assert len(way.value((blocks, np.zeros(HEAVY)), share=True)[0]) == 31
    with pytest.raises(pickle.PicklingError, match=r"32 SharedBuffers.*at most 31"):
        pack(GangMessageKind.VALUE, 1, [*blocks, SharedBuffer(1)], share=True)


def test_descriptors_are_closed_with_the_values(way):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    values = [way.value((SharedBuffer(8), np.zeros(HEAVY)), share=True) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) > before
    del values
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_parcel_of_its_own_does_not_change_with_the_senders_arrays(way):
    value = np.zeros(HEAVY // 16)
    way.outbox.add(pack(GangMessageKind.VALUE, 1, value, share=True).with_copied_buffers())
    assert not way.outbox.flush()
    value[:] = 1
    first, second = way.carry(
        pack(GangMessageKind.VALUE, 1, value, share=True), pack(GangMessageKind.VALUE, 2, SharedBuffer(3), share=True)
    )
    assert (first.load() == 0).all() and (second.load() == 1).all()


def test_a_function_travels_with_what_it_closes_over(way):
    offset = np.arange(3)
    assert way.value(lambda x: x + offset, share=True)(1).tolist() == [1, 2, 3]


def test_an_object_is_first_offered_to_reduce(way):
    def reduce(value):
        return (str, ("was complex",)) if isinstance(value, complex) else NotImplemented

    parcel = pack(GangMessageKind.RESULT, 1, [1j, 2, len], share=True, reduce=reduce)
    (came,) = way.carry(parcel)
    assert came.load() == ["was complex", 2, len]


def test_what_pickling_raises_comes_through_and_leaves_nothing_behind(way):
    with pytest.raises(TypeError, match="lock"):
        pack(GangMessageKind.VALUE, 1, (SharedBuffer(3), threading.Lock()), share=True)
    with pytest.raises(pickle.PicklingError):  # there is no parcel any more that it could belong to
        pickle.dumps(SharedBuffer(3))
    assert way.value(SharedBuffer(3), share=True).nbytes == 3


class Nested:
    """A value whose unpickling raises."""

    def __reduce__(self):
        return int, ("x",)


def test_what_unpickling_raises_comes_through(way):
    (came,) = way.carry(pack(GangMessageKind.VALUE, 1, Nested(), share=True))
    with pytest.raises(ValueError, match="invalid literal"):
        came.load()
    assert way.value(5, share=True) == 5


@pytest.mark.parametrize("sent", [0, 10, 45], ids=["nothing", "part of the header", "part of the body"])
def test_the_end_of_the_stream_is_an_end(pair, sent):
    ours, theirs = pair
    ours.send(b"".join(pack(GangMessageKind.VALUE, 1, "x" * 1000, share=False).to_frame())[:sent])
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        GangMessageReader(theirs).receive()


def _head(magic=b"JXP1", kind=2, buffers=0):
    return struct.pack("<4sBBxxIIQIxxxx", magic, kind, 0, 0, 0, 0, buffers)


NO_PARCELS = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another version": _head(magic=b"JXP9"),
    "no kind": _head(kind=0),
    "an unknown kind": _head(kind=200),
    "buffers without end": _head(buffers=2**31),
}


@pytest.mark.parametrize("data", NO_PARCELS.values(), ids=NO_PARCELS)
def test_what_is_no_parcel_is_refused(pair, data):
    ours, theirs = pair
    assert len(data) >= len(_head())
    ours.send(data)
    with pytest.raises(ProtocolError, match="no message of this version"):
        GangMessageReader(theirs).receive()


def test_an_empty_parcel_is_one(way):
    (came,) = way.carry(GangMessage(GangMessageKind.END_CALL, 12))
    assert (came.kind, came.call, bytes(came.payload.body), came.note) == (GangMessageKind.END_CALL, 12, b"", b"")


def test_descriptors_that_are_lost_on_their_way_are_told(pair):
    """A process that may open no more files gets the message, and not what it bears."""
    import resource

    ours, theirs = pair
    parcel = pack(GangMessageKind.VALUE, 1, [SharedBuffer(1), SharedBuffer(1)], share=True)
    outbox, inbox = GangMessageWriter(ours), GangMessageReader(theirs)
    outbox.add(parcel)
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


def test_nothing_that_is_sent_leaves_a_name_behind(way):
    assert way.value(SharedBuffer(3), share=True).nbytes == 3
    assert not list(Path("/dev/shm").glob("*jaxrun*"))
