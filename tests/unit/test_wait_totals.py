"""Who comes last to calls, and whether it matters: from constructed recordings."""

import random
import time

import pytest
from timings import asynchronous, blocking, noisy, shifted, window

from jaxrun.analysis.lockstep.call_waits import find_waits
from jaxrun.analysis.lockstep.straggler import WaitTotals


def waits_of(flights, offsets=None, parties=None, after=None):
    return find_waits(flights, offsets or {}, parties or {rank: (rank,) for rank in flights}, after or {})


def straggler_of(flights, **more):
    totals = WaitTotals()
    totals.add(waits_of(flights, **more))
    return totals.find_straggler()


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize("step_s", [0.02, 2.0])
def test_a_rank_that_is_a_tenth_slower_is_found_within_fifty_calls(size, step_s):
    for seed in range(8):
        flights = blocking(noisy(seed, step_s, step_s / 100, slow=1, factor=1.1), size, 50)
        found = straggler_of(flights)
        assert found is not None and found.ranks == (1,), (seed, found)
        assert found.last > 0.9 and found.is_proven and (found.place, found.group) == ("", f"0-{size - 1}")
        assert found.late_s == pytest.approx(0.1 * step_s, rel=0.3)
        assert found.share == pytest.approx(0.1 / 1.1, rel=0.3)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])  # of what a step takes
def test_ranks_that_are_late_by_chance_are_none(size, spread):
    for seed in range(25):
        flights = blocking(noisy(seed, 0.02, 0.02 * spread), size, 128)
        assert straggler_of(flights) is None, seed


def test_under_noise_a_slow_rank_is_found_after_more_calls():
    found = []
    for calls in (50, 500):
        flights = (blocking(noisy(seed, 0.02, 0.005, slow=2, factor=1.3), 3, calls) for seed in range(10))
        found.append(sum(straggler_of(of) is not None for of in flights))
    assert found[0] < found[1] and found[1] >= 9


@pytest.mark.parametrize(
    ("work", "calls"),
    {
        "one long delay": (
            lambda rank, number: 0.02 + (3.0 if (rank, number) == (1, 60) else 0.0) + 0.0001 * rank,
            128,
        ),
        "late at times, as one that writes a checkpoint": (
            lambda rank, number: 0.02 + (0.5 if rank == 0 and number % 20 == 0 else 0.0),
            500,
        ),
        "late by less than a millisecond": (lambda rank, number: 0.002 + 0.0009 * (rank == 1), 128),
    }.values(),
)
def test_a_rank_that_is_late_rarely_or_little_is_no_straggler(work, calls):
    assert straggler_of(blocking(work, 3, calls)) is None


def test_of_several_calls_a_step_only_those_at_one_line_may_be_late():
    def work(rank, number):
        return 0.02 + 0.005 * (rank == 1) if number % 4 == 0 else 0.0001 * random.Random(f"{rank} {number}").random()

    found = straggler_of(blocking(work, 3, 200, site=lambda number: 7 if number % 4 == 0 else 8))
    assert (found.ranks, found.place, found.last) == ((1,), "train.py:88 main", 1.0)
    assert found.share == pytest.approx(0.2, abs=0.02)


def test_a_rank_that_leaves_calls_later_is_not_late_of_its_own():
    assert straggler_of(blocking(lambda rank, _: 0.02, 3, 100, wake_s=lambda rank: 0.003 * (rank == 1))) is None


def test_a_host_is_found_where_none_of_its_ranks_alone_is_late():
    chance = random.Random(1)
    flights = blocking(lambda rank, _: 0.02 + 0.004 * (rank >= 2) + 0.001 * chance.random(), 4, 200)
    assert straggler_of(flights) is None
    hosts = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    found = straggler_of(flights, parties=hosts)
    assert found.ranks == (2, 3) and found.share == pytest.approx(0.15, abs=0.05)
    assert not waits_of(flights, parties=dict.fromkeys(range(4), (0, 1, 2, 3)))


def test_calls_that_return_at_once_prove_nothing():
    found = straggler_of(asynchronous(lambda rank, _: 0.02 + 0.005 * (rank == 1), 2, 128))
    assert found.ranks == (1,) and not found.is_proven


def test_a_rank_that_only_runs_ahead_waits_for_nobody():
    def work(rank, number):
        return 0.02 if number > 1 or rank == 0 else 0.1  # rank 1 has begun later

    assert straggler_of(asynchronous(work, 2, 128, every=1000)) is None


def test_clocks_that_are_apart_are_corrected():
    flights = blocking(noisy(1, 0.02, 0.0001, slow=1, factor=1.1), 3, 60)
    apart = {**flights, 2: shifted(flights[2], 5.0)}
    assert straggler_of(apart) is None or straggler_of(apart).ranks != (1,)
    assert straggler_of(apart, offsets={2: -5.0}).ranks == (1,)


def test_what_a_clock_may_be_wrong_does_not_count():
    totals = WaitTotals()
    totals.add(waits_of(blocking(lambda rank, _: 0.02 + 0.002 * (rank == 1), 3, 60)))
    assert totals.find_straggler(lambda party: 0.0005).ranks == (1,)
    assert totals.find_straggler(lambda party: 0.0015) is None


def test_calls_count_once_however_often_they_are_read():
    flights = blocking(lambda rank, _: 0.02 + 0.004 * (rank == 1), 3, 200)
    totals = WaitTotals()
    for since, until in ((1, 40), (1, 60), (20, 80), (120, 200)):
        totals.add(waits_of(window(flights, since, until), after=totals.last_numbers))
    assert totals.last_numbers == {"0-2": 200}
    assert totals.find_straggler().calls == 150  # 79 and 80, in rounds of ten


def test_nothing_is_known_while_a_rank_is_missing():
    flights = blocking(lambda rank, _: 0.02 + 0.004 * (rank == 1), 3, 60)
    parties = {rank: (rank,) for rank in range(3)}
    del flights[2]
    assert find_waits(flights, {}, parties, {}) == {}


def test_four_thousand_ranks_are_compared_in_a_moment():
    flights = blocking(lambda rank, _: 0.02 + 0.004 * (rank == 77), 4096, 60)
    totals = WaitTotals()
    began = time.process_time()
    totals.add(waits_of(flights))
    assert totals.find_straggler() is None  # of so many ranks fewer calls are compared at once
    assert time.process_time() - began < 5.0
