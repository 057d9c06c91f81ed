"""When a rank wrote output."""

from itertools import accumulate, pairwise
from random import Random

from jaxrun.output.bursts import MAX_BURSTS, OutputBursts


def written(*times):
    bursts = OutputBursts()
    for time in times:
        bursts.add(time, 10)
    return bursts.bursts


def test_what_is_written_at_nearly_the_same_time_is_one_burst():
    assert written() == ()
    assert written(1.0, 1.05, 1.1, 3.0, 3.0, 9.0) == ((1.0, 1.1, 30.0), (3.0, 3.0, 20.0), (9.0, 9.0, 10.0))


def test_there_are_never_many_and_no_byte_is_lost():
    pauses = Random(1)
    bursts = written(*accumulate(pauses.expovariate(0.1) for _ in range(5000)))
    assert 8 <= len(bursts) <= MAX_BURSTS
    assert sum(count for _, _, count in bursts) == 50_000
    assert all(end < start for (_, end, _), (start, _, _) in pairwise(bursts))
    assert written(*range(1000)) == ((0, 999, 10_000),)
