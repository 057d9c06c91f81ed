"""Chunks go to whoever has room, every item once and in order; and where they lie in shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.contract.mapping import Spec, arrays, stride
from jaxrun.mapping.deal import Dealer, Hand
from jaxrun.mapping.memory import Ring

SPECS = (Spec((), np.dtype("float32")), Spec((3,), np.dtype("int8")))


def deal(dealer, there):
    """All that can be dealt now of the `there` items that exist: (rank, start, count) for each."""
    given_out = []
    for rank, start, size in dealer.deal():
        count = max(0, min(size, there - start))
        dealer.dealt_to(rank, count)
        if count:
            given_out.append((rank, start, count))
    return given_out


hands_of_ranks = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=5)


@given(st.integers(0, 300), st.booleans(), hands_of_ranks, st.data())
def test_every_item_is_dealt_once_and_no_rank_has_more_than_it_has_room_for(there, known, hands, data):
    dealer = Dealer(there if known else None, {rank: Hand(size, room) for rank, (size, room) in enumerate(hands)})
    seen = deal(dealer, there)
    out = list(seen)
    while not dealer.over:
        assert all(len(hand.chunks) <= hand.room for hand in dealer.hands.values())
        rank, start, count = out.pop(data.draw(st.integers(0, len(out) - 1)))
        assert dealer.took(rank, start, data.draw(st.integers(1, 40)), hands[rank][1]) == count
        new = deal(dealer, there)
        out += new
        seen += new
    assert [start for _, start, _ in seen] == list(np.cumsum([0, *(count for _, _, count in seen)])[:-1])
    assert sum(count for _, _, count in seen) == dealer.done == there


def test_ranks_are_dealt_to_in_turn():
    dealer = Dealer(100, {rank: Hand(10, 2) for rank in range(3)})
    assert [rank for rank, _, _ in deal(dealer, 100)] == [0, 1, 2, 0, 1, 2]


def test_no_items_are_over_at_once():
    dealer = Dealer(0, {0: Hand(10, 2)})
    assert deal(dealer, 0) == []
    assert dealer.over


@given(st.integers(0, 50))
def test_leaves_lie_apart_and_aligned(count):
    memory = memoryview(bytearray(stride(SPECS, count) + 64))
    numbers, bytes_ = arrays(memory, SPECS, count)
    numbers[:] = np.arange(count)
    bytes_[:] = 7
    assert numbers.tolist() == list(range(count))
    assert bytes_.shape == (count, 3)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    assert (bytes_.ctypes.data - start) % 64 == 0


def test_a_slot_takes_items_and_gives_results_of_other_types():
    ring = Ring((SPECS[0],), (SPECS[1],), most=10, slots=2, block=None)
    one, other = ring.take(), ring.take()
    ring.fill(one, 10, [np.arange(4.0)])
    ring.fill(other, 10, [np.full(10, 9.0)])
    (items,) = arrays(ring.places.items(one), ring.items, 10)
    assert items[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    (there,) = arrays(ring.places.results(one), ring.results, 4)
    there[:] = 5
    assert ring.take_out(one, 4)[0].tolist() == [[5, 5, 5]] * 4
    assert items[:4].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_slot_used_last_is_used_next():
    ring = Ring(SPECS, SPECS, most=1, slots=3, block=None)
    slots = [ring.take() for _ in range(3)]
    ring.give_back(slots[1])
    assert ring.take() == slots[1]


@pytest.mark.parametrize(("slots", "same"), [(2, True), (4, True), (5, False)])
def test_memory_is_used_again_if_it_is_large_enough(slots, same):
    first = Ring(SPECS, SPECS, most=1000, slots=4, block=None)
    again = Ring(SPECS, SPECS, most=1000, slots=slots, block=first.block)
    assert (again.block is first.block) is same
