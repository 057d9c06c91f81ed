"""A running job that Ctrl-C, SIGTERM or SIGHUP ends, and when its workers count as ended."""

import signal

import pytest

from jaxrun.controller.head.head_state import JobPhase
from jaxrun.controller.head.interruption import REPEATED_SIGNAL_S
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.worker_messages import Exit, Interrupted, SignalHandlers

IN_JAX = """Current thread 0x0001 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 7 in _value
  File "/home/me/train.py", line 12 in <module>
"""
TERMINATION = (signal.SIGTERM, signal.SIGHUP)


def interrupted(job, *ranks):
    """KeyboardInterrupt is raised in these ranks, and ends their programs."""
    for rank in ranks:
        job.handle(Interrupted(rank, job.now), job.failure(rank, "KeyboardInterrupt", "", 130))
    return job


# ---- Ctrl-C


def test_ctrl_c_is_sigint_for_every_rank_and_all_leave_with_rank_0_last(simulate):
    job = simulate(3).run().interrupt(signal.SIGINT)
    assert job.killed == [(0.0, signal.SIGINT, (0, 1, 2))]
    assert job.lines == ["Ctrl-C: KeyboardInterrupt in ranks 0-2; another Ctrl-C kills at once"]
    interrupted(job, 0, 1).exit(130, 1)
    assert job.ranks_sent(Exit) == []
    interrupted(job, 2).exit(130, 2)
    assert job.ranks_sent(Exit)[-1] == 0
    job.exit(130, 0)
    assert job.outcome.reason == "interrupted" and job.outcome.signum == signal.SIGINT and not job.kills()


def test_ranks_that_catch_the_interrupt_and_finish_leave_too(simulate):
    job = interrupted(simulate(3).run().interrupt(signal.SIGINT), 0)
    job.handle(Interrupted(1, 0.0), Interrupted(2, 0.0)).done(1, 2)
    assert job.ranks_sent(Exit) == [1, 2]
    job.exit(0, 1, 2)
    assert job.ranks_sent(Exit) == [1, 2, 0]
    job.exit(130, 0)
    assert job.outcome.reason == "interrupted" and not job.kills()


def test_a_rank_that_the_interrupt_does_not_reach_is_shown_and_killed_after_the_grace(simulate):
    job = simulate(3).run()
    job.stacks = {2: IN_JAX}
    interrupted(job.interrupt(signal.SIGINT), 0, 1).exit(130, 1).wait(10)
    assert job.kills(signal.SIGTERM) == [(5000, (2,))] and job.kills() == [(5100, (2,))]
    assert job.lines[1].startswith("rank 2 did not end within 5 s; sent SIGTERM and SIGKILL · ")
    assert "train.py:12" in job.lines[1]
    assert job.outcome is None and job.ranks_sent(Exit) == [0]
    job.exit(130, 0)
    assert job.outcome.stacks == {2: IN_JAX} and [end.killed_by_launcher for end in job.outcome.workers] == [0, 0, 1]


def test_a_late_rank_that_cannot_say_where_it_is_is_killed_as_well(simulate):
    job = simulate(2).run().interrupt(signal.SIGINT)
    job.answers = False
    interrupted(job, 0).wait(10)
    assert job.kills() == [(6000, (1,))]


def test_handlers_may_take_longer_than_the_grace_but_not_for_ever(simulate):
    job = simulate(2).run().interrupt(signal.SIGINT)
    job.handle(Interrupted(0, 0.0), Interrupted(1, 0.0)).wait(29)
    assert not job.kills()
    job.wait(10)
    assert job.kills() == [(30_100, (0, 1))]


def test_a_program_with_its_own_handler_of_sigint_has_as_long_as_one_with_handlers_of_the_exception(simulate):
    job = simulate(2).run().handle(SignalHandlers(1, True, False)).interrupt(signal.SIGINT)
    interrupted(job, 0).wait(29)
    assert not job.kills()


def test_late_rank_0_is_killed_last_as_jax_aborts_the_others_without_it(simulate):
    job = simulate(3).run().interrupt(signal.SIGINT)
    job.handle(Interrupted(1, 0.0), Interrupted(2, 0.0)).wait(10)
    assert job.kills(signal.SIGTERM) == [(5000, (0,))] and not job.kills()
    interrupted(job, 1, 2).exit(130, 1, 2).wait(3)
    assert job.kills() == [(11_000, (0,))] and job.outcome.reason == "interrupted"


@pytest.mark.parametrize("first", [signal.SIGINT, *TERMINATION])
@pytest.mark.parametrize("second", [signal.SIGINT, *TERMINATION])
def test_a_second_signal_kills_at_once(simulate, first, second):
    job = simulate(2).run().listen().interrupt(first).wait(0.3)
    job.interrupt(second).wait(1)
    assert job.kills() == [(300, (0, 1))]
    assert job.outcome.reason == "interrupted" and job.outcome.signum == first


@pytest.mark.parametrize("signum", [signal.SIGINT, *TERMINATION])
def test_a_signal_that_a_wrapper_sends_twice_is_one(simulate, signum):
    job = simulate(2).run().listen().interrupt(signum).wait(REPEATED_SIGNAL_S / 2).interrupt(signum)
    assert job.head.phase is JobPhase.TERMINATING and not job.kills()


# ---- SIGTERM and SIGHUP


