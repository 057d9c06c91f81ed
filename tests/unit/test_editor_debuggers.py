"""What the head does for `jaxrun debug`: sessions of debugpy, and the clocks that stand still meanwhile."""

import base64
from pathlib import Path

import pytest
from msgspec.structs import replace
from simulation import Simulation

from jaxrun.analysis.diagnosis.job_end import EndedBySignal, RankFailed, Stalled, TimedOut
from jaxrun.controller.head import editor_debuggers
from jaxrun.controller.head.editor_debuggers import START_TIMEOUT_S, STOP_TIMEOUT_S
from jaxrun.errors import UsageError
from jaxrun.job_events.events import AgentLost, LauncherSignalled, Requested, RequestEnded, RequestInput
from jaxrun.protocol.debugger_messages import DebuggerClosed, DebuggerDecision
from jaxrun.protocol.debugpy_messages import (
    DebugpyInput,
    DebugpyOutput,
    DebugpyReady,
    DebugpyStart,
    DebugpyStarted,
    DebugpyStop,
    DebugpyStopped,
)
from jaxrun.protocol.job_messages import Answer, AnswerState, DebugRequest, GoRequest, OverviewRequest
from jaxrun.protocol.worker_messages import Run
from jaxrun.spec.job.job import Job

PAGE = Path(__file__).parents[2] / "docs/debugging.md"


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


def test_the_clocks_go_on_where_debugpy_does_not_let_go_and_the_rank_can_be_debugged_again():
    job = debug(Simulation(2).run()).handle(RequestEnded("1.1")).wait(STOP_TIMEOUT_S - 1)
    assert [one.state for one in answers(job)] == [AnswerState.PROGRESS]
    job.wait(2)
    assert "rank 1 has not let go of its debugger in 10 s" in answers(job)[-1].text
    assert answers(job)[-1].state is AnswerState.DONE and len(sent(job, DebugpyStop)) == 1
    debug(job, number="2.1", session=2).handle(DebugpyStopped(1, 1))
    assert [one.state for one in answers(job, "2.1")] == [AnswerState.PROGRESS]


def test_the_clocks_go_on_where_the_client_went_before_debugpy_was_up_and_the_rank_is_not_let_go():
    job = Simulation(2, job=60.0).run().handle(Requested("1.1", DebugRequest(1)), RequestEnded("1.1"))
    job.handle(DebugpyStarted(1, 1)).wait(STOP_TIMEOUT_S + 1)
    assert "rank 1 has not let go of its debugger in 10 s" in answers(job)[-1].text
    assert isinstance(job.wait(60).outcome.end, TimedOut)


def test_a_rank_is_let_go_where_jaxrun_fails_at_what_an_editor_sends(monkeypatch):
    job = debug(Simulation(2).run())
    with monkeypatch.context() as patch:
        patch.setattr(editor_debuggers, "DebugpyInput", lambda *fields: 1 / 0)
        job.handle(RequestInput("1.1", b"in"))
    assert "jaxrun failed at this request: ZeroDivisionError" in answers(job)[-1].text
    assert len(sent(job, DebugpyStop)) == 1
    debug(job, number="2.1", session=2)
    assert [one.state for one in answers(job, "2.1")] == [AnswerState.PROGRESS]


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
    assert isinstance(job.outcome.end, TimedOut)


def test_the_end_of_a_rank_or_of_the_job_ends_the_session():
    job = debug(Simulation(2).run()).done(1)
    assert answers(job)[-1] == Answer(AnswerState.DONE, "the program of rank 1 has ended")
    job = debug(Simulation(2).run()).handle(LauncherSignalled(2))
    assert sent(job, DebugpyStop) == [((1,), DebugpyStop(1))], "it must react to Ctrl-C"


# ---- --debug


def runs(job):
    return job.ranks_sent(Run)


def test_with_debug_no_program_starts_before_each_editor_that_is_connected_is_ready():
    job = Simulation(2, job=60.0, stall=30.0, debug=True).run().wait(1000)
    assert not runs(job) and job.outcome is None
    assert "ranks 0-1 wait for an editor before the first line (--debug)" in job.lines[0]
    assert "jaxrun debug --rank R" in job.lines[0] and "jaxrun debug --go" in job.lines[0]
    assert job.lines[0] in " ".join(PAGE.read_text().split())
    debug(debug(job), rank=0, number="2.1", session=2).handle(DebugpyReady(1, 1))
    assert not runs(job), "the other editor has not set its breakpoints"
    job.handle(DebugpyReady(0, 2))
    assert runs(job) == [0, 1]
    job.handle(RequestEnded("1.1"), DebugpyStopped(1, 1), RequestEnded("2.1"), DebugpyStopped(0, 2)).wait(59)
    assert isinstance(job.outcome.end, Stalled), "its clocks have begun"
    assert job.verdict.headline.endswith("s into the run.") or job.outcome.decided_at > 1000


