"""When a job stalls: what counts as progress, who is told when, and after how long it is stopped."""

from itertools import pairwise

import pytest

from jaxrun.head.stall_detector import StallDetector
from jaxrun.protocol.flight import DispatchedCall, Flight
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply

SITE = "/v/lib/python3.13/site-packages"
SLEEPS, RUNS, LOCKED = "hrtimer_nanosleep", "0", "futex_do_wait"


def dump(*frames, line=2):
    rows = [f'  File "{file}", line 1 in {function}' for file, function in frames]
    rows.append(f'  File "/home/me/train.py", line {line} in step')
    return "\n".join(["Thread 0x1 (most recent call first):", *rows, ""])


# What a rank does: its stack, and what the kernel says of its main thread.
IN_CALL = (dump((f"{SITE}/jax/_src/array.py", "_value")), LOCKED)
IN_OTHER_CALL = (dump((f"{SITE}/jax/_src/array.py", "_value"), line=7), LOCKED)
POLLS = (IN_CALL[0], RUNS)
LOOPS = (dump(), RUNS)
LOADS = (dump((f"{SITE}/numpy/lib/_npyio_impl.py", "load")), RUNS)
TRACES = (
    dump((f"{SITE}/jax/_src/core.py", "bind"), ("/home/me/model.py", "loss"), (f"{SITE}/jax/_src/pjit.py", "f")),
    RUNS,
)
COMPILES = (dump((f"{SITE}/jax/_src/compiler.py", "backend_compile_and_load")), RUNS)
WAITS_FOR_COMPILER = (COMPILES[0], LOCKED)
IN_QUEUE = (dump(("/usr/lib/python3.13/threading.py", "wait"), ("/usr/lib/python3.13/queue.py", "get")), LOCKED)
IN_LOCK = (dump(("/usr/lib/python3.13/threading.py", "wait")), LOCKED)
IN_THREADS = (dump(("/usr/lib/python3.13/threading.py", "join")), LOCKED)
ASLEEP = (dump(), SLEEPS)
AT_PROMPT = (
    dump(("/usr/lib/python3.13/cmd.py", "cmdloop"), ("/usr/lib/python3.13/pdb.py", "interaction")),
    "wait_woken",
)
RESTORES = (
    dump(("/usr/lib/python3.13/selectors.py", "select"), ("/usr/lib/python3.13/asyncio/base_events.py", "_run_once")),
    "ep_poll",
)
IDLE_GANG = (
    'Thread 0x1 (most recent call first):\n  File "/v/jaxrun/protocol/gang_messages.py", line 9 in read\n'
    '  File "/v/jaxrun_runtime/gang/calls.py", line 9 in _receive\n'
    '  File "/v/jaxrun_runtime/program.py", line 9 in run\n',
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
        self.told = []  # times
        self.asked = []  # purposes
        self.over_at = None
        self.last = None

    def wait(self, seconds):
        until = self.now + seconds
        while self.now + self.stall.next_check_s <= until:
            self.now += self.stall.next_check_s
            self.asked.append(self.stall.purpose)
            self.last = self.stall.update(self._reply(), self.now)
            if self.last.is_told:
                self.told.append(self.now)
            if self.last.is_over:
                self.over_at = self.now
                return self
        self.now = until
        return self

    def _reply(self):
        with_stacks = self.stall.purpose is SnapshotPurpose.STALL
        shown = self.ranks if with_stacks else {}
        return SnapshotReply(
            self.stall.purpose,
            stacks={rank: stack for rank, (stack, _) in shown.items()},
            kernel_waits={rank: wait for rank, (_, wait) in shown.items()},
            cpu_seconds={rank: self.cpu[rank] * self.now for rank in self.ranks},
            bytes_written={rank: self.written[rank] for rank in self.ranks},
            file_bytes={rank: int(self.files[rank] * self.now) for rank in self.ranks},
            call_counters={rank: (self.made[rank],) for rank in self.ranks},
            flights={rank: self._flight(rank) for rank in shown},
        )

    def _flight(self, rank):
        made = self.made[rank]
        calls = (DispatchedCall(0.0, "0-1", made, 77, 1, 1),) if made else ()
        compiling = ("jit(step)", 3.0) if rank in self.compiling else None
        sites = {1: ("/home/me/train.py:2 step",)}
        return Flight(level=EVERY_CALL, compiling=compiling, calls=calls, call_counts={"0-1": made}, sites=sites)


# ---- --stall-notice: who is told of


@pytest.mark.parametrize(
    "other",
    [IN_OTHER_CALL, IN_LOCK, ASLEEP, ("", "stopped by a signal (SIGCONT lets it go on)"), IN_CALL],
    ids=["in another call", "in a lock", "sleeping", "stopped", "in the same call"],
)
def test_ranks_that_wait_for_each_other_are_told_of_after_30_s_and_then_half_as_often(other):
    job = Clock(IN_CALL, other).wait(600)
    first, *later = job.told
    assert 30 <= first <= 40
    gaps = [after - before for before, after in pairwise(job.told)]
    assert len(later) == 4 and all(after >= 1.9 * before for before, after in pairwise(gaps))


def test_all_in_locks_are_told_of():
    assert Clock(IN_LOCK, IN_LOCK).wait(40).told


@pytest.mark.parametrize("other", [LOOPS, LOADS, IN_QUEUE, RESTORES, ("", "")])
def test_a_rank_that_may_go_on_by_itself_is_told_of_later(other):
    assert 60 <= Clock(IN_CALL, other).wait(90).told[0] <= 80


def test_a_rank_that_loops_in_python_while_another_waits_is_told_of():
    job = Clock(IN_CALL, LOOPS)
    job.cpu[1] = 1.0
    assert 60 <= job.wait(90).told[0] <= 80


def test_a_rank_that_only_sleeps_between_looks_does_not_work():
    job = Clock(IN_CALL, ASLEEP)
    job.cpu[1] = 0.2
    assert job.wait(90).told


@pytest.mark.parametrize(
    ("ranks", "cpu"),
    [
        ((LOOPS, LOOPS), (1.0, 1.0)),
        ((LOADS, LOADS), (0.0, 0.0)),
        ((IN_QUEUE, IN_QUEUE), (0.0, 0.0)),
        ((ASLEEP, ASLEEP), (0.0, 0.0)),
        ((IN_CALL, TRACES), (0.0, 1.0)),
        ((IN_CALL, COMPILES), (0.0, 1.0)),
        ((IN_CALL, WAITS_FOR_COMPILER), (0.0, 1.0)),
        ((IN_CALL, IN_CALL), (0.0, 1.5)),
        ((IN_CALL, IN_THREADS), (0.0, 0.5)),
        ((IN_CALL, RESTORES), (0.0, 0.5)),
        ((IN_CALL, AT_PROMPT), (0.0, 0.0)),
        ((IDLE_GANG, IDLE_GANG), (0.0, 0.0)),
        ((IDLE_GANG, LOADS), (0.0, 0.0)),
    ],
    ids=[
        "all compute",
        "all load data",
        "all wait for data",
        "all sleep",
        "one traces",
        "one compiles",
        "one compiles in threads",
        "one computes in JAX",
        "one works in threads",
        "one restores a checkpoint in threads",
        "one is debugged",
        "a gang has nothing to do",
        "a gang's rank loads data",
    ],
)
def test_a_job_that_makes_progress_is_not_told(ranks, cpu):
    job = Clock(*ranks)
    job.cpu = dict(enumerate(cpu))
    assert job.wait(600).told == []


def test_a_rank_that_reads_its_data_while_another_waits_is_not_told_of():
    job = Clock(IN_CALL, LOADS)
    job.cpu[1], job.files[1] = 1.0, 1e6
    assert job.wait(600).told == []


def test_a_compiler_that_uses_other_processes_has_ten_times_as_long():
    assert 300 <= Clock(IN_CALL, WAITS_FOR_COMPILER).wait(400).told[0] <= 360


def test_output_and_calls_are_progress():
    for sign in ("written", "made"):
        job = Clock(IN_CALL, IN_OTHER_CALL)
        for _ in range(30):
            getattr(job, sign)[1] += 1
            job.wait(10)
        assert job.told == []
        assert job.wait(60).told, sign


def test_a_job_that_stalls_again_and_again_is_told_of_less_and_less():
    job = Clock(IN_CALL, LOADS)
    for _ in range(20):
        job.made[1] += 1
        job.wait(150)
    assert len(job.told) == 2


def test_only_a_job_that_is_silent_gets_signals():
    job = Clock(IN_CALL, IN_OTHER_CALL)
    for _ in range(30):
        job.made[0] += 1
        job.wait(10)
    assert set(job.asked) == {SnapshotPurpose.PROGRESS}
    assert job.wait(30).asked[-1] is SnapshotPurpose.STALL


def test_a_job_that_stands_still_for_long_is_checked_less_often():
    assert len(Clock(ASLEEP, ASLEEP).wait(3600).asked) < 80


def test_a_job_of_thousands_of_ranks_is_checked_less_often():
    job = Clock(*[LOOPS] * 4000)
    job.cpu = dict.fromkeys(job.ranks, 1.0)
    assert len(job.wait(200).asked) <= 14


def test_without_either_option_nothing_is_checked():
    assert not StallDetector(0.0, notice=0.0, limit=None).is_needed


# ---- devices that compute by themselves, where waiting may cost CPU time


def test_the_same_call_of_a_gpu_may_take_long():
    job = Clock(POLLS, POLLS, polls=True)
    job.cpu = {0: 1.0, 1: 1.0}
    assert job.wait(600).told == []


def test_a_rank_that_lacks_a_call_of_a_gpu_is_told_of_although_all_poll():
    job = Clock(POLLS, POLLS, polls=True)
    job.cpu, job.made = {0: 1.0, 1: 1.0}, {0: 5, 1: 4}
    assert 60 <= job.wait(90).told[0] <= 80


def test_a_rank_that_moves_within_jax_is_told_of_only_once_it_stays(monkeypatch):
    job = Clock(POLLS, POLLS, polls=True)
    job.cpu, job.made = {0: 1.0, 1: 1.0}, {0: 5, 1: 4}
    for line in range(30):
        job.ranks[1] = (dump((f"{SITE}/jax/_src/array.py", "_value"), line=line), RUNS)
        job.wait(10)
    assert job.told == []
    assert job.wait(90).told


# ---- a debugger


def test_while_a_rank_is_debugged_the_clock_stands_still():
    job = Clock(IN_CALL, IN_LOCK, limit=300.0)
    job.stall.hold(1)
    job.wait(3000)
    assert job.told == [] and job.over_at is None
    job.stall.release(1)
    job.wait(400)
    assert job.told and 3300 <= job.over_at <= 3310


def test_a_rank_that_has_ended_in_the_debugger_holds_nothing():
    job = Clock(IN_CALL, IN_LOCK, IN_OTHER_CALL)
    job.stall.hold(1)
    job.wait(100)
    del job.ranks[1]
    assert job.wait(100).told


# ---- --stall-timeout


@pytest.mark.parametrize("other", [LOOPS, IN_LOCK, ASLEEP, LOADS, AT_PROMPT])
def test_a_job_without_progress_is_stopped_in_time(other):
    job = Clock(IN_CALL, other, notice=0.0, limit=60.0)
    job.cpu[1] = 0.7 if other is LOOPS else 0.0
    assert 60 <= job.wait(200).over_at <= 62


@pytest.mark.parametrize("ranks", [(LOOPS, LOOPS), (ASLEEP, LOOPS), (IN_CALL, TRACES), (IN_CALL, COMPILES)])
def test_a_job_that_works_is_not_stopped(ranks):
    job = Clock(*ranks, notice=0.0, limit=60.0)
    job.cpu[1] = 1.0
    assert job.wait(600).over_at is None


def test_both_options_may_be_given():
    job = Clock(IN_CALL, ASLEEP, limit=300.0).wait(400)
    assert 30 <= job.told[0] <= 40 and 300 <= job.over_at <= 302


def test_polling_in_jax_is_no_progress_on_a_gpu_and_computing_is_on_a_cpu():
    for polls in (True, False):
        job = Clock(POLLS, notice=0.0, limit=60.0, polls=polls)
        job.cpu[0] = 1.0
        assert (job.wait(200).over_at is not None) is polls


def test_compiling_for_a_gpu_is_progress():
    job = Clock(POLLS, notice=0.0, limit=60.0, polls=True)
    job.cpu[0], job.compiling = 1.0, {0}
    assert job.wait(200).over_at is None
