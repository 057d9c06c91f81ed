"""The head under signals that end no job and under time limits, stacks on request, and agents that do not answer.

The signals that end a job are in test_interruption.py.
"""

import signal

import pytest
from msgspec.structs import replace
from simulation import IN_JAX, IN_QUEUE

from jaxrun.analysis.diagnosis.job_end import Completed, EndedBySignal, RankFailed, Stalled, TimedOut, Unavailable
from jaxrun.analysis.verdict.decide import decide
from jaxrun.analysis.verdict.verdict_text import format_report
from jaxrun.controller.head.head_state import JobPhase
from jaxrun.controller.head.job_shutdown import UNANSWERED_HURRY_S, UNANSWERED_S
from jaxrun.job_events.actions import AnswerRequest, Send
from jaxrun.job_events.events import LauncherSignalled, Requested, Resumed
from jaxrun.protocol.job_messages import StacksRequest
from jaxrun.protocol.query_messages import ProcessState, RankDetail, RankQuery, RankReply
from jaxrun.protocol.worker_messages import Exit, Interrupted


def fails(job, rank):
    return job.handle(job.failure(rank))


@pytest.mark.parametrize("late", ["words", "done"])
def test_rank_0_is_continued_when_its_message_crossed_with_sigstop(simulate, late):
    job = simulate(3).run().handle(simulate(3).failure(1)).wait(0.03)
    assert job.kills(signal.SIGSTOP) == [(30, (0,))] and job.kills() == [(30, (2,))]
    job = job.handle(job.failure(0, message="Connection closed by peer")) if late == "words" else job.done(0)
    job.exit(1, 1).exit(-9, 2)
    assert job.kills(signal.SIGCONT) == [(30, (0,))] and job.ranks_sent(Exit) == [0]
    job.exit(1 if late == "words" else 0, 0)
    assert job.outcome.end.reason == "failed" and job.kills() == [(30, (2,))]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_only_forwarded_to_those_that_still_work(simulate, signum):
    job = simulate(3).run().done(1).interrupt(signum).wait(5)
    assert job.killed == [(0.0, signum, (0, 2))]
    assert job.head.phase is JobPhase.RUNNING and not job.printed


@pytest.mark.parametrize(("limits", "reason"), [({"job": 60.0}, "timeout"), ({"stall": 60.0}, "stall")])
def test_ctrl_z_stops_all_ranks_and_the_time_until_they_go_on_counts_for_no_limit(simulate, limits, reason):
    job = simulate(2, **limits).run().wait(30).interrupt(signal.SIGTSTP)
    assert job.kills(signal.SIGSTOP) == [(30000, (0, 1))]
    job.now += 1000
    job.handle(Resumed(1000.0))
    assert job.kills(signal.SIGCONT) == [(1030000, (0, 1))]
    assert job.wait(25).outcome is None
    assert job.wait(30).outcome.end.reason == reason


@pytest.mark.parametrize(("ends_at", "asked_at"), [(None, 1040_000), (5000.0, 1040_000), (1050.0, 1030_000)])
def test_after_ctrl_z_the_program_is_asked_before_the_earlier_end_of_timeout_and_allocation(
    simulate, ends_at, asked_at
):
    job = simulate(2, job=60.0, save=20.0, ends_at=ends_at).run().listen().wait(30).interrupt(signal.SIGTSTP)
    job.now += 1000
    job.handle(Resumed(1000.0)).wait(11)
    assert job.kills(signal.SIGTERM) == [(asked_at, (0, 1))]


def suspend(job, seconds):
    """Ctrl-Z, and `fg` so much later; ranks that stand still use no CPU time meanwhile."""
    job.interrupt(signal.SIGTSTP)
    cpu, paused_at = job.cpu, job.now
    job.now += seconds
    job.cpu = lambda now: cpu(now) if now < paused_at else cpu(max(paused_at, now - seconds))
    return job.handle(Resumed(seconds))


def test_after_ctrl_z_a_rank_that_works_in_jax_is_not_taken_for_one_that_waits_for_a_finished_one(simulate):
    job = simulate(2).run()
    job.stacks, job.cpu = {1: IN_JAX}, lambda now: 0.5 * now
    job.done(0).wait(11)
    assert job.queries[-1][1] is RankDetail.STACKS, "the ranks were asked once; the next stacks must agree"
    assert suspend(job, 1000.0).wait(60).outcome is None


def test_after_ctrl_z_a_rank_that_works_has_made_progress(simulate):
    job = simulate(2, stall=60.0).run()
    job.stacks, job.cpu = {0: IN_QUEUE, 1: IN_QUEUE}, lambda now: 0.5 * now
    job.wait(16)
    assert suspend(job, 1000.0).wait(50).outcome is None and not job.lines


