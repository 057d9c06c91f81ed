"""A program that polls should_stop is asked to stop, at the same poll on all ranks."""

import signal

import pytest

from jaxrun.job_events.events import AgentLost
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.stop_messages import (
    NO_STEP,
    CheckpointSaved,
    PollCount,
    StopAt,
    StopPolled,
    StopReached,
    StopRequested,
)


def polling(job, *ranks):
    return job.handle(*(StopPolled(rank) for rank in ranks or range(job.size)))


def counts(job, **polls):
    return job.handle(*(PollCount(int(rank[1:]), count) for rank, count in polls.items()))


def reached(job, step, *ranks):
    return job.handle(*(StopReached(rank, step) for rank in ranks or range(job.size)))


def stop_at(job):
    """[(ranks, poll)] that the ranks were told."""
    return [(ranks, message.poll) for _, ranks, message in job.sent if isinstance(message, StopAt)]


def end_well(job):
    return job.done(*range(job.size)).exit(0, *range(1, job.size)).exit(0, 0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_the_ranks_stop_at_the_first_poll_that_none_has_made(simulate, signum):
    job = polling(simulate(3, requeue=signum == signal.SIGUSR2).run()).interrupt(signum)  # which is Slurm's warning
    name = signal.Signals(signum).name
    assert job.ranks_sent(StopRequested) == [0, 1, 2] and not job.killed
    grace = "SIGKILL follows in 30 s, or at once with Ctrl-C"
    assert job.lines == [f"{name}: asked ranks 0-2 to stop (should_stop); {grace}"]
    counts(job, r0=7, r2=9)
    assert stop_at(job) == []
    counts(job, r1=8)
    assert stop_at(job) == [((0, 1, 2), 10)]
    reached(job, 40, 2, 0)
    assert len(job.lines) == 1
    reached(job, 40, 1)
    assert job.lines[1:] == ["ranks 0-2 stop at step 40"]
    end_well(job.handle(CheckpointSaved(0, 40)))
    assert job.outcome.end.reason == "preempted" and job.outcome.saved_step == 40
    said = f"as should_stop had asked ({name}); the job may be resumed from step 40"
    assert job.verdict.headline == f"preempted: the program ended with status 0 {said}."


def test_a_rank_that_polls_later_is_asked_then_and_all_wait_for_it(simulate):
    job = polling(simulate(2).run(), 1).interrupt(signal.SIGTERM)
    assert job.ranks_sent(StopRequested) == [1]
    counts(job, r1=3)
    assert stop_at(job) == []
    polling(job, 0)
    assert job.ranks_sent(StopRequested) == [1, 0]
    counts(job, r0=0)
    assert stop_at(job) == [((0, 1), 4)]


def test_ranks_whose_program_has_ended_are_not_waited_for(simulate):
    job = polling(simulate(3).run()).done(2).interrupt(signal.SIGTERM)
    assert job.ranks_sent(StopRequested) == [0, 1]
    counts(job, r1=3).done(0)
    assert stop_at(job) == [((1,), 4)]


LOSSES = {
    "killed": lambda job: job.exit(-9, 2),
    "raised": lambda job: job.handle(job.failure(2)),
    "host": lambda job: job.handle(AgentLost(AgentId(2), "its host is gone")),
    "_exit(0)": lambda job: job.exit(0, 2),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_rank_that_is_lost_before_it_has_answered_is_not_waited_for(simulate, lose):
    job = counts(polling(simulate(3, keep_survivors=True).run()).interrupt(signal.SIGTERM), r0=5, r1=6)
    assert stop_at(job) == []
    lose(job)
    assert stop_at(job) == [((0, 1), 7)]
    assert reached(job, 40, 0, 1).lines[-1] == "ranks 0-1 stop at step 40"


def test_the_step_is_told_without_a_rank_that_is_lost_after_it_has_answered(simulate):
    job = polling(simulate(4, keep_survivors=True).run()).interrupt(signal.SIGTERM)
    counts(job, r0=5, r1=5, r2=5, r3=5).exit(-9, 2)
    assert reached(job, 40, 0, 1).lines[-1].startswith("rank 2 is lost")
    assert job.exit(-9, 3).lines[-1] == "ranks 0-1 stop at step 40"
    assert len(reached(job, 40, 0).lines) == 4


def test_a_failure_that_ends_the_job_tells_no_rank_to_stop(simulate):
    job = counts(polling(simulate(3).run()).interrupt(signal.SIGTERM), r0=5, r1=6).exit(-9, 2)
    assert stop_at(job.wait(1)) == [] and job.outcome.end.reason == "failed"


def test_a_program_that_has_finished_before_it_was_told_to_stop_has_succeeded(simulate):
    job = end_well(counts(polling(simulate(2).run()).interrupt(signal.SIGTERM), r0=5, r1=5))
    assert job.outcome.end.reason == "ok"


def test_a_failure_while_the_program_stops_is_the_culprits(simulate):
    job = reached(counts(polling(simulate(2).run()).interrupt(signal.SIGTERM), r0=5, r1=5), 5)
    job.handle(job.failure(1, "OSError", "disk full")).wait(1).exit(1, 1).wait(1)
    assert job.outcome.end.reason == "failed" and job.kills()
    assert "OSError" in job.verdict.headline


def test_ctrl_c_raises_keyboard_interrupt_as_under_python(simulate):
    job = polling(simulate(2).run()).interrupt(signal.SIGINT)
    assert job.killed == [(0.0, signal.SIGINT, (0, 1))] and job.ranks_sent(StopRequested) == []


def test_ranks_that_stop_at_different_steps_are_named(simulate):
    job = counts(polling(simulate(3).run()).interrupt(signal.SIGTERM), r0=5, r1=5, r2=5)
    reached(reached(job, 5, 0, 2), 6, 1)
    hint = "but all ranks should call should_stop equally often"
    assert job.lines[1:] == [f"ranks 0, 2 stop at step 5, rank 1 stops at step 6; {hint}"]


def test_a_program_may_poll_without_steps(simulate):
    job = counts(polling(simulate(2).run()).interrupt(signal.SIGTERM), r0=5, r1=5)
    assert reached(job, NO_STEP).lines[1:] == ["ranks 0-1 stop"]


# ---- the time limit


def test_the_program_is_asked_before_its_time_limit_and_the_job_goes_on_until_then(simulate):
    job = polling(simulate(2, job=60.0, save=20.0).run()).wait(39.9)
    assert not job.ranks_sent(StopRequested)
    job.wait(0.2)
    assert job.lines == ["time limit in 20 s: asked ranks 0-1 to stop (should_stop)"]
    job.wait(19)
    assert not job.killed
    job.wait(2)
    assert job.outcome.end.reason == "timeout"


@pytest.mark.parametrize("limit", [60.0, None])
def test_before_the_end_that_slurm_knows_too(simulate, limit):
    job = polling(simulate(2, job=limit, save=20.0, ends_at=50.0).run()).wait(29.9)
    assert not job.ranks_sent(StopRequested)
    assert job.wait(0.2).ranks_sent(StopRequested) == [0, 1]


def test_a_program_that_polls_only_later_is_asked_then(simulate):
    job = simulate(2, job=60.0, save=20.0).run().wait(45)
    assert job.lines == [] and job.ranks_sent(StopRequested) == []
    end_well(reached(counts(polling(job), r0=0, r1=0), 1))
    assert job.ranks_sent(StopRequested) == [0, 1]
    assert job.outcome.end.reason == "preempted" and "(time limit in 20 s)" in job.verdict.headline


def test_the_schedulers_sigterm_after_that_has_its_grace(simulate):
    job = polling(simulate(2, job=90.0, save=80.0).run()).wait(11).interrupt(signal.SIGTERM)
    assert job.ranks_sent(StopRequested) == [0, 1] and not job.killed
    job.wait(29)
    assert not job.killed
    job.wait(2)
    assert job.kills() == [(41_100, (0, 1))] and job.outcome.end.signum == signal.SIGTERM


def test_a_program_that_listens_to_sigterm_instead_gets_it_before_the_time_limit(simulate):
    job = simulate(2, job=60.0, save=20.0).run().listen().wait(59)
    assert job.kills(signal.SIGTERM) == [(40_000, (0, 1))] and not job.kills()
    assert "SIGKILL follows in 20 s" in job.lines[0]
    assert end_well(job).outcome.end.reason == "preempted"


def test_a_program_that_first_polls_after_sigterm_stops_at_once(simulate):
    job = simulate(2, job=60.0, save=20.0).run().listen().wait(41)
    end_well(reached(counts(polling(job), r0=0, r1=0), 1))
    assert job.kills(signal.SIGTERM) == [(40_000, (0, 1))] and stop_at(job) == [((0, 1), 1)]
    assert (
        job.outcome.end.reason == "preempted" and "should_stop had asked (time limit in 20 s)" in job.verdict.headline
    )


def test_a_program_that_does_neither_goes_on_until_its_time_limit(simulate):
    job = simulate(2, job=60.0, save=20.0).run().wait(59)
    assert not job.killed and not job.lines
    assert job.wait(2).outcome.end.reason == "timeout"


# ---- checkpoints


def test_the_last_step_that_any_rank_has_saved_is_known(simulate):
    job = simulate(2).run().handle(CheckpointSaved(1, 20), CheckpointSaved(0, 10))
    job.handle(job.failure(1)).wait(1).exit(1, 1).wait(1)
    assert job.outcome.saved_step == 20
    assert end_well(simulate(2).run()).outcome.saved_step is None
