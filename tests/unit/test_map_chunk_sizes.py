"""The number of items of a chunk: grown by measurement, bounded by memory and the items left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun_runtime.map.chunk_sizes import FIRST_CHUNK_ITEMS, TARGET_CHUNK_S, ChunkSizer, power_of_two, round_up

pytestmark = pytest.mark.jax_version

MANY = 2**30


def settle(sizes, seconds_of, share=None):
    """Grow until a size is chosen, as a map does: the sizes that were tried."""
    tried = [sizes.initial_size(share)]
    while (following := sizes.next_size(tried[-1], seconds_of(tried[-1]), share)) != tried[-1]:
        tried.append(following)
    return tried


@pytest.mark.parametrize("item_seconds", [1e-9, 1e-8, 1e-6, 2e-6])
def test_a_chunk_grows_until_a_device_works_on_it_for_a_while(item_seconds):
    sizes = ChunkSizer(most=MANY)
    settle(sizes, lambda size: 1e-4 + size * item_seconds)
    assert TARGET_CHUNK_S / 4 < 1e-4 + sizes.chosen * item_seconds < TARGET_CHUNK_S * 2


def test_few_sizes_are_tried():
    assert len(settle(ChunkSizer(most=MANY), lambda size: 1e-4 + size * 1e-8)) <= 4


def test_a_chunk_is_not_made_smaller_because_it_takes_long():
    sizes = ChunkSizer(most=MANY)
    assert settle(sizes, lambda size: 10.0) == [FIRST_CHUNK_ITEMS]
    assert sizes.chosen == FIRST_CHUNK_ITEMS


def test_memory_bounds_a_chunk():
    sizes = ChunkSizer(most=5000)
    assert settle(sizes, lambda size: 1e-6)[-1] == sizes.chosen == 5000
    assert ChunkSizer(most=3).initial_size(None) == 3


@pytest.mark.parametrize(
    ("share", "size"), [(1, 1), (3, 3), (50, 56), (2100, 1280), (5000, 1792), (10**6, FIRST_CHUNK_ITEMS)]
)
def test_a_map_of_few_items_begins_with_chunks_that_they_fill(share, size):
    assert ChunkSizer(most=MANY).initial_size(share) == size


def test_little_work_is_not_worth_a_compilation():
    sizes = ChunkSizer(most=MANY, compile_seconds=0.1)
    assert sizes.next_size(FIRST_CHUNK_ITEMS, 1e-4, left=10_000) == FIRST_CHUNK_ITEMS
    assert sizes.chosen == 0
    assert sizes.next_size(FIRST_CHUNK_ITEMS, 1e-4, left=10**9) > FIRST_CHUNK_ITEMS


def test_work_that_comes_again_and_again_is_worth_it():
    sizes = ChunkSizer(most=MANY, compile_seconds=0.1)
    tried = [sizes.next_size(FIRST_CHUNK_ITEMS, 1e-4, left=500_000) for _ in range(10)]
    assert tried[0] == FIRST_CHUNK_ITEMS
    assert tried[-1] > FIRST_CHUNK_ITEMS


def test_a_map_of_few_chunks_takes_smaller_ones_if_there_are():
    sizes = ChunkSizer(
        most=MANY, chosen=262_144, item_seconds=1e-8, compile_seconds=0.1, compiled={2048, 131_072, 262_144}
    )
    assert sizes.initial_size(500_000) == 131_072
    assert sizes.initial_size(10**7) == 262_144


def test_a_compiled_size_is_used_for_fewer_items_unless_that_takes_longer_than_compiling():
    sizes = ChunkSizer(most=MANY, chosen=4096, item_seconds=1e-6, compile_seconds=0.1, compiled={4096})
    assert sizes.initial_size(100) == 4096
    sizes.item_seconds = 1.0
    assert sizes.initial_size(100) == round_up(100)


@given(st.integers(1, 2**40))
def test_rounding_pads_by_a_quarter_at_most(number):
    assert number <= round_up(number) <= number * 1.25
    assert round_up(round_up(number)) == round_up(number)
    assert power_of_two(number) <= number < 2 * power_of_two(number)
