"""After a failure, SIGTERM and time for the ranks that have not failed: with --grace, and on GPUs."""

import signal

from jaxrun.controller.head.job_shutdown import SETTLE_S, TEARDOWN_S
from jaxrun.protocol.worker_messages import Exit, SignalHandlers

FAILED_MS = 1000 * SETTLE_S  # when the cause is known


def handle_sigterm(job, *ranks):
    return job.handle(*(SignalHandlers(rank, False, True, own_termination=True) for rank in ranks))


def failing(job):
    """Rank 1 raises an exception, runs its exit handlers, and exits."""
    return job.handle(job.failure(1)).wait(0.1).exit(1, 1)


def test_ranks_that_handle_sigterm_have_the_time_of_grace_if_another_fails(simulate):
    job = failing(handle_sigterm(simulate(4, grace=20.0).run(), 2, 3))
    assert job.kills(signal.SIGTERM) == [(FAILED_MS, (0, 2, 3))] and not job.kills()
    assert job.lines == ["rank 1 failed; stopping 3 others (SIGTERM; SIGKILL follows in 20 s)"]
    job.wait(4).exit(3, 2)
    assert not job.kills()
    job.wait(1).exit(-signal.SIGTERM, 3).wait(1)
    assert job.kills() == [(5100, (0,))] and job.outcome.end.reason == "failed"
    assert [end.killed_by_launcher for end in job.outcome.workers] == [True, False, True, True]


def test_ranks_that_are_not_done_after_the_grace_are_killed(simulate):
    job = failing(handle_sigterm(simulate(3, grace=2.0).run(), 0, 2)).wait(5)
    assert job.kills() == [(2000 + FAILED_MS, (0, 2))] and job.verdict.culprits == (1,)


def test_a_handler_that_ends_the_program_is_no_cause_and_rank_0_leaves_last(simulate):
    job = failing(handle_sigterm(simulate(3, grace=20.0).run(), 0, 2))
    job.handle(job.failure(0), job.failure(2, "OSError")).wait(1)
    assert job.ranks_sent(Exit) == [] and not job.kills()
    job.exit(1, 2)
    assert job.ranks_sent(Exit) == [0]
    job.exit(1, 0)
    assert not job.kills() and job.verdict.culprits == (1,) and job.verdict.exit_code == 1


def test_programs_that_end_with_0_leave_and_the_rest_is_killed(simulate):
    job = failing(handle_sigterm(simulate(4, grace=20.0).run(), 0, 2)).done(2)
    assert job.ranks_sent(Exit) == [2] and not job.kills()
    job.done(0).wait(1)
    assert [(at, sorted(ranks)) for at, ranks in job.kills()] == [(100, [0, 2, 3])]
    assert job.verdict.culprits == (1,)


def test_without_grace_or_a_handler_they_are_killed_at_once(simulate):
    for job in (handle_sigterm(simulate(3).run(), 0, 2), simulate(3, grace=20.0).run().listen()):
        assert failing(job).kills() == [(FAILED_MS, (2,)), (100, (0,))] and not job.kills(signal.SIGTERM)


def test_on_gpus_sigterm_and_a_short_time_come_first(simulate):
    job = failing(simulate(3, platform="gpu").run()).wait(5)
    assert job.kills(signal.SIGTERM) == [(FAILED_MS, (0, 2))]
    assert job.kills() == [(1000 * TEARDOWN_S + FAILED_MS, (0, 2))]


def test_a_grace_of_0_kills_at_once_on_gpus_too(simulate):
    job = failing(handle_sigterm(simulate(3, platform="gpu", grace=0.0).run(), 0, 2))
    assert not job.kills(signal.SIGTERM) and job.kills()


def test_a_signal_meanwhile_kills_at_once(simulate):
    job = failing(handle_sigterm(simulate(3, grace=20.0).run(), 0, 2)).interrupt(signal.SIGINT)
    assert job.kills() == [(100, (0, 2))]
