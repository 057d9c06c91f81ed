"""What the head does for `jaxrun debug`: sessions of debugpy, and the clocks that stand still meanwhile."""

import base64

import pytest
from simulation import Simulation

from jaxrun.analysis.diagnosis.job_outcome import EndReason
from jaxrun.controller.head.editor_debuggers import START_TIMEOUT_S
from jaxrun.protocol.debugpy_messages import (
    DebugpyInput,
    DebugpyOutput,
    DebugpyReady,
    DebugpyStart,
    DebugpyStarted,
    DebugpyStop,
    DebugpyStopped,
)
from jaxrun.protocol.job_messages import Answer, AnswerState, DebugRequest, OverviewRequest
from jaxrun.records.event_log.events import LauncherSignalled, Requested, RequestEnded, RequestInput


def answers(job, number="1.1"):
    return [answer for asked, answer in job.answered if asked == number]


def sent(job, kind):
    return [(ranks, message) for _, ranks, message in job.sent if isinstance(message, kind)]


def debug(job, rank=1, number="1.1", session=1):
    return job.handle(Requested(number, DebugRequest(rank)), DebugpyStarted(rank, session))


def test_bytes_pass_in_both_directions_until_the_client_ends_the_session():
    job = debug(Simulation(2).run())
    assert sent(job, DebugpyStart) == [((1,), DebugpyStart(1))]
    job.handle(DebugpyOutput(1, 1, b"out"), DebugpyReady(1, 1), RequestInput("1.1", b"in"), RequestInput("9.9", b"no"))
    assert [one.state for one in answers(job)] == [AnswerState.PROGRESS] * 2
    assert answers(job)[0].content == {"staged": {}}
    assert base64.b64decode(answers(job)[1].content["data"]) == b"out"
    assert sent(job, DebugpyInput) == [((1,), DebugpyInput(1, b"in"))]
    job.handle(RequestEnded("1.1"), RequestEnded("1.1"), RequestInput("1.1", b"late"))
    assert len(sent(job, DebugpyInput)) == len(sent(job, DebugpyStop)) == 1
    job.handle(DebugpyStopped(1, 1))
    assert answers(job)[-1] == Answer(AnswerState.DONE)
    debug(job, number="2.1", session=2).handle(DebugpyOutput(1, 1, b"of the first session"))
    assert len(answers(job, "2.1")) == 1, "a rank may be debugged again"


@pytest.mark.parametrize(
    ("rank", "made", "reason"),
    [
        (2, lambda: Simulation(2).run(), "there is no rank 2: the job has ranks 0-1"),
        (1, lambda: Simulation(2).join(), "rank 1 starts still"),
        (1, lambda: Simulation(2).run().done(1), "the program of rank 1 has ended"),
        (1, lambda: debug(Simulation(2).run(), number="0.1"), "rank 1 is being debugged already"),
        (1, lambda: (job := Simulation(2).run()).handle(job.failure(0)), "the job is ending"),
    ],
)
def test_what_cannot_be_debugged_is_refused_in_a_sentence(rank, made, reason):
    job = made().handle(Requested("1.1", DebugRequest(rank)))
    (answer,) = answers(job)
    assert answer.state is AnswerState.REFUSED and reason in answer.text
    assert not sent(job, DebugpyStart)[1:]


def test_a_rank_without_debugpy_says_what_to_install_and_one_that_does_not_answer_is_given_up():
    job = Simulation(2).run().handle(Requested("1.1", DebugRequest(1)), DebugpyStarted(1, 1, "install it"))
    assert answers(job) == [Answer(AnswerState.REFUSED, "install it")]
    assert sent(job, DebugpyStop) == [((1,), DebugpyStop(1))], "its thread waits for that"
    job.handle(Requested("1.2", DebugRequest(1))).wait(START_TIMEOUT_S + 1)
    assert "has not answered in 20 s" in answers(job, "1.2")[0].text
    stops = len(sent(job, DebugpyStop))
    job.handle(DebugpyStarted(1, 2))
    assert len(sent(job, DebugpyStop)) == stops + 1, "it came too late, and lets go"


def test_the_clocks_of_the_job_stand_still_while_any_rank_is_debugged():
    job = debug(Simulation(2, job=60.0).run()).wait(1000)
    debug(job, rank=0, number="2.1", session=2).handle(RequestEnded("1.1"), DebugpyStopped(1, 1)).wait(1000)
    assert job.outcome is None
    job.handle(Requested("3.1", OverviewRequest())).wait(1)
    (overview,) = answers(job, "3.1")
    assert overview.content.debugged == (0,)
    job.handle(RequestEnded("2.1"), DebugpyStopped(0, 2)).wait(59)
    assert job.outcome is None
    job.wait(2)
    assert job.outcome.reason is EndReason.TIMEOUT


def test_the_end_of_a_rank_or_of_the_job_ends_the_session():
    job = debug(Simulation(2).run()).done(1)
    assert answers(job)[-1] == Answer(AnswerState.DONE, "the program of rank 1 has ended")
    job = debug(Simulation(2).run()).handle(LauncherSignalled(2))
    assert sent(job, DebugpyStop) == [((1,), DebugpyStop(1))], "it must react to Ctrl-C"
