"""When a job stalls: what counts as progress, who is told when, and after how long it is stopped.

How the head does so is in test_stalled_jobs.py.
"""

import math
from itertools import pairwise

import pytest
from deadlock_samples import dump, sample

from jaxrun.analysis.diagnosis.helpers import NO_HELPERS, Helpers, LostThread
from jaxrun.controller.head.stall_detector import StallDetector
from jaxrun.protocol.flight import DispatchedCall, Flight
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.query_messages import ChildProcess, ProcessState, RankReply

RUNS, LOCKED = "0", "futex_do_wait"


def in_call(line):
    return dump(f"SITE/jax/_src/array.py 635 _value\nJOB/train.py {line} step")


# What a rank does: its stack, and what the kernel says of its main thread.
IN_CALL, IN_OTHER_CALL, POLLS = (in_call(2), LOCKED), (in_call(7), LOCKED), (in_call(2), RUNS)
LOOPS, ASLEEP, COMPILES, TRACES = map(sample, ("a loop", "time.sleep", "compiling", "tracing"))
IN_QUEUE, IN_LOCK, IN_THREADS, AT_PROMPT = map(sample, ("a queue", "an event", "a thread", "ipdb"))
AT_END = sample("its end")
WAITS_FOR_COMPILER = (COMPILES[0], LOCKED)
LOADS = (dump("SITE/numpy/lib/_npyio_impl.py 1 load\nJOB/train.py 2 step"), RUNS)
RESTORES = (
    dump("PY/selectors.py 1 select\nPY/asyncio/base_events.py 1 _run_once\nJOB/train.py 2 step"),
    "ep_poll",
)
IDLE_GANG = (
    dump(
        "SITE/jaxrun/protocol/gang_messages.py 9 read\nSITE/jaxrun_runtime/gang/calls.py 9 _receive\n"
        "SITE/jaxrun_runtime/run_program.py 9 run"
    ),
    "unix_stream_read_generic",
)


class Clock:
    """A job of ranks that do one thing each, from one check of a detector to the next."""

    def __init__(self, *ranks, notice=30.0, limit=None, polls=False):
        self.ranks = dict(enumerate(ranks))
        self.stall = StallDetector(0.0, notice=notice, limit=limit, polls=polls)
        self.now = 0.0
        self.cpu = dict.fromkeys(self.ranks, 0.0)  # cores in use
        self.files = dict.fromkeys(self.ranks, 0.0)  # bytes a second
        self.written = dict.fromkeys(self.ranks, 0)
        self.made = dict.fromkeys(self.ranks, 0)
        self.compiling = set()
        self.debugged = set()
        self.helpers = {rank: Helpers((ChildProcess(1),)) for rank in self.ranks}  # which lives
        self.told = []  # times
        self.in_doubt = []  # times
        self.asked = []  # whether for stacks
        self.over_at = None
        self.last = None

    def wait(self, seconds):
        until = self.now + seconds
        while self.now + self.stall.next_check_s <= until:
            self.now += self.stall.next_check_s
            self.asked.append(self.stall.wants_stacks)
            self.last = self.stall.update(
                {rank: self._reply(rank) for rank in self.ranks},
                self.now,
                self.helpers,
                is_held=not self.debugged.isdisjoint(self.ranks),
            )
            if self.last.is_told:
                self.told.append(self.now)
            if self.last.is_in_doubt:
                self.in_doubt.append(self.now)
            if self.last.is_over:
                self.over_at = self.now
                return self
        self.now = until
        return self

    def _reply(self, rank):
        (stacks, wait), flight = self.ranks[rank], self._flight(rank)
        shown = {"stacks": stacks, "kernel_wait": wait, "flight": flight} if self.stall.wants_stacks else {}
        return RankReply(
            rank,
            number=1,
            cpu_seconds=self.cpu[rank] * self.now,
            bytes_written=self.written[rank],
            file_bytes=int(self.files[rank] * self.now),
            call_counters=(self.made[rank],),
            **shown,
        )

    def _flight(self, rank):
        made = self.made[rank]
        calls = (DispatchedCall(0.0, "0-1", made, 77, 1, 1),) if made else ()
        compiling = ("jit(step)", 3.0) if rank in self.compiling else None
        sites = {1: ("/job/train.py:2 step",)}
        return Flight(level=EVERY_CALL, compiling=compiling, calls=calls, call_counts={"0-1": made}, sites=sites)


# ---- --stall-notice: who is told of


@pytest.mark.parametrize(
    "other",
    [IN_OTHER_CALL, IN_LOCK, ASLEEP, ("", ProcessState.STOPPED), IN_CALL],
    ids=["in another call", "in a lock", "sleeping", "stopped", "in the same call"],
)
def test_ranks_that_wait_for_each_other_are_reported_after_30_s_and_then_half_as_often(other):
    job = Clock(IN_CALL, other).wait(600)
    first, *later = job.told
    assert 30 <= first <= 40
    gaps = [after - before for before, after in pairwise(job.told)]
    assert len(later) == 4 and all(after >= 1.9 * before for before, after in pairwise(gaps))


