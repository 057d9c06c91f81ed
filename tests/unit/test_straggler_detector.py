"""A rank that holds the others up is found, and where in its program it is; the sentence about it."""

import random
import time

import pytest
from calls_by_hand import asynchronous, blocking, flight_after, noisy, shifted, window
from msgspec.structs import replace
from simulation import make_registry

from jaxrun.analysis.diagnosis.job_end import Completed
from jaxrun.analysis.lockstep.call_waits import find_waits
from jaxrun.analysis.lockstep.straggler import Straggler, WaitTotals
from jaxrun.analysis.verdict.stack_text import describe_stacks, format_straggler
from jaxrun.controller.head.clock_offsets import ClockOffsets
from jaxrun.controller.head.head_state import HeadState, TimeLimits
from jaxrun.controller.head.queries import RankQueries
from jaxrun.controller.head.straggler_detector import StragglerDetector
from jaxrun.controller.head.timers import Timer
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.job_events.actions import RecordStraggler
from jaxrun.job_events.events import Requested
from jaxrun.protocol.agent_messages import ClockReply
from jaxrun.protocol.job_messages import StacksRequest
from jaxrun.protocol.query_messages import FlightAtEnd, RankDetail, RankReply

LOAD = 'Thread 0x1 (most recent call first):\n  File "/job/data.py", line 10 in load\n  File "/job/train.py", line 9\n'
IN_CALL = 'Thread 0x1 (most recent call first):\n  File "/job/train.py", line 88 in main\n'
HOSTS = dict.fromkeys(range(3), "h1")
FUTEX = "futex_wait_queue"


def late(rank, size=3, calls=60, by=0.004):
    return blocking(lambda of, _: 0.02 + by * (of == rank), size, calls)


class Job:
    """A detector, and ranks that reply to it with `reply`; `now` is also what the clocks of hosts say."""

    def __init__(self, hosts=HOSTS, clocks=None):
        self._state = HeadState(WorkerTable(hosts), TimeLimits(60.0, None, 5.0, 30.0))
        self.timers = self._state.timers
        self.queries = RankQueries(self._state, lambda rank: True)
        self.detector = StragglerDetector(self._state, self.queries, clocks)
        self.now = 1000.0
        self.asked = []
        self.recorded = []

    def add(self, flights, core_waits=None, now=None):
        self.now = now or self.now
        replies = {r: RankReply(r, 1, flight=f, core_wait_s=(core_waits or {}).get(r, 0)) for r, f in flights.items()}
        self._record(self.detector.add(replies, self.now))
        return self

    def sample(self, flights, stacks, wait=FUTEX):
        """Reply to all that the detector asks."""
        while (at := self.timers.next_at()) is not None:
            self.now = max(self.now, at)
            ((rank,), query) = (lambda send: (send.ranks, send.message))(*self.timers.fire(self.now))
            assert query.detail is RankDetail.STACKS and self.timers.at(Timer.SAMPLE) is None
            self.asked.append(rank)
            kernel_wait = wait(len(self.asked)) if callable(wait) else wait
            values = {"stacks": stacks.get(rank, ""), "kernel_wait": kernel_wait, "flight": flights[rank]}
            reply = RankReply(rank, query.number, self.now, **values)
            self.now += 0.1
            self._record(self.queries.handle(reply, self.now))
        return self

    def _record(self, actions):
        self.recorded += [action.straggler for action in actions if isinstance(action, RecordStraggler)]

    @property
    def straggler(self):
        return self._state.straggler


def test_a_straggler_is_asked_where_it_is_until_it_was_seen_a_few_times_while_others_waited():
    flights = late(1, calls=128, by=0.02)
    job = Job().add(flights).sample(flights, {1: LOAD})
    assert [straggler.frame for straggler in job.recorded] == ["", "data.py:10 load"]
    assert set(job.asked) == {1} and 4 <= len(job.asked) <= 30
    assert job.straggler.ranks == (1,) and job.straggler.frame == "data.py:10 load"


def test_stacks_from_within_a_call_or_from_long_before_it_do_not_count_and_end_some_day():
    flights = late(1)
    within = {rank: replace(flight, timings=flight.timings[:1]) for rank, flight in flights.items()}
    job = Job().add(flights).sample(within, {1: LOAD})
    assert len(job.asked) == 64 and job.straggler.frame == ""
    far = late(1, calls=4, by=0.004)
    far[1] = replace(far[1], timings=(far[1].timings[0], replace(far[1].timings[1], entered=2000.0)))
    assert Job().add(flights).sample(far, {1: LOAD}).straggler.frame == ""


def test_nobody_is_asked_where_nobody_is_late():
    job = Job().add(late(None))
    assert job.recorded == [] and job.straggler is None and job.timers.next_at() is None


