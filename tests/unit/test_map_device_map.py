"""A rank's part in a map, with a parent that is a list of messages."""

from __future__ import annotations

import queue

import cloudpickle
import jax
import numpy as np
import pytest

from jaxrun.protocol.map_messages import (
    ArraySpec,
    CannotTrace,
    ChunkDone,
    ChunkFailed,
    EndOfChunks,
    ItemChunk,
    MapReady,
    SharedSlots,
    StartMap,
    packed_nbytes,
    view_arrays,
)
from jaxrun.protocol.payload import SharedBuffer
from jaxrun_runtime.gang import calls
from jaxrun_runtime.map import device_map as mapping
from jaxrun_runtime.map.chunk_sizes import ChunkSizer

pytestmark = pytest.mark.jax_version

NUMBERS = (ArraySpec((), np.dtype("float32")),)
XS = np.arange(10.0, dtype=np.float32)


class RankCall:
    """The rank's side of a gang call: receives `messages`, keeps what is sent."""

    rank = 0

    def __init__(self, *messages):
        self._messages = list(messages)
        self.sent = queue.SimpleQueue()
        self.refuses = ()

    def receive(self):
        message = self._messages.pop(0)
        return message() if callable(message) else message

    def send(self, value):
        if isinstance(value, self.refuses):
            raise TypeError("cannot pickle that")
        self.sent.put(value)

    def all_sent(self):
        return [self.sent.get_nowait() for _ in range(self.sent.qsize())]


@pytest.fixture
def call_with(monkeypatch):
    def call_with(*messages):
        talk = RankCall(*messages)
        monkeypatch.setattr(calls, "current_call", lambda: talk)
        return talk

    return call_with


def batched(function, size=None):
    return StartMap(cloudpickle.dumps((function, {})), False, 0, NUMBERS, (), None, size)


def chunks(xs, size):
    return [ItemChunk(at, len(xs[at : at + size]), size, -1, (xs[at : at + size],)) for at in range(0, len(xs), size)]


def test_chunks_come_back_in_order_and_without_their_padding(call_with):
    talk = call_with(*chunks(XS, 4), EndOfChunks())
    mapping.serve(batched(lambda x: 2 * x, size=4))
    ready, *done = talk.all_sent()
    assert isinstance(ready, MapReady)
    assert (ready.chunk_size, ready.template, ready.result_specs) == (4, 0, NUMBERS)
    assert [one.start for one in done] == [0, 4, 8]
    assert np.concatenate([one.leaves[0] for one in done]).tolist() == (2 * XS).tolist()


def test_padding_repeats_an_item(call_with):
    talk = call_with(*chunks(np.full(3, 5.0, np.float32), 4), EndOfChunks())
    mapping.serve(batched(lambda x: 1 / x, size=4))
    _, done = talk.all_sent()
    assert done.leaves[0].tolist() == [np.float32(0.2)] * 3


def test_chunks_may_lie_in_shared_memory(call_with):
    bytes_of_a_chunk = packed_nbytes(NUMBERS, 4)
    places = SharedSlots(SharedBuffer(2 * 2 * bytes_of_a_chunk), bytes_of_a_chunk, bytes_of_a_chunk)
    for slot, part in enumerate((XS[:4], XS[4:7])):
        next(view_arrays(places.items(slot), NUMBERS, 4))[: len(part)] = part
    talk = call_with(places, ItemChunk(0, 4, 4, 0, None), ItemChunk(4, 3, 4, 1, None), EndOfChunks())
    mapping.serve(batched(lambda x: 2 * x, size=4))
    _, *done = talk.all_sent()
    assert [one.leaves for one in done] == [None, None]
    assert next(view_arrays(places.results(0), NUMBERS, 4)).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert next(view_arrays(places.results(1), NUMBERS, 3)).tolist() == [8.0, 10.0, 12.0]


def test_a_result_that_is_an_item_itself_does_not_change_with_its_slot(call_with):
    bytes_of_a_chunk = packed_nbytes(NUMBERS, 4)
    places = SharedSlots(SharedBuffer(2 * bytes_of_a_chunk), bytes_of_a_chunk, bytes_of_a_chunk)
    items = next(view_arrays(places.items(0), NUMBERS, 4))
    items[:] = XS[:4]

    def use_slot_again():
        assert isinstance(talk.sent.get(timeout=60), MapReady)
        assert isinstance(talk.sent.get(timeout=60), ChunkDone)  # so the first chunk's slot is free
        first.extend(next(view_arrays(places.results(0), NUMBERS, 4)).tolist())
        items[:] = 9.0
        return ItemChunk(4, 4, 4, 0, None)

    first = []
    talk = call_with(places, ItemChunk(0, 4, 4, 0, None), use_slot_again, EndOfChunks())
    mapping.serve(batched(lambda x: x, size=4))
    assert first == [0.0, 1.0, 2.0, 3.0]
    assert next(view_arrays(places.results(0), NUMBERS, 4)).tolist() == [9.0] * 4


def test_a_size_is_sought_with_the_first_chunks(call_with, monkeypatch):
    monkeypatch.setattr(ChunkSizer, "next_size", lambda sizes, size, seconds, left: 3 * size)
    many = np.zeros(2048, np.float32)
    talk = call_with(*[ItemChunk(at, 2048, 2048, -1, (many,)) for at in range(0, 8192, 2048)], EndOfChunks())
    mapping.serve(batched(lambda x: x + 1))
    ready, *done = talk.all_sent()
    assert ready.chunk_size == 2048
    assert ready.max_chunks < ready.largest_max_chunks
    assert [one.chunk_size for one in done] == [2048, 6144, 6144, 6144]
    assert ready.largest_chunk_size >= 6144


def test_a_function_that_cannot_be_traced_is_refused(call_with):
    talk = call_with()
    mapping.serve(batched(lambda x: 1 if x > 0 else 2))
    (refused,) = talk.all_sent()
    assert isinstance(refused, CannotTrace)


def test_a_chunk_that_fails_on_its_device_is_reported_and_raised(call_with, monkeypatch):
    def fail(results):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(jax, "block_until_ready", fail)
    talk = call_with(*chunks(XS, 5), EndOfChunks())
    with pytest.raises(RuntimeError, match="out of memory"):
        mapping.serve(batched(lambda x: x, size=5))
    assert [type(one) for one in talk.all_sent()] == [MapReady, ChunkFailed]


def test_done_says_what_the_next_chunks_should_be(call_with):
    talk = call_with(*chunks(XS, 5), EndOfChunks())
    mapping.serve(batched(lambda x: x, size=5))
    _, *done = talk.all_sent()
    assert {(one.chunk_size, one.max_chunks) for one in done if isinstance(one, ChunkDone)} == {(5, 4)}