@pytest.mark.parametrize(
    "end",
    [
        lambda job: job.handle(RequestEnded("1.1"), DebugpyStopped(1, 1)),
        lambda job: job.handle(DebugpyStarted(1, 1, "install it")),
        lambda job: job.wait(START_TIMEOUT_S + 1),
    ],
)
def test_with_debug_an_editor_that_is_ready_does_not_wait_for_one_that_has_gone(end):
    job = Simulation(2, debug=True).run().handle(Requested("1.1", DebugRequest(1)))
    debug(job, rank=0, number="2.1", session=2).handle(DebugpyReady(0, 2))
    assert not runs(job)
    assert runs(end(job)) == [0, 1]
    alone = debug(Simulation(2, debug=True).run()).handle(DebugpyStopped(1, 1))
    assert not runs(alone), "the only editor has gone, so the ranks wait for another"


def test_with_debug_ranks_that_still_start_are_not_shown_as_debugged():
    job = Simulation(2, debug=True).join().handle(Requested("3.1", OverviewRequest())).wait(1)
    assert answers(job, "3.1")[0].content.debugged == ()
    job.handle(job.device_report(0), job.device_report(1), Requested("3.2", OverviewRequest())).wait(1)
    assert answers(job, "3.2")[0].content.debugged == (0, 1)


def test_go_starts_the_programs_without_an_editor_once():
    job = Simulation(2, debug=True).run().handle(Requested("1.1", GoRequest()), Requested("1.2", GoRequest()))
    assert runs(job) == [0, 1]
    assert answers(job) == [Answer(AnswerState.DONE)] and "does not wait for an editor" in answers(job, "1.2")[0].text
    assert "does not wait" in answers(Simulation(2).run().handle(Requested("1.1", GoRequest())))[0].text


def test_ctrl_c_ends_a_job_that_waits_at_once():
    job = Simulation(2, debug=True).run().interrupt(2).wait(1)
    assert isinstance(job.outcome.end, EndedBySignal) and job.kills() and not job.kills(2)


# ---- --debug-post-mortem


def fail_and_wait(job, rank=1):
    return job.handle(replace(job.failure(rank), waits_for_debugger=True)).wait(0.1)


def decisions(job):
    return [(*ranks, message.granted) for ranks, message in sent(job, DebuggerDecision)]


def test_a_failed_rank_keeps_its_frames_until_an_editor_has_let_go():
    job = fail_and_wait(Simulation(2, post_mortem=True).run()).wait(1000)
    assert job.outcome is None and not job.kills() and not decisions(job)
    first = job.lines[0].splitlines()
    assert first[0] == "rank 1 failed: ValueError: bad record" and first[1].startswith("Traceback")
    assert first[-1] == "the frames of rank 1 are kept for an editor: jaxrun debug --rank 1; Ctrl-C ends the job"
    debug(job).handle(RequestEnded("1.1"), DebugpyStopped(1, 1)).wait(10)
    assert job.outcome is None, "an editor that never was ready has seen nothing"
    debug(job, number="2.1", session=2).handle(DebugpyReady(1, 2))
    assert decisions(job) == [(1, True)]
    job.wait(100).handle(DebuggerClosed(1))
    assert job.killed[0][2] == (0,), "the other rank is stopped"
    job.exit(1, 1).wait(1)
    assert isinstance(job.outcome.end, RankFailed) and job.verdict.exit_code == 1
    assert answers(job, "2.1")[-1].state is AnswerState.DONE


@pytest.mark.parametrize(
    "end",
    [
        lambda job: job.wait(100),  # --timeout
        lambda job: job.interrupt(2).wait(1),
        lambda job: job.exit(-9, 1).wait(1),
        lambda job: job.handle(AgentLost(1, "the connection was closed", False)).wait(1),
    ],
)
def test_kept_frames_end_with_the_time_limit_the_user_or_their_process_and_the_exit_code_stays(end):
    job = fail_and_wait(Simulation(2, job=60.0, post_mortem=True).run())
    end(job)
    assert job.killed, job.lines
    if 1 not in job.exited:
        job.exit(1, 1).wait(1)
    assert isinstance(job.outcome.end, RankFailed) and job.verdict.exit_code in (1, 137)
    assert not any(granted for _, granted in decisions(job))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"debug_post_mortem": True, "pdb": True}, "--pdb and --debug-post-mortem contradict"),
        ({"debug_post_mortem": True, "max_restarts": 2}, "--debug-post-mortem and --max-restarts 2 contradict"),
        ({"keep_survivors": True, "pdb": True}, "--keep-survivors and --pdb contradict"),
        ({"debug": True, "no_run_dir": True}, "--debug and --no-run-dir contradict"),
        ({"debug": True, "live": True}, "--live, which hides what to type, and --debug contradict"),
    ],
)
def test_options_that_leave_nobody_to_debug_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        Job(program=("train.py",), **options)