def test_after_ctrl_z_faults_come_at_the_programs_time(simulate):
    job = simulate(3, chaos="pause:0@20s").run().wait(10)
    suspend(job, 1000.0).wait(9)
    assert job.injected == []
    assert job.wait(2).injected == [(1020.0, "pause", (0,))]


def test_after_ctrl_z_ranks_still_have_time_to_reply(simulate):
    job = simulate(2, job=60.0).run()
    job.stacks = {0: IN_JAX, 1: IN_JAX}
    job.wait(60.0)
    suspend(job, 1000.0).wait(1)
    assert job.outcome.end.reason == "timeout" and job.outcome.end.stacks.dumps == {0: IN_JAX, 1: IN_JAX}


def test_sigquit_shows_the_stacks_and_changes_nothing(simulate):
    job = simulate(2).run()
    job.stacks = {0: IN_JAX, 1: IN_QUEUE}
    job.interrupt(signal.SIGQUIT).wait(1)
    (text,) = job.lines
    assert "2 groups" in text and "train.py:2" in text
    assert job.head.phase is JobPhase.RUNNING and not job.killed


def test_stacks_are_requested_only_from_ranks_that_can_show_them(simulate):
    # To a worker without its fault handler, the signal that asks is deadly.
    job = simulate(3).spawn()
    job.handle(job.hello(1))
    assert job.head.handle(LauncherSignalled(signal.SIGQUIT), 0.0) == [Send((1,), RankQuery(1, RankDetail.STACKS))]


def test_each_request_for_stacks_gets_its_answer_and_c_frames_if_it_asks_for_them(simulate):
    job = simulate(1).run()
    native, plain = RankQuery(1, RankDetail.NATIVE_STACKS), RankQuery(2, RankDetail.STACKS)
    assert job.head.handle(Requested("a", StacksRequest(native=True)), 0.0) == [Send((0,), native)]
    assert job.head.handle(Requested("b", StacksRequest()), 0.0) == [Send((0,), plain)]
    (answered,) = job.head.handle(RankReply(0, 2, stacks=IN_QUEUE), 0.0)
    assert isinstance(answered, AnswerRequest) and answered.number == "b" and answered.answer.content.natives is None
    (answered,) = job.head.handle(RankReply(0, 1, stacks=IN_QUEUE, native_stacks="gloo"), 0.0)
    assert isinstance(answered, AnswerRequest) and answered.number == "a"
    stacks = answered.answer.content
    assert stacks.natives == {0: "gloo"} and stacks.dumps == {0: IN_QUEUE}


def test_the_time_limit_ends_the_job_with_everybodys_stacks(simulate):
    job = simulate(2, job=100.0).run()
    job.stacks = {0: IN_JAX, 1: IN_QUEUE}
    job.wait(101)
    assert job.outcome.end.reason == "timeout" and job.outcome.end.stacks.dumps == {0: IN_JAX, 1: IN_QUEUE}
    assert job.kills() == [(100_100, (0, 1))]


def test_the_time_limit_counts_the_start_up_too(simulate):
    job = simulate(2, job=1.0).spawn()
    job.handle(job.hello(1)).wait(2)
    assert job.outcome.end.reason == "timeout" and job.outcome.end.stacks.dumps == {1: ""}


def test_a_job_that_ends_while_its_stacks_are_taken_has_ended_well(simulate):
    job = simulate(2, job=100.0).run().wait(100.05)
    job.done(0, 1).exit(0, 1).exit(0, 0)
    assert job.outcome.end.reason == "ok"


# ---- agents that are stopped, or whose hosts hang: they report nothing any more

HOSTS = {0: "h1", 1: "h2"}


def with_stuck_rank_1(simulate, **limits):
    job = simulate(2, hosts=HOSTS, **limits)
    job.stuck = {1}
    return job


def ctrl_c_that_rank_1_does_not_hear(job):
    job.run().interrupt(signal.SIGINT).answers = False
    job.handle(job.failure(0, "KeyboardInterrupt", "", 130)).wait(16.5).exit(130, 0)


def failure_of_rank_0(job):
    job.run().handle(job.failure(0)).exit(1, 0)


def failure_of_rank_1(job):
    job.run().handle(job.failure(1))