@pytest.mark.parametrize(("in_jax", "told"), [(24, True), (12, True), (3, False), (0, False)])
def test_where_calls_return_at_once_another_rank_must_be_seen_to_wait(in_jax, told):
    flights = asynchronous(lambda rank, _: 0.02 + 0.02 * (rank == 1), 2, 128)
    job = Job({0: "h1", 1: "h1"}).add(flights)
    assert job.straggler is None
    job.sample(flights, {0: IN_CALL, 1: LOAD}, lambda count: FUTEX if count <= in_jax else "hrtimer_nanosleep")
    assert job.asked[:24] == [0] * 24
    assert (job.straggler is not None) is told
    assert (set(job.asked[24:]) == {1}) is told  # now of the straggler
    if told:
        assert job.straggler.share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("of_rank_1", "told"), [(0.1, True), (3.0, False)])
def test_a_rank_that_only_lacks_a_core_is_not_a_straggler(of_rank_1, told):
    job, flights = Job(), late(1, calls=120)
    job.detector.start(0.0)
    job.add(window(flights, 1, 60), {0: 5.0, 1: 9.0, 2: 5.0}, 10.0)
    job.add(window(flights, 60, 120), {0: 5.2, 1: 9.0 + of_rank_1, 2: 5.2}, 20.0)
    assert (job.straggler is not None) is told


def test_of_a_short_job_all_that_it_waited_for_cores_counts():
    job = Job()
    job.detector.start(10.0)
    for rank, seconds in enumerate((0.1, 0.5, 0.1)):
        job.detector.handle_recorder(FlightAtEnd(rank, late(1)[rank], seconds), 12.0)
    assert job.add(late(1), {}, 12.0).straggler is None


def test_ranks_of_several_hosts_are_compared_once_their_clocks_are_known():
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    clocks = ClockOffsets(hosts, make_registry(3))
    job = Job(hosts, clocks)
    flights = late(1)
    flights[2] = shifted(flights[2], 5.0)
    assert job.add(flights, {}, 100.0).recorded == []
    for rank, ahead in enumerate((0.0, 0.0, 5.0)):
        clocks.handle(ClockReply(rank, 100.0, 100.0005 + ahead), 100.001)
    assert job.add(flights, {}, 100.0).straggler.ranks == (1,)
    for rank, ahead in enumerate((0.0, 0.0, 5.0)):  # two hours later the clocks may be anywhere
        assert clocks.offset(rank, 7300.0).error_at(7300.0) > 0.1, ahead
    assert job.add({}, {}, 7300.0).straggler is None