# What ranks 0 and 1 do, how many cores rank 1 uses, and when that is told at the earliest and the latest; never if it
# is progress.
NEVER = math.inf, math.inf
DOINGS = {
    "all in locks": (IN_LOCK, IN_LOCK, 0.0, (30, 40)),
    "one loops, without CPU time": (IN_CALL, LOOPS, 0.0, (60, 80)),
    "one loops in Python while another waits": (IN_CALL, LOOPS, 1.0, (60, 80)),
    "one loads data": (IN_CALL, LOADS, 0.0, (60, 80)),
    "one waits for data": (IN_CALL, IN_QUEUE, 0.0, (60, 80)),
    "one restores a checkpoint": (IN_CALL, RESTORES, 0.0, (60, 80)),
    "one does not answer": (IN_CALL, ("", ""), 0.0, (60, 80)),
    "one only sleeps between looks": (IN_CALL, ASLEEP, 0.2, (30, 90)),
    "a compiler uses other processes": (IN_CALL, WAITS_FOR_COMPILER, 0.0, (300, 360)),
    "all compute": (LOOPS, LOOPS, 1.0, NEVER),
    "all load data": (LOADS, LOADS, 0.0, NEVER),
    "all wait for data": (IN_QUEUE, IN_QUEUE, 0.0, NEVER),
    "all sleep": (ASLEEP, ASLEEP, 0.0, NEVER),
    "one traces": (IN_CALL, TRACES, 1.0, NEVER),
    "one compiles": (IN_CALL, COMPILES, 1.0, NEVER),
    "one compiles in threads": (IN_CALL, WAITS_FOR_COMPILER, 1.0, NEVER),
    "one computes in JAX": (IN_CALL, IN_CALL, 1.5, NEVER),
    "one works in threads": (IN_CALL, IN_THREADS, 0.5, NEVER),
    "one restores a checkpoint in threads": (IN_CALL, RESTORES, 0.5, NEVER),
    "one is debugged": (IN_CALL, AT_PROMPT, 0.0, NEVER),
    "one is at its end": (AT_END, ASLEEP, 0.0, (30, 40)),
    "all are at their end": (AT_END, AT_END, 0.0, (30, 40)),
    "a gang has nothing to do": (IDLE_GANG, IDLE_GANG, 0.0, NEVER),
    "a gang's rank loads data": (IDLE_GANG, LOADS, 0.0, NEVER),
}


@pytest.mark.parametrize("first", [IN_CALL, IN_QUEUE], ids=["another waits for it", "all wait for data"])
@pytest.mark.parametrize(
    "helpers",
    [Helpers((ChildProcess(7, status=-9),)), Helpers(lost_threads=(LostThread("Loader", "ValueError"),)), NO_HELPERS],
    ids=["a process", "a thread", "there is none"],
)
def test_a_rank_that_waits_for_data_of_an_ended_thread_or_process_is_reported_at_once(first, helpers):
    job = Clock(first, IN_QUEUE)
    job.helpers = {0: helpers, 1: helpers}
    assert 30 <= job.wait(60).told[0] <= 40
    job = Clock(first, IN_QUEUE)
    job.helpers = {0: Helpers((ChildProcess(7),)), 1: Helpers((ChildProcess(8),))}  # live ones may bring it
    assert not job.wait(59).told


@pytest.mark.parametrize(("first", "other", "cores", "told"), DOINGS.values(), ids=DOINGS)
def test_a_stalled_job_is_reported_after_the_time_in_which_it_may_recover(first, other, cores, told):
    job = Clock(first, other)
    job.cpu = {0: cores if first is LOOPS else 0.0, 1: cores}
    earliest, latest = told
    assert earliest <= min(job.wait(min(latest + 10, 600)).told, default=math.inf) <= latest


def test_a_rank_that_reads_data_while_another_waits_is_not_reported():
    job = Clock(IN_CALL, LOADS)
    job.cpu[1], job.files[1] = 1.0, 1e6
    assert job.wait(600).told == []


@pytest.mark.parametrize("sign", ["written", "made"])
def test_output_and_calls_are_progress(sign):
    job = Clock(IN_CALL, IN_OTHER_CALL)
    for _ in range(30):
        getattr(job, sign)[1] += 1
        job.wait(10)
    assert job.told == [] and not any(job.asked)  # only a silent job gets signals
    assert job.wait(60).told and job.asked[-1]


def test_a_job_that_stalls_repeatedly_is_reported_less_and_less_often():
    job = Clock(IN_CALL, LOADS)
    for _ in range(20):
        job.made[1] += 1
        job.wait(150)
    assert len(job.told) == 2