@pytest.mark.parametrize("signum", TERMINATION)
def test_where_nobody_listens_to_sigterm_the_job_ends_at_once(simulate, signum):
    job = simulate(3).run().listen(1).handle(SignalHandlers(1, False, False)).interrupt(signum).wait(1)
    assert job.kills() == [(0, (0, 1, 2))] and not job.kills(signal.SIGTERM)
    assert job.outcome.reason == "interrupted" and job.outcome.signum == signum and job.outcome.unheard


@pytest.mark.parametrize("signum", TERMINATION)
def test_ranks_that_listen_get_sigterm_and_are_killed_after_the_grace(simulate, signum):
    job = simulate(3, grace=4.0).run().listen().interrupt(signum)
    assert job.kills(signal.SIGTERM) == [(0, (0, 1, 2))]
    name = signal.Signals(signum).name
    assert job.lines == [f"{name}: asked ranks 0-2 to end (SIGTERM); SIGKILL follows in 4 s, or at once with Ctrl-C"]
    job.wait(1).exit(-signal.SIGTERM, 1)
    job.wait(10)
    assert job.kills() == [(4100, (0, 2))]
    assert "ranks 0, 2 did not end within 4 s" in job.lines[1]
    assert job.outcome.reason == "interrupted" and job.outcome.signum == signum and not job.outcome.unheard
    assert [(end.status, end.killed_by_launcher) for end in job.outcome.workers] == [
        (-9, True),
        (-15, False),
        (-9, True),
    ]


def test_the_notice_has_thirty_seconds_by_default(simulate):
    job = simulate(2).run().listen().interrupt(signal.SIGTERM).wait(40)
    assert job.kills() == [(30_100, (0, 1))]


def test_once_the_last_that_listens_has_ended_the_others_have_only_the_grace(simulate):
    job = simulate(3).run().listen(0, 1).interrupt(signal.SIGTERM).wait(1)
    job.done(0).wait(1)
    job.done(1).wait(10)
    assert job.kills() == [(7100, (2,))] and job.ranks_sent(Exit) == [1]


def test_a_job_that_ends_well_after_sigterm_was_preempted(simulate):
    job = simulate(2).run().listen().interrupt(signal.SIGTERM).wait(1)
    job.done(0, 1).exit(0, 1).exit(0, 0)
    assert job.ranks_sent(Exit) == [1, 0]
    assert job.outcome.reason == "preempted" and not job.kills()


def test_ranks_that_were_done_before_sigterm_get_none_and_count_as_succeeded(simulate):
    job = simulate(3).run().listen().done(1).interrupt(signal.SIGTERM)
    assert job.kills(signal.SIGTERM) == [(0, (0, 2))]
    job.done(0, 2).exit(0, 1, 2).exit(0, 0)
    assert job.outcome.reason == "preempted"


@pytest.mark.parametrize(
    ("signum", "statuses"), [(signal.SIGINT, (0, 0)), (signal.SIGTERM, (0, 3)), (signal.SIGTERM, (0, -15))]
)
def test_any_other_end_after_a_signal_is_an_interruption(simulate, signum, statuses):
    job = simulate(2).run().listen().interrupt(signum)
    job.exit(statuses[0], 0).exit(statuses[1], 1)
    assert job.outcome.reason == "interrupted"


def test_a_failure_while_terminating_does_not_stop_the_others(simulate):
    job = simulate(2).run().listen().interrupt(signal.SIGTERM)
    job.handle(job.failure(1)).exit(1, 1)
    job.wait(1).done(0).exit(0, 0)
    assert not job.kills() and job.outcome.reason == "interrupted"
    assert job.outcome.workers[1].failure is not None


# ---- a job that Slurm starts again


def test_the_warning_of_a_job_that_goes_on_is_told_as_a_preemption(simulate):
    job = simulate(2, requeue=True).run()
    job.handle(SignalHandlers(0, False, True)).interrupt(signal.SIGUSR2)
    assert job.killed == [(0.0, signal.SIGTERM, (0, 1))]
    job.done(0, 1).exit(0, 1).exit(0, 0)
    assert job.outcome.reason == "preempted" and job.outcome.signum == signal.SIGUSR2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_a_job_that_goes_on_is_preempted_even_if_it_had_to_be_killed(simulate, signum):
    job = simulate(2, requeue=True).run().interrupt(signum).exit(-9, 0, 1)
    assert job.outcome.reason == "preempted" and job.outcome.unheard


def test_a_rank_that_fails_of_itself_after_the_warning_is_no_preemption(simulate):
    job = simulate(2, requeue=True).run()
    job.handle(SignalHandlers(0, False, True), SignalHandlers(1, False, True)).interrupt(signal.SIGUSR2)
    job.handle(job.failure(0, "ValueError", "no room", 1)).done(1).exit(0, 1).exit(1, 0)
    assert job.outcome.reason == "interrupted"


# ---- the head's table of workers


def test_a_rank_that_had_finished_and_is_killed_later_ends_when_it_is_killed():
    table = WorkerTable({0: "h1", 1: "h1"})
    for rank in (0, 1):
        table.add_process(rank)
        table.add_done(rank, 5.0)
    table.add_exit(WorkerExited(0, 0), 50.0)
    table.add_exit(WorkerExited(1, -9), 60.0)
    assert [end.time for end in table.outcomes(70.0)] == [5.0, 60.0]