# Time limits, what happens, how the job ends, after how many seconds, and who is to blame.
UNANSWERED = {
    "a time limit": ({"job": 20.0}, lambda job: job.run(), TimedOut, 30.1, ()),
    "the start-up": ({"init": 5.0}, lambda job: job.say_hello(), Unavailable, 15.0, ()),
    "SIGTERM": ({}, lambda job: job.run().interrupt(signal.SIGTERM), EndedBySignal, 10.1, ()),
    "SIGHUP": ({}, lambda job: job.run().interrupt(signal.SIGHUP), EndedBySignal, 10.1, ()),
    "the same signal twice at once": (
        {},
        lambda job: job.run().interrupt(signal.SIGTERM).wait(0.05).interrupt(signal.SIGTERM),
        EndedBySignal,
        10.1,
        (),
    ),
    "Ctrl-C": ({}, ctrl_c_that_rank_1_does_not_hear, EndedBySignal, 16.5, ()),
    "a failure of another rank": ({}, failure_of_rank_0, RankFailed, 10.03, (0,)),
    "its own failure": ({}, failure_of_rank_1, RankFailed, 15.03, (1,)),
    "the end of the program": ({}, lambda job: job.run().done(0, 1), Completed, 15.0, ()),
    "Ctrl-C and another": (
        {},
        lambda job: job.run().interrupt(signal.SIGINT).wait(1).interrupt(signal.SIGINT),
        EndedBySignal,
        1 + UNANSWERED_HURRY_S,
        (),
    ),
    "Ctrl-C after SIGTERM": (
        {},
        lambda job: job.run().interrupt(signal.SIGTERM).wait(5).interrupt(signal.SIGINT),
        EndedBySignal,
        5.0,
        (),
    ),
}


@pytest.mark.parametrize(("limits", "happen", "why", "ended_s", "culprits"), UNANSWERED.values(), ids=UNANSWERED)
def test_a_job_ends_without_an_agent_that_does_not_answer(simulate, limits, happen, why, ended_s, culprits):
    job = with_stuck_rank_1(simulate, **limits)
    happen(job)
    job.wait(60)
    assert (type(job.outcome.end), round(job.finished_at, 2)) == (why, ended_s)
    assert (job.verdict.culprits, job.outcome.unanswered) == (culprits, (1,))
    waited_s = {5.0: 5.0, 1 + UNANSWERED_HURRY_S: UNANSWERED_HURRY_S}.get(ended_s, UNANSWERED_S)
    report = format_report(job.verdict, None)
    assert f"rank 1 (h2) did not answer: no end was reported within {waited_s:.0f} s of SIGKILL" in report


def test_a_process_that_no_signal_reaches_is_said_to_wait_in_the_kernel(simulate):
    job = with_stuck_rank_1(simulate, stall=20.0).run().wait(100)
    assert isinstance(job.outcome.end, Stalled) and job.outcome.unanswered == (1,)
    end = job.outcome.end
    stacks = replace(end.stacks, waits={0: "futex_wait_queue", 1: ProcessState.DISK})
    outcome = replace(job.outcome, end=replace(end, stacks=stacks))
    report = format_report(decide(outcome, started=0.0, ended=job.now), None)
    assert (
        "rank 1 (h2) did not answer: no end was reported within 10 s of SIGKILL; its process waits in the kernel for a "
        "disk, a file server or a driver (state D), and it ends only after that." in " ".join(report.split())
    )


WAITING = {
    "the grace": (
        lambda job: job.interrupt(signal.SIGINT).wait(2.5).done(0).exit(0, 0),
        ["ranks 0-1 (h1, h2) to end; SIGKILL in 3 s", "rank 1 (h2) to end; SIGKILL in 2 s"],
    ),
    "the grace of a rank that Ctrl-C does not reach": (
        lambda job: job.interrupt(signal.SIGINT).handle(Interrupted(0, 0.0)).wait(2.5).handle(Interrupted(1, 0.0)),
        [
            "ranks 0-1 (h1, h2) to end; SIGKILL in 3 s for rank 1 (h2), which Ctrl-C has not reached",
            "ranks 0-1 (h1, h2) to end; SIGKILL in 27 s",
        ],
    ),
    "exit handlers": (
        lambda job: fails(job, 1).wait(2.5),
        [f"rank 1 (h2) to end; SIGKILL in {left} s" for left in (3, 2)],
    ),
    "an agent that does not answer": (
        lambda job: job.interrupt(signal.SIGTERM).wait(2.5),
        [f"rank 1 (h2) to end, which was sent SIGKILL; jaxrun gives it up in {left} s" for left in (8, 7)],
    ),
}


@pytest.mark.parametrize(("happen", "lines"), WAITING.values(), ids=WAITING)
def test_whom_the_end_waits_for_is_shown_meanwhile(simulate, happen, lines):
    job = happen(with_stuck_rank_1(simulate).run()).wait(1)
    assert [text for _, text in job.statuses_shown[1:]] == [f"waiting for {line}" for line in lines]


def test_late_ranks_are_named_also_where_their_stacks_come_after_they_were_killed(simulate):
    job = with_stuck_rank_1(simulate).run().interrupt(signal.SIGINT)
    job.answers = False
    job.handle(job.failure(0, "KeyboardInterrupt", "", 130)).wait(6.5)
    job.wait(1.5)  # so long is waited for its stacks
    assert job.lines[-1].startswith("rank 1 (h2) did not end within 6 s; sent SIGTERM and SIGKILL")
