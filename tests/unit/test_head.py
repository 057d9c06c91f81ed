"""The head brings a job together and ends it, driven by histories of events."""

import signal
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.controller.head.head_state import JobPhase
from jaxrun.job_events.events import Tick
from jaxrun.protocol.agent_messages import StartFailed, WorkerExited, WorkerSpawned
from jaxrun.protocol.codec import list_handlers
from jaxrun.protocol.worker_messages import CoordinatorReady, Exit, Join, Run, StartCoordinator, ThreadFailed

LOST = {"error": "JaxRuntimeError", "message": "Gloo all-reduce failed: Connection closed by peer"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_clean_run_ends_when_all_have_left_rank_0_last(simulate, size):
    job = simulate(size).run()
    others = list(range(1, size))
    assert job.ranks_sent(StartCoordinator) == [0]
    assert job.ranks_sent(Join) == others
    assert sorted(job.ranks_sent(Run)) == list(range(size))
    job.done(*range(size))
    assert job.ranks_sent(Exit) == (others or [0])
    job.exit(0, *others)
    assert sorted(job.ranks_sent(Exit)) == list(range(size))
    assert job.outcome is None
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.statuses == [0] * size
    assert all(end.finished and not end.killed_by_launcher for end in job.outcome.workers)
    assert not job.killed and not job.printed


def test_nobody_joins_before_the_coordinator_listens_and_without_limits_the_head_then_sleeps(simulate):
    job = simulate(3).say_hello()
    assert job.ranks_sent(Join) == []
    job.handle(CoordinatorReady(0, "127.0.0.1:4711", master_port=4712))
    assert job.sent[-1][1:] == ((1, 2), Join("127.0.0.1:4711", master_port=4712))
    assert simulate(2).run().head.deadline() is None


def test_a_slow_start_is_reported_after_2_s_and_then_every_second_until_it_is_over(simulate):
    job = simulate(4, hosts={0: "h1", 1: "h1", 2: "h2", 3: "h2"}).spawn()
    job.handle(job.hello(0), job.hello(2)).wait(13)
    job.handle(job.hello(1), job.hello(3)).wait(10)
    assert [at for at, _ in job.statuses_shown] == [float(second) for second in range(2, 24)]
    assert job.statuses_shown[0][1] == "starting: 2 of 4 ranks after 2 s, waiting for ranks 1, 3 (h1, h2)"
    assert job.statuses_shown[-1][1] == "joining: 0 of 4 ranks after 23 s, waiting for ranks 0-3 (h1, h2)"
    job.handle(CoordinatorReady(0, "h1:4711"), *(job.device_report(rank) for rank in range(4)))
    assert job.wait(10).statuses_shown[22:] == [(23.0, "")] and job.printed == []


def test_a_rank_that_never_starts_is_named_with_its_host(simulate):
    job = simulate(4, hosts={0: "h1", 1: "h1", 2: "h2", 3: "h2"}, init=30.0).spawn()
    job.handle(job.hello(0), job.hello(1), job.hello(2)).wait(31)
    assert job.outcome.end.reason == "unavailable"
    assert job.outcome.end.text.startswith("3 of 4 ranks started within 30 s; missing: rank 3 (h2)\n")
    assert job.kills() == [(30000, (0, 1, 2, 3))]


def test_ranks_that_do_not_join_in_time_are_named(simulate):
    job = simulate(2, init=30.0).join()
    job.handle(job.device_report(1)).wait(31)
    assert job.outcome.end.text.startswith("1 of 2 ranks joined within 30 s; missing: rank 0\n")


# The texts are in test_consistency.py.
@pytest.mark.parametrize(
    ("wrong", "text"), [({"local_devices": 2}, "local device counts"), ({"nonce": ""}, "rank 1 joined")]
)
def test_the_program_is_refused_when_a_device_report_is_wrong(simulate, wrong, text):
    job = simulate(2).join()
    job.handle(job.device_report(0), job.device_report(1, **wrong)).wait(1)
    assert job.ranks_sent(Run) == []
    assert job.outcome.end.reason == "refused" and job.outcome.end.text.startswith(text)
    assert job.kills() == [(0, (0, 1))] and job.statuses == [-9, -9]
    assert all(end.killed_by_launcher for end in job.outcome.workers)


REFUSED_HELLOS = {
    "another version": (
        [{"rank": 0}, {"rank": 1, "versions": {"jax": "0.8.0"}}],
        "the processes differ in jax, python\n",
    ),
    "two processes with one rank": (
        [{"rank": 1, "pid": 7}, {"rank": 1, "pid": 8}],
        "two processes say that they are rank 1: process 7 on h1 and process 8 on h1\n",
    ),
    "a rank that the job does not have": (
        [{"rank": 5}],
        "a process says that it is rank 5, but the job has ranks 0 to 1\n",
    ),
}


@pytest.mark.parametrize(("hellos", "text"), REFUSED_HELLOS.values(), ids=REFUSED_HELLOS)
def test_nobody_joins_when_the_hellos_show(simulate, hellos, text):
    job = simulate(2).spawn()
    job.handle(*(job.hello(**changes) for changes in hellos)).wait(1)
    assert job.outcome.end.reason == "refused" and job.outcome.end.text.startswith(text)
    assert job.ranks_sent(StartCoordinator) == []


def test_workers_that_cannot_be_started_end_the_job(simulate):
    job = simulate(2).handle(StartFailed("jax could not be imported", "Traceback\n"))
    assert job.outcome.end.reason == "unavailable" and job.outcome.end.traceback == "Traceback\n"
    assert job.statuses == [None, None]


def test_a_worker_that_appears_while_the_job_is_stopped_is_killed_too(simulate):
    job = simulate(3).spawn(0)
    job.interrupt(signal.SIGINT).handle(WorkerSpawned(1, 1001)).wait(1)
    assert job.kills() == [(0, (0,)), (0, (1,))]
    assert job.statuses == [-9, -9, None]


@dataclass(frozen=True)
class History:
    """(milliseconds, event) of a job of four that runs; who is named, whom SIGKILL hits when, its end."""

    events: tuple
    printed: tuple = ()
    kills: tuple = ()
    finished: int = 0
    reason: str = "failed"


def failure(rank, **more):
    return lambda job: job.handle(job.failure(rank, **more))


def exits(status, *ranks):
    return lambda job: job.exit(status, *ranks)


def done(*ranks):
    return lambda job: job.done(*ranks)


HISTORIES = {
    "a report, then its exit": History(
        ((0, failure(2)), (5, exits(1, 2))), ("rank 2 failed; stopping 3 others",), ((30, (0, 1, 3)),), 31
    ),
    "an exit without a report": History(
        ((0, exits(7, 2)),), ("rank 2 failed; stopping 3 others",), ((30, (0, 1, 3)),), 31
    ),
    "death by a signal": History(((0, exits(-9, 0)),), ("rank 0 failed; stopping 3 others",), ((30, (1, 2, 3)),), 31),
    "collateral reports first, the cause within the window": History(
        ((0, failure(0, **LOST)), (10, failure(1, **LOST)), (20, exits(-11, 3)), (25, exits(1, 0, 1))),
        ("rank 3 failed; stopping 1 other",),
        ((30, (2,)),),
        31,
    ),
    "collateral reports first, the cause after the window": History(
        ((0, failure(0, **LOST)), (5, exits(1, 0)), (200, exits(-11, 3))),
        ("rank 3 failed; stopping 2 others",),
        ((200, (1, 2)),),
        201,
    ),
    "collateral reports only, until patience ends": History(
        ((0, failure(0, **LOST)), (5, exits(1, 0))), ("rank 0 failed; stopping 3 others",), ((500, (1, 2, 3)),), 501
    ),
    "a clear cause does not wait for patience": History(
        ((0, failure(0, **LOST)), (29, failure(2))),
        ("rank 2 failed; stopping 2 others",),
        ((30, (1, 3)), (5030, (0, 2))),
        5031,
    ),
    "all ranks the same error": History(
        ((0, failure(3)), (1, failure(1)), (2, failure(0)), (3, failure(2)), (10, exits(1, 0, 1, 2, 3))), finished=10
    ),
    "all ranks the same error, with slow exit handlers": History(
        ((0, failure(3)), (1, failure(1)), (2, failure(0)), (3, failure(2)), (400, exits(1, 0, 1, 2, 3))),
        printed=("ranks 0-3 failed",),
        finished=400,
    ),
    "exit handlers that never end are killed after the grace": History(
        ((0, failure(2)), (100, exits(-6, 1))),
        ("rank 2 failed; stopping 3 others", "rank 2 did not end within 5 s; sent SIGKILL"),
        ((30, (1, 3)), (5030, (0, 2))),
        5031,
    ),
    "exit handlers need the coordinator of rank 0, which goes last": History(
        ((0, failure(2)), (100, exits(-6, 1)), (1000, exits(1, 2))),
        ("rank 2 failed; stopping 3 others",),
        ((30, (1, 3)), (1000, (0,))),
        1001,
    ),
    "a failure among ranks that are done": History(
        ((0, done(0, 1, 3)), (50, failure(2)), (60, exits(1, 2))),
        ("rank 2 failed; stopping 3 others",),
        ((80, (0, 1, 3)),),
        81,
    ),
    "a done rank that is killed": History(
        ((0, done(1)), (50, exits(-9, 1))), ("rank 1 failed; stopping 3 others",), ((80, (0, 2, 3)),), 81
    ),
    "os._exit(0) of all": History(((0, exits(0, 0, 1)), (50, exits(0, 2, 3))), finished=50, reason="ok"),
    "os._exit(0) of one, the others finish": History(
        ((0, exits(0, 2)), (500, done(0, 1, 3)), (501, exits(0, 1, 3)), (502, exits(0, 0))), finished=502, reason="ok"
    ),
    "os._exit(0) of rank 0, the others lose their coordinator": History(
        ((0, exits(0, 0)), (20, failure(1, **LOST)), (22, exits(-6, 2))),
        ("rank 0 failed; stopping 1 other",),
        ((520, (3,)), (5520, (1,))),
        5521,
    ),
    "a crash after everything was done": History(
        ((0, done(0, 1, 2, 3)), (1, exits(-11, 2)), (2, exits(0, 1, 3)), (3, exits(0, 0))), finished=3
    ),
    "a rank that is told to leave and stays": History(
        ((0, done(0, 1, 2, 3)), (1, exits(0, 1, 2, 3))),
        printed=("rank 0 did not end within 5 s; sent SIGKILL",),
        kills=((5000, (0,)),),
        finished=5001,
        reason="ok",
    ),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_a_job_ends_as_its_history_determines(simulate, history):
    job = simulate(4).run()
    for at, event in history.events:
        job.wait(at / 1000 - job.now)
        event(job)
    job.wait(20)
    assert tuple(text for text in job.lines if "did not end" not in text or text in history.printed) == history.printed
    assert tuple(job.kills()) == history.kills
    assert round(job.finished_at * 1000) == history.finished
    assert job.outcome.end.reason == history.reason
    assert None not in job.statuses


def test_a_failure_before_the_hello_is_a_failure(simulate):
    job = simulate(2).spawn().exit(0, 1).wait(1)
    assert job.outcome.end.reason == "failed" and job.outcome.run_at is None
    assert job.statuses == [-9, 0]


def test_an_end_keeps_all_that_is_known_of_a_worker(simulate):
    job = simulate(2, hosts={0: "h1", 1: "h2"}).run().wait(3)
    thread = ThreadFailed(1, 3.0, "Loader-1", "OSError", "Traceback\n")
    job.handle(
        thread, WorkerExited(1, -11, crash_dump="Fatal Python error", stderr_tail="last line", out_of_memory="it did")
    ).wait(1)
    end = job.outcome.workers[1]
    assert (end.rank, end.host, end.time, end.status) == (1, "h2", 3.0, -11)
    assert (end.thread_failures, end.failure) == ((thread,), None)
    assert (end.crash_dump, end.stderr_tail, end.out_of_memory) == ("Fatal Python error", "last line", "it did")
    assert job.lines == ["rank 1 (h2) failed; stopping 1 other"]
    assert job.outcome.run_at == 0.0 and job.outcome.decided_at == 3.0


def test_nothing_happens_after_the_end(simulate):
    job = simulate(1).run().done(0).exit(0, 0)
    assert job.head.phase is JobPhase.OVER and job.head.deadline() is None
    for event in (Tick(), WorkerExited(0, 1), job.failure(0), job.hello(0), StartFailed("late")):
        assert job.head.handle(event, 99.0) == []


STEPS = {
    "words": lambda job, rank: job.handle(job.failure(rank)),
    "lost": lambda job, rank: job.handle(job.failure(rank, **LOST)),
    "done": lambda job, rank: job.done(rank),
    "exit 0": lambda job, rank: job.exit(0, rank),
    "exit 1": lambda job, rank: job.exit(1, rank),
    "abort": lambda job, rank: job.exit(-6, rank),
    "hello": lambda job, rank: job.handle(job.hello(rank)),
    "SIGTERM": lambda job, _: job.interrupt(signal.SIGTERM),
    "SIGINT": lambda job, _: job.interrupt(signal.SIGINT),
    "SIGQUIT": lambda job, _: job.interrupt(signal.SIGQUIT),
    "a moment": lambda job, _: job.wait(0.04),
    "a while": lambda job, _: job.wait(11.0),
}


@given(
    size=st.integers(1, 4),
    running=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), max_size=12),
)
def test_any_order_of_events_ends_in_one_finish_once_all_have_ended(simulate, size, running, steps):
    job = simulate(size).run() if running else simulate(size).spawn()
    for name, rank in steps:
        if rank < size and rank not in job.exited:
            STEPS[name](job, rank)
        assert (job.outcome is not None) == (len(job.exited) == size)
    job.exit(0, *(rank for rank in range(size) if rank not in job.exited))
    assert job.head.phase is JobPhase.OVER
    assert job.statuses == [job.exited[rank] for rank in range(size)]


def test_commands_around_ranks_may_take_their_time_once_all_programs_have_ended(simulate):
    job = simulate(2, unhurried=True).run().done(0, 1).wait(600)
    assert not job.killed
    job.exit(0, 1).exit(0, 0).wait(1)
    assert job.outcome.end.reason == "ok"


def test_a_kind_of_event_has_one_handler():
    def handle(event, now):
        return []

    assert list_handlers({Tick: handle, WorkerSpawned | WorkerExited: handle}).keys() == {
        Tick,
        WorkerSpawned,
        WorkerExited,
    }
    with pytest.raises(ValueError, match="WorkerExited has two handlers"):
        list_handlers({WorkerSpawned | WorkerExited: handle, WorkerExited: handle})