def test_a_job_that_stands_still_for_long_or_has_thousands_of_ranks_is_checked_less_often():
    assert len(Clock(ASLEEP, ASLEEP).wait(3600).asked) < 80
    job = Clock(*[LOOPS] * 4000)
    job.cpu = dict.fromkeys(job.ranks, 1.0)
    assert len(job.wait(200).asked) <= 14


# ---- devices that compute by themselves, where waiting may cost CPU time


def polling(calls_of_rank_1):
    job = Clock(POLLS, POLLS, polls=True)
    job.cpu, job.made = {0: 1.0, 1: 1.0}, {0: 5, 1: calls_of_rank_1}
    return job


def test_one_call_of_all_gpus_may_take_long_but_a_rank_that_has_not_made_it_is_reported_even_if_all_poll():
    assert polling(5).wait(600).told == []
    assert 30 <= polling(4).wait(90).told[0] <= 40


@pytest.mark.parametrize(
    ("other", "cores", "by_recorder", "else_"),
    [(LOOPS, 1.0, 60, 120), (LOADS, 0.0, 60, 120), (ASLEEP, 0.0, 30, 60), (WAITS_FOR_COMPILER, 0.0, 300, 600)],
    ids=["spins", "loads data", "sleeps", "waits for its compiler"],
)
def test_a_lag_that_recorders_show_is_reported_as_soon_as_on_a_cpu(other, cores, by_recorder, else_):
    for made, first in (({0: 5, 1: 4}, by_recorder), ({0: 5, 1: 5}, else_)):
        job = Clock(POLLS, other, polls=True)
        job.cpu, job.made = {0: 1.0, 1: cores}, made
        assert first <= job.wait(first + 80).told[0]


def test_a_rank_that_moves_within_jax_is_reported_only_once_it_stays():
    job = polling(4)
    for line in range(30):
        job.ranks[1] = (in_call(line), RUNS)
        job.wait(10)
    assert job.told == []
    assert job.wait(90).told


def test_all_ranks_in_one_call_of_a_gpu_are_in_doubt_more_and_more_seldom():
    job = Clock(POLLS, POLLS, polls=True).wait(1000)
    assert job.told == [] and [round(at, -1) for at in job.in_doubt] == [60, 130, 270, 540]
    assert Clock(IN_CALL, IN_CALL, polls=False).wait(1000).in_doubt == []
    assert Clock(POLLS, LOOPS, polls=True).wait(1000).in_doubt == []


# ---- a debugger


def test_while_a_rank_is_debugged_the_clock_stands_still():
    job = Clock(IN_CALL, IN_LOCK, limit=300.0)
    job.debugged.add(1)
    job.wait(3000)
    assert job.told == [] and job.over_at is None
    job.debugged.discard(1)
    job.wait(400)
    assert job.told and 3300 <= job.over_at <= 3310


def test_a_rank_that_has_ended_in_the_debugger_holds_nothing():
    job = Clock(IN_CALL, IN_LOCK, IN_OTHER_CALL)
    job.debugged.add(1)
    job.wait(100)
    del job.ranks[1]
    assert job.wait(100).told


# ---- --stall-timeout


STOPPED = 60, 62


@pytest.mark.parametrize(
    ("first", "other", "cores", "over"),
    [
        *((IN_CALL, other, 0.0, STOPPED) for other in (IN_LOCK, ASLEEP, LOADS, AT_PROMPT)),
        (IN_CALL, LOOPS, 0.7, STOPPED),
        *((IN_CALL, other, 1.0, NEVER) for other in (TRACES, COMPILES)),
        *((other, LOOPS, 1.0, NEVER) for other in (LOOPS, ASLEEP)),
    ],
)
def test_a_job_without_progress_is_stopped_in_time_and_one_that_works_is_not(first, other, cores, over):
    job = Clock(first, other, notice=0.0, limit=60.0)
    job.cpu[1] = cores
    earliest, latest = over
    assert earliest <= (job.wait(600).over_at or math.inf) <= latest


def test_both_options_may_be_given_or_none():
    job = Clock(IN_CALL, ASLEEP, limit=300.0).wait(400)
    assert 30 <= job.told[0] <= 40 and 300 <= job.over_at <= 302
    assert not StallDetector(0.0, notice=0.0, limit=None).is_needed


@pytest.mark.parametrize(
    ("polls", "compiling", "is_over"), [(True, set(), True), (False, set(), False), (True, {0}, False)]
)
def test_polling_in_jax_on_a_gpu_does_not_count_as_progress_but_compiling_and_computing_on_a_cpu_do(
    polls, compiling, is_over
):
    job = Clock(POLLS, notice=0.0, limit=60.0, polls=polls)
    job.cpu[0], job.compiling = 1.0, compiling
    assert (job.wait(200).over_at is not None) is is_over
