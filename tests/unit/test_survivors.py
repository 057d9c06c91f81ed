"""--keep-survivors: the head tells the others that a rank is lost, answers live_devices, and lets the job go on."""

import signal

import pytest
from calls_by_hand import flight_after

from jaxrun.job_events.events import AgentLost
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.survivor_messages import LiveRanks, LiveRanksAsked, RanksLost
from jaxrun.protocol.worker_messages import Exit

ALL = (0, 1, 2, 3)


def asks(*ranks, about=ALL):
    return [LiveRanksAsked(rank, about, 1) for rank in ranks]


def answers(job):
    return [(ranks, sorted(message.incarnations)) for _, ranks, message in job.sent if isinstance(message, LiveRanks)]


def losses(job):
    return [(ranks, message.ranks) for _, ranks, message in job.sent if isinstance(message, RanksLost)]


@pytest.fixture
def job(simulate):
    return simulate(4, keep_survivors=True).run()


def test_live_devices_is_a_barrier_of_the_ranks_that_live(job):
    job.handle(*asks(0, 2, 3))
    assert answers(job) == []
    job.handle(*asks(1))
    assert answers(job) == [(ALL, [0, 1, 2, 3])]
    job.handle(*asks(0, 1, about=(0, 1)), *asks(2, 3, about=(2, 3)))
    assert answers(job)[1:] == [((0, 1), [0, 1]), ((2, 3), [2, 3])]


@pytest.mark.parametrize("how", ["killed", "raised", "host"])
def test_the_loss_of_a_rank_is_told_at_once_and_those_that_wait_for_it_are_answered(job, how):
    job.handle(*asks(0, 1, 3))
    match how:
        case "killed":
            job.exit(-9, 2)
        case "raised":
            job.handle(job.failure(2))
        case "host":
            job.handle(AgentLost(AgentId(2), "its host is gone"))
    assert losses(job) == [((0, 1, 3), (2,))]
    assert answers(job) == [((0, 1, 3), [0, 1, 3])]
    assert [message.incarnations for _, _, message in job.sent if isinstance(message, RanksLost)] == [{2: 1}]
    if how == "raised":
        job.exit(1, 2)
        assert len(losses(job)) == 1, "its end says nothing new"
    job.done(0, 1, 3).exit(0, 1, 3)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,) and not job.killed


def test_a_rank_that_has_asked_and_dies_is_not_answered(job):
    job.handle(*asks(0, 1, 2)).exit(-9, 2)
    assert answers(job) == []
    job.handle(*asks(3))
    assert answers(job) == [((0, 1, 3), [0, 1, 3])]


def test_two_losses_leave_two(job):
    job.exit(-9, 2).handle(*asks(0)).exit(-9, 1).handle(*asks(3))
    assert losses(job) == [((0, 1, 3), (2,)), ((0, 3), (1,))] and answers(job) == [((0, 3), [0, 3])]


def test_without_rank_0_the_job_ends_and_the_first_loss_is_its_cause(job):
    job.exit(-9, 2).exit(-6, 0).wait(1)
    assert job.outcome is not None and job.outcome.end.reason == "failed" and job.outcome.lost == (2,)


def test_a_loss_that_the_others_have_survived_is_no_cause_of_a_later_failure(job):
    job.exit(-9, 2).handle(*asks(0, 1, 3), *asks(0, 1, 3)).wait(10).handle(job.failure(0)).wait(6)
    assert job.verdict.culprits == (0,) and "rank 0 of 4 raised ValueError 10.0 s into the run" in job.verdict.headline
    assert any("rank 2 of 4 was killed by SIGKILL (9)" in text for text in job.verdict.details)


def test_a_program_without_live_devices_has_survived_a_loss_after_a_while(job):
    job.exit(-9, 2).wait(31).handle(job.failure(0)).wait(6)
    assert job.verdict.culprits == (0,)


def test_a_loss_of_which_the_others_have_just_learned_is_the_cause_of_what_they_do(job):
    job.exit(-9, 2).wait(0.1).handle(*asks(0, 1, 3)).wait(0.1)
    job.handle(job.failure(0, "SystemExit", "gave up")).wait(6)
    assert job.verdict.culprits == (2,)


def test_consequences_of_a_loss_that_was_survived_do_not_hide_it(job):
    job.exit(-9, 2).handle(*asks(0, 1, 3), *asks(0, 1, 3)).wait(10)
    message = "FAILED_PRECONDITION: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1"
    job.handle(job.failure(0, "JaxRuntimeError", message)).wait(6)
    assert job.verdict.culprits == (2,)


def test_a_rank_that_ends_well_leaves_at_once_and_those_that_wait_for_it_are_told_later(job):
    job.handle(*asks(0, 1, 3)).done(2)
    assert job.ranks_sent(Exit) == [2] and answers(job) == [((0, 1, 3), [0, 1, 3])] and losses(job) == []
    job.exit(0, 2).wait(1.1)
    assert losses(job) == [((0, 1, 3), (2,))]
    job.done(0, 1, 3).exit(0, 1, 3)
    job.exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == ()


def test_without_the_option_any_failure_ends_the_job(simulate):
    job = simulate(4).run().exit(-9, 2).wait(1)
    assert losses(job) == [] and job.outcome.end.reason == "failed"


def test_a_rank_that_ends_well_before_the_others_is_not_out_of_step_with_them(simulate):
    job = simulate(2, keep_survivors=True, lockstep="record").run()
    job.flights = {0: flight_after(8, "0-1"), 1: flight_after(9, "0-1")}
    job.wait(2).done(0).wait(2).done(1).exit(0, 0, 1)
    job.wait(2)
    assert job.outcome.end.reason == "ok" and job.outcome.divergences == (), job.lines
    job = simulate(2, lockstep="record").run()
    job.flights = {0: flight_after(8, "0-1"), 1: flight_after(9, "0-1")}
    job.wait(2).done(0, 1).exit(0, 0, 1)
    assert job.wait(2).outcome.divergences


def test_a_lost_rank_whose_agent_goes_away_as_the_others_leave_changes_nothing(job):
    job.handle(job.failure(2)).wait(1).done(0, 1, 3)
    job.handle(AgentLost(AgentId(2), "its host is gone")).exit(0, 1, 3).exit(0, 0)
    assert job.outcome.end.reason == "ok" and job.outcome.lost == (2,)


def test_survivors_that_end_well_at_sigterm_have_given_way(job):
    job.listen().exit(-9, 2).wait(60).interrupt(signal.SIGTERM).done(0, 1, 3).exit(0, 1, 3).exit(0, 0)
    assert job.outcome.end.reason == "preempted" and job.verdict.exit_code == 75
