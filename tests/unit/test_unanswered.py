"""Agents that are stopped, or whose hosts hang: they report nothing any more, and every job ends without them."""

import signal

import pytest

from jaxrun.head.actions import EndReason
from jaxrun.head.shutdown import UNANSWERED_HURRY_S, UNANSWERED_S
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.verdict.decide import decide
from jaxrun.verdict.report import format_report

HOSTS = {0: "h1", 1: "h2"}


def with_stuck_rank_1(simulate, **limits):
    job = simulate(2, hosts=HOSTS, **limits)
    job.stuck = {1}
    return job


def report(job):
    return format_report(decide(job.outcome, HOSTS, started=0.0, ended=job.now), None)


def named(job, seconds=UNANSWERED_S):
    assert job.outcome.unanswered == (1,)
    return f"rank 1 (h2) did not answer: no end was reported within {seconds:.0f} s of SIGKILL" in report(job)


def test_a_time_limit_holds_against_an_agent_that_does_not_answer(simulate):
    job = with_stuck_rank_1(simulate, job=20.0).run()
    job.wait(60)
    assert job.outcome.reason == EndReason.TIMEOUT and job.finished_at < 20 + 2 + UNANSWERED_S
    assert named(job)


def test_a_start_up_ends_without_an_agent_that_does_not_answer(simulate):
    job = with_stuck_rank_1(simulate, init=5.0).say_hello().wait(60)
    assert job.outcome.reason == EndReason.UNAVAILABLE and job.finished_at == pytest.approx(5 + UNANSWERED_S)
    assert named(job)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_one_sigterm_ends_a_job_without_an_agent_that_does_not_answer(simulate, signum):
    job = with_stuck_rank_1(simulate).run().interrupt(signum).wait(60)
    assert job.outcome.reason == EndReason.INTERRUPTED and job.finished_at == pytest.approx(UNANSWERED_S)
    assert named(job)


def test_one_ctrl_c_ends_a_job_without_an_agent_that_does_not_answer(simulate):
    job = with_stuck_rank_1(simulate).run().interrupt(signal.SIGINT)
    job.answers = False
    job.handle(job.failure(0, "KeyboardInterrupt", "", 130)).wait(16.5).exit(130, 0).wait(60)
    assert job.outcome.signum == signal.SIGINT and job.finished_at < 5 + 1 + UNANSWERED_S + 5 + UNANSWERED_S
    assert named(job)


def test_a_second_ctrl_c_does_not_wait_for_an_agent_that_does_not_answer(simulate):
    job = with_stuck_rank_1(simulate).run().interrupt(signal.SIGINT).wait(1).interrupt(signal.SIGINT).wait(60)
    assert job.finished_at == pytest.approx(1 + UNANSWERED_HURRY_S)
    assert named(job, UNANSWERED_HURRY_S)


def test_a_signal_shortens_the_wait_of_a_job_that_has_been_killed_already(simulate):
    job = with_stuck_rank_1(simulate).run().interrupt(signal.SIGTERM).wait(5)
    assert job.outcome is None
    job.interrupt(signal.SIGINT).wait(0.1)
    assert job.finished_at == pytest.approx(5.0) and job.outcome.signum == signal.SIGTERM


def test_the_same_signal_twice_at_once_shortens_nothing(simulate):
    job = with_stuck_rank_1(simulate).run().interrupt(signal.SIGTERM).wait(0.05).interrupt(signal.SIGTERM).wait(60)
    assert job.finished_at == pytest.approx(UNANSWERED_S)


def test_a_failure_of_another_rank_ends_the_job_and_stays_its_cause(simulate):
    job = with_stuck_rank_1(simulate).run()
    job.handle(job.failure(0)).exit(1, 0).wait(60)
    assert [job.outcome.reason, job.finished_at < 1 + 5 + UNANSWERED_S] == [EndReason.FAILED, True]
    verdict = decide(job.outcome, HOSTS, started=0.0, ended=job.now)
    assert verdict.culprits == (0,) and verdict.exit_code == 1
    assert named(job)


def test_ranks_that_have_failed_and_then_do_not_answer_have_the_grace_and_no_more(simulate):
    job = with_stuck_rank_1(simulate).run()
    job.handle(job.failure(1)).wait(60)
    assert job.finished_at < 1 + 5 + UNANSWERED_S
    assert decide(job.outcome, HOSTS, started=0.0, ended=job.now).culprits == (1,)
    assert named(job)


def test_a_rank_that_has_finished_and_whose_agent_does_not_answer_then_is_named(simulate):
    job = with_stuck_rank_1(simulate).run().done(0, 1).wait(60)
    assert job.outcome.reason == EndReason.OK and job.finished_at == pytest.approx(5 + UNANSWERED_S)
    assert named(job)


def test_who_is_waited_for_is_shown_meanwhile(simulate):
    job = with_stuck_rank_1(simulate).run().interrupt(signal.SIGTERM).wait(3)
    assert "waiting for rank 1 (h2) to end, sent SIGKILL; given up in 8 s" in [text for _, text in job.statuses_shown]


def test_late_ranks_are_named_also_where_their_stacks_come_after_they_were_killed(simulate):
    job = with_stuck_rank_1(simulate).run().interrupt(signal.SIGINT)
    job.answers = False
    job.handle(job.failure(0, "KeyboardInterrupt", "", 130)).wait(6.5)
    job.handle(SnapshotReply(SnapshotPurpose.LATE, {1: ""}, {1: ""}, {}))
    assert job.lines[-1].startswith("rank 1 (h2) did not end within 6 s; sent SIGTERM and SIGKILL")
