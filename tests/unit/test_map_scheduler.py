"""Chunks of a map: how large they are, that every item is assigned once and in order, and where they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrun.frontends.map.scheduler import ChunkScheduler, RankWindow
from jaxrun.frontends.map.shared_slots import SlotPool
from jaxrun.protocol.map_messages import ArraySpec, packed_nbytes, view_arrays
from jaxrun_runtime.map.chunk_sizes import FIRST_CHUNK_ITEMS, TARGET_CHUNK_S, ChunkSizer, power_of_two, round_up

SPECS = (ArraySpec((), np.dtype("float32")), ArraySpec((3,), np.dtype("int8")))
MANY = 2**30


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


@settings(deadline=None, max_examples=50)
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
    nothing = ChunkScheduler(0, {0: RankWindow(10, 2)})
    assert assign_all(nothing, 0) == [] and nothing.finished


# ---- shared memory


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 50])
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


# ---- sizes: grown by measurement, bounded by memory and the items left


def settle(sizes, seconds_of, share=None):
    """Grow until a size is chosen, as a map does: the sizes that were tried."""
    tried = [sizes.initial_size(share)]
    while (following := sizes.next_size(tried[-1], seconds_of(tried[-1]), share)) != tried[-1]:
        tried.append(following)
    return tried


@pytest.mark.parametrize("item_seconds", [1e-9, 1e-8, 1e-6, 2e-6])
def test_a_chunk_grows_in_few_steps_until_a_device_works_on_it_for_a_while(item_seconds):
    sizes = ChunkSizer(most=MANY)
    tried = settle(sizes, lambda size: 1e-4 + size * item_seconds)
    assert TARGET_CHUNK_S / 4 < 1e-4 + sizes.chosen * item_seconds < TARGET_CHUNK_S * 2
    assert len(tried) <= 4


def test_a_chunk_is_not_made_smaller_because_it_takes_long_and_memory_bounds_it():
    sizes = ChunkSizer(most=MANY)
    assert settle(sizes, lambda size: 10.0) == [FIRST_CHUNK_ITEMS]
    assert sizes.chosen == FIRST_CHUNK_ITEMS
    sizes = ChunkSizer(most=5000)
    assert settle(sizes, lambda size: 1e-6)[-1] == sizes.chosen == 5000
    assert ChunkSizer(most=3).initial_size(None) == 3


@pytest.mark.parametrize(
    ("share", "size"), [(1, 1), (3, 3), (50, 56), (2100, 1280), (5000, 1792), (10**6, FIRST_CHUNK_ITEMS)]
)
def test_a_map_of_few_items_begins_with_chunks_that_they_fill(share, size):
    assert ChunkSizer(most=MANY).initial_size(share) == size


def test_little_work_is_not_worth_a_compilation_unless_it_comes_again_and_again():
    sizes = ChunkSizer(most=MANY, compile_seconds=0.1)
    assert sizes.next_size(FIRST_CHUNK_ITEMS, 1e-4, left=10_000) == FIRST_CHUNK_ITEMS
    assert sizes.chosen == 0
    assert sizes.next_size(FIRST_CHUNK_ITEMS, 1e-4, left=10**9) > FIRST_CHUNK_ITEMS
    sizes = ChunkSizer(most=MANY, compile_seconds=0.1)
    tried = [sizes.next_size(FIRST_CHUNK_ITEMS, 1e-4, left=500_000) for _ in range(10)]
    assert tried[0] == FIRST_CHUNK_ITEMS < tried[-1]


def test_a_map_of_few_items_uses_what_is_compiled_unless_that_takes_longer_than_compiling():
    sizes = ChunkSizer(
        most=MANY, chosen=262_144, item_seconds=1e-8, compile_seconds=0.1, compiled={2048, 131_072, 262_144}
    )
    assert sizes.initial_size(500_000) == 131_072
    assert sizes.initial_size(10**7) == 262_144
    sizes = ChunkSizer(most=MANY, chosen=4096, item_seconds=1e-6, compile_seconds=0.1, compiled={4096})
    assert sizes.initial_size(100) == 4096
    sizes.item_seconds = 1.0
    assert sizes.initial_size(100) == round_up(100)


@pytest.mark.parametrize("number", [*range(1, 70), 2**20 - 1, 2**20, 2**20 + 1, 2**40])
def test_rounding_pads_by_a_quarter_at_most(number):
    assert number <= round_up(number) <= number * 1.25
    assert round_up(round_up(number)) == round_up(number)
    assert power_of_two(number) <= number < 2 * power_of_two(number)
