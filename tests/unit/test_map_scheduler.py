"""Chunks are assigned to ranks that have room, every item once and in order; and where they lie in shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.map.scheduler import ChunkScheduler, RankWindow
from jaxrun.map.shared_slots import SlotPool
from jaxrun.protocol.map_messages import ArraySpec, packed_nbytes, view_arrays

SPECS = (ArraySpec((), np.dtype("float32")), ArraySpec((3,), np.dtype("int8")))


def assign_all(scheduler, there):
    """Assign all that can be assigned now of the `there` items that exist; (rank, start, count) for each chunk."""
    chunks = []
    for rank, start, size in scheduler.next_chunks():
        count = max(0, min(size, there - start))
        scheduler.assign(rank, count)
        if count:
            chunks.append((rank, start, count))
    return chunks


windows_of_ranks = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.integers(0, 300), st.booleans(), windows_of_ranks, st.data())
def test_every_item_is_assigned_once_and_no_rank_has_more_than_it_has_room_for(there, known, windows, data):
    scheduler = ChunkScheduler(
        there if known else None, {rank: RankWindow(size, capacity) for rank, (size, capacity) in enumerate(windows)}
    )
    seen = assign_all(scheduler, there)
    out = list(seen)
    while not scheduler.finished:
        assert all(len(window.pending) <= window.capacity for window in scheduler.windows.values())
        rank, start, count = out.pop(data.draw(st.integers(0, len(out) - 1)))
        assert scheduler.complete(rank, start, data.draw(st.integers(1, 40)), windows[rank][1]) == count
        new = assign_all(scheduler, there)
        out += new
        seen += new
    assert [start for _, start, _ in seen] == list(np.cumsum([0, *(count for _, _, count in seen)])[:-1])
    assert sum(count for _, _, count in seen) == scheduler.done == there


def test_ranks_get_chunks_in_turn():
    scheduler = ChunkScheduler(100, {rank: RankWindow(10, 2) for rank in range(3)})
    assert [rank for rank, _, _ in assign_all(scheduler, 100)] == [0, 1, 2, 0, 1, 2]


def test_no_items_are_finished_at_once():
    scheduler = ChunkScheduler(0, {0: RankWindow(10, 2)})
    assert assign_all(scheduler, 0) == []
    assert scheduler.finished


@given(st.integers(0, 50))
def test_leaves_lie_apart_and_aligned(count):
    memory = memoryview(bytearray(packed_nbytes(SPECS, count) + 64))
    numbers, bytes_ = view_arrays(memory, SPECS, count)
    numbers[:] = np.arange(count)
    bytes_[:] = 7
    assert numbers.tolist() == list(range(count))
    assert bytes_.shape == (count, 3)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    assert (bytes_.ctypes.data - start) % 64 == 0


def test_a_slot_takes_items_and_gives_results_of_other_types():
    pool = SlotPool((SPECS[0],), (SPECS[1],), chunk_size=10, slots=2, buffer=None)
    one, other = pool.acquire(), pool.acquire()
    pool.write_items(one, 10, [np.arange(4.0)])
    pool.write_items(other, 10, [np.full(10, 9.0)])
    (items,) = view_arrays(pool.shared.items(one), pool.item_specs, 10)
    assert items[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    (there,) = view_arrays(pool.shared.results(one), pool.result_specs, 4)
    there[:] = 5
    assert pool.read_results(one, 4)[0].tolist() == [[5, 5, 5]] * 4
    assert items[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_slot_used_last_is_used_next():
    pool = SlotPool(SPECS, SPECS, chunk_size=1, slots=3, buffer=None)
    slots = [pool.acquire() for _ in range(3)]
    pool.release(slots[1])
    assert pool.acquire() == slots[1]


@pytest.mark.parametrize(("slots", "same"), [(2, True), (4, True), (5, False)])
def test_memory_is_used_again_if_it_is_large_enough(slots, same):
    first = SlotPool(SPECS, SPECS, chunk_size=1000, slots=4, buffer=None)
    again = SlotPool(SPECS, SPECS, chunk_size=1000, slots=slots, buffer=first.buffer)
    assert (again.buffer is first.buffer) is same