def test_a_job_says_at_its_end_who_held_it_up(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights = blocking(lambda rank, _: 0.02 + 0.2 * (rank == 1), 3, 60, start=0.0)
    job.stacks = {1: LOAD}
    job.wait(10.0)
    assert {ranks for _, detail, ranks in job.queries if detail is RankDetail.STACKS} == {(1,)}
    job.handle(*(FlightAtEnd(rank, flight) for rank, flight in job.flights.items()))
    job.done(0, 1, 2).exit(0, 0, 1, 2)
    assert isinstance(job.outcome.end, Completed) and job.outcome.straggler.frame == "data.py:10 load"
    assert job.verdict.details == (f"{format_straggler(job.outcome.straggler, job.hosts)}.",)


def test_nothing_is_said_of_it_where_a_rank_has_failed(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights = late(1)
    job.wait(10.0)
    job.handle(job.failure(2)).wait(5.0)
    job.exit(1, 2).wait(60.0)
    assert job.outcome.straggler is not None
    assert not any("came last" in line for line in job.verdict.details)


def test_stacks_say_it_too(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights, job.stacks = late(1), dict.fromkeys(range(3), IN_CALL)
    job.wait(10.0)
    job.handle(Requested("1", StacksRequest())).wait(1.0)
    ((_, answer),) = job.answered
    stacks = answer.content
    assert stacks.straggler.ranks == (1,)
    assert "rank 1 came last to 100 % of calls" in describe_stacks(stacks)


def test_a_straggler_that_waits_for_others_itself_is_none_meanwhile():
    state = HeadState(WorkerTable(HOSTS), TimeLimits(60.0, None, 5.0, 30.0), straggler=ONE_OF_THREE)
    queries = RankQueries(state, lambda rank: True)

    def straggler(numbers, ago_s):
        flights = {rank: flight_after(number, "0-2", time=100.0 - ago_s) for rank, number in enumerate(numbers)}
        return queries.straggler({rank: RankReply(rank, 1, 100.0, flight=one) for rank, one in flights.items()})

    assert straggler((7, 6, 7), 20.0) is None, "rank 2 waits for rank 1"
    assert straggler((7, 6, 7), 0.5) == ONE_OF_THREE, "only for a moment"
    assert straggler((7, 7, 6), 20.0) == straggler((7, 7, 7), 20.0) == ONE_OF_THREE
    assert queries.straggler({}) == ONE_OF_THREE


# ---- the sentence

ONE_OF_THREE = Straggler((2,), "0-2", "", 500, 490, 0.94, 0.038, 0.31, 0.3, True, "data.py:10 load")

ONE = Straggler((5,), "0-7", "", 500, 490, 0.94, 0.038, 0.31, 0.3, True, "data.py:10 load")
TWO_EACH = {rank: f"h{rank // 2 + 1}" for rank in range(8)}


@pytest.mark.parametrize(
    ("straggler", "hosts", "text"),
    [
        (
            ONE,
            TWO_EACH,
            "rank 5 (h3) came last to 94 % of calls, by 38 ms on average: the others waited 31 % of the time; "
            "it was in data.py:10 load",
        ),
        (
            replace(ONE, frame="", late_s=1.234, place="train.py:88 main"),
            dict.fromkeys(range(8), "h1"),
            "rank 5 came last to 94 % of the calls at train.py:88, by 1.2 s on average: the others waited 31 % "
            "of the time",
        ),
        (
            replace(ONE, ranks=(4, 5), frame="", late_s=0.00123),
            TWO_EACH,
            "ranks 4-5 (h3) came last to 94 % of calls, by 1.2 ms on average: the others waited 31 % of the time",
        ),
        (
            replace(ONE, group="4-5", frame=""),
            TWO_EACH,
            "rank 5 (h3) came last to 94 % of calls of ranks 4-5, by 38 ms on average: rank 4 waited 31 % of the time",
        ),
    ],
)
def test_it_names_who_came_last_and_what_that_cost(straggler, hosts, text):
    assert format_straggler(straggler, hosts) == text


# ---- who comes last to calls, and whether it matters


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
def test_ranks_that_are_late_by_chance_are_not_stragglers(size, spread):
    for seed in range(25):
        flights = blocking(noisy(seed, 0.02, 0.02 * spread), size, 128)
        assert straggler_of(flights) is None, seed


def test_under_noise_a_slow_rank_is_found_after_more_calls():
    found = []
    for calls in (50, 500):
        flights = (blocking(noisy(seed, 0.02, 0.005, slow=2, factor=1.3), 3, calls) for seed in range(10))
        found.append(sum(straggler_of(of) is not None for of in flights))
    assert found[0] < found[1] and found[1] >= 9


NOBODY = {
    "one long delay": blocking(
        lambda rank, number: 0.02 + (3.0 if (rank, number) == (1, 60) else 0.0) + 0.0001 * rank, 3, 128
    ),
    "late at times, as one that writes a checkpoint": blocking(
        lambda rank, number: 0.02 + (0.5 if rank == 0 and number % 20 == 0 else 0.0), 3, 500
    ),
    "late by less than a millisecond": blocking(lambda rank, _: 0.002 + 0.0009 * (rank == 1), 3, 128),
    "late out of calls": blocking(lambda rank, _: 0.02, 3, 100, wake_s=lambda rank: 0.003 * (rank == 1)),
    "only begun later than one that runs ahead": asynchronous(
        lambda rank, number: 0.02 if number > 1 or rank == 0 else 0.1, 2, 128, every=1000
    ),
}


@pytest.mark.parametrize("flights", NOBODY.values(), ids=NOBODY)
def test_no_straggler_is_a_rank_that_is(flights):
    assert straggler_of(flights) is None


def test_a_rank_may_be_late_at_one_line_of_several_in_a_step():
    def work(rank, number):
        return 0.02 + 0.005 * (rank == 1) if number % 4 == 0 else 0.0001 * random.Random(f"{rank} {number}").random()

    found = straggler_of(blocking(work, 3, 200, site=lambda number: 7 if number % 4 == 0 else 8))
    assert (found.ranks, found.place, found.last) == ((1,), "train.py:88 main", 1.0)
    assert found.share == pytest.approx(0.2, abs=0.02)


def test_a_late_host_is_found_even_if_no_single_rank_is_late():
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
    flights = late(1, calls=200)
    totals = WaitTotals()
    for since, until in ((1, 40), (1, 60), (20, 80), (120, 200)):
        totals.add(waits_of(window(flights, since, until), after=totals.last_numbers))
    assert totals.last_numbers == {"0-2": 200}
    assert totals.find_straggler().calls == 150  # 79 and 80, in rounds of ten


def test_nothing_is_known_while_a_rank_is_missing():
    flights, parties = late(1), {rank: (rank,) for rank in range(3)}
    del flights[2]
    assert waits_of(flights, parties=parties) == {}


def test_four_thousand_ranks_are_compared_in_a_moment():
    flights = late(77, size=4096)
    totals = WaitTotals()
    began = time.process_time()
    totals.add(waits_of(flights))
    assert totals.find_straggler() is None  # of so many ranks fewer calls are compared at once
    assert time.process_time() - began < 5.0
