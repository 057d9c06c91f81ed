"""A rank's part in a map: the function compiled for chunks, with a parent that is a list of messages."""

from __future__ import annotations

import queue
from typing import NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
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
from jaxrun_runtime.map.compiled_function import CompiledFunction, TracingFailed, cached_function

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


def test_chunks_come_back_in_order_without_their_padding_and_say_what_the_next_should_be(call_with):
    talk = call_with(*chunks(XS, 4), EndOfChunks())
    mapping.serve(batched(lambda x: 2 * x, size=4))
    ready, *done = talk.all_sent()
    assert isinstance(ready, MapReady)
    assert (ready.chunk_size, ready.template, ready.result_specs) == (4, 0, NUMBERS)
    assert [one.start for one in done] == [0, 4, 8]
    assert np.concatenate([one.leaves[0] for one in done]).tolist() == (2 * XS).tolist()
    assert {(type(one), one.chunk_size, one.max_chunks) for one in done} == {(ChunkDone, 4, 4)}


def test_padding_repeats_an_item(call_with):
    """Others, such as 0, could be out of the function's domain."""
    talk = call_with(*chunks(np.full(3, 5.0, np.float32), 4), EndOfChunks())
    with jax.debug_nans(True):
        mapping.serve(batched(lambda x: x / x, size=4))
    _, done = talk.all_sent()
    assert done.leaves[0].tolist() == [1.0] * 3


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


def test_a_function_that_cannot_be_traced_is_reported(call_with):
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


# ---- the function


pytestmark = pytest.mark.jax_version


class Point(NamedTuple):
    x: object
    y: object


def task_of(function, *leaves, template=0, star=False, whole=(), **static):
    specs = tuple(ArraySpec(np.shape(leaf)[1:], np.asarray(leaf).dtype) for leaf in leaves)
    code = cloudpickle.dumps((function, static))
    return StartMap(code, star, template, specs, tuple(map(np.asarray, whole)), None, None)


def run(task, *leaves):
    """The results of one chunk, in the containers that the function returns."""
    found = CompiledFunction(task)
    program = found.programs(len(leaves[0]))[0]
    device = jax.local_devices()[0]
    given = tuple(np.asarray(leaf, spec.dtype) for leaf, spec in zip(leaves, found.inputs, strict=True))
    results = program(jax.device_put(given, device), jax.device_put(task.shared_leaves, device))
    return jax.tree.map(lambda number: np.asarray(jax.tree.leaves(results)[number]), found.template)


FOUR = np.arange(4.0)


def test_items_and_results_may_be_trees():
    def f(item):
        return {"sum": item["a"] + item["b"][0], "pair": Point(item["a"], None)}

    result = run(task_of(f, FOUR, 10 * FOUR, template={"a": 0, "b": (1,)}), FOUR, 10 * FOUR)
    assert result["sum"].tolist() == (11 * FOUR).tolist()
    assert result["pair"].x.tolist() == FOUR.tolist()
    assert result["pair"].y is None


def test_a_shared_array_is_not_mapped():
    task = task_of(lambda item: item[0] @ item[1], np.ones((4, 3)), template=(1, 0), whole=[np.ones((2, 3))])
    assert run(task, np.ones((4, 3))).shape == (4, 2)


def test_an_item_may_be_the_arguments_and_static_ones_are_python_values():
    def f(x, y, *, n, kind):
        return x + y * n if kind == "times" else x

    task = task_of(f, FOUR, FOUR, template=(0, 1), star=True, n=3, kind="times")
    assert run(task, FOUR, FOUR).tolist() == (4 * FOUR).tolist()


def test_types_are_those_that_jax_takes():
    found = CompiledFunction(task_of(lambda x: x, FOUR.astype(np.float64)))
    assert found.inputs == found.results == (ArraySpec((), np.dtype("float32")),)


def _branches(x):
    return 1 if x > 0 else 2


@pytest.mark.parametrize(
    "function",
    [
        _branches,
        lambda x: float(x),
        lambda x: [1, 2][x],
        lambda x: np.linalg.eigvals(x),
        lambda x: x.upper(),
        lambda x: "text",
        lambda x: {1: 2}[x],
        lambda x: jnp.arange(10)[jnp.arange(10) > x],
    ],
)
def test_a_function_that_cannot_be_traced_is_refused(function):
    with pytest.raises(TracingFailed):
        CompiledFunction(task_of(function, np.arange(3)))


def test_a_refusal_names_the_users_line():
    with pytest.raises(TracingFailed) as caught:
        CompiledFunction(task_of(_branches, FOUR))
    refused = caught.value.refused
    assert refused.reason.startswith("TracerBoolConversionError: ")
    assert "\n" not in refused.reason
    assert refused.source_line.startswith(f"{__file__}:")
    assert "in _branches: return 1 if x > 0 else 2" in refused.source_line


def test_an_error_of_the_users_stays_what_it_is():
    with pytest.raises(ZeroDivisionError):
        CompiledFunction(task_of(lambda x: x + 1 / 0, FOUR))


def test_a_result_that_the_parent_could_not_put_together_is_refused():
    with pytest.raises(TypeError, match="return a dict"):
        CompiledFunction(task_of(lambda x: jax.tree_util.Partial(max, x), FOUR))


def test_a_function_is_kept_for_its_next_map():
    task = task_of(lambda x: x + 1, FOUR)
    again = StartMap(task.code, task.unpack_items, task.template, task.item_specs, task.shared_leaves, 7, 5)
    assert cached_function(again) is cached_function(task)
    wider = np.ones((4, 2))
    assert cached_function(
        StartMap(task.code, False, 0, (ArraySpec((2,), wider.dtype),), (), None, None)
    ) is not cached_function(task)


def test_a_chunk_fits_the_memory_that_a_device_may_take():
    def heavy(x):
        return jnp.linalg.inv(jnp.eye(400) + x).sum()

    found = CompiledFunction(task_of(heavy, FOUR))
    assert found.limit_by_memory(512) < 512
    assert CompiledFunction(task_of(lambda x: x, FOUR)).limit_by_memory(512) == 512
