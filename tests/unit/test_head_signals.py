"""The head under signals and time limits, and snapshots on request."""

import json
import signal

import pytest

from jaxrun.diagnosis.snapshot import Snapshot
from jaxrun.head.actions import AnswerRequests, TakeSnapshot
from jaxrun.head.attempt import JobPhase
from jaxrun.head.events import LauncherSignalled, Requested
from jaxrun.protocol.requests import StacksRequest
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply
from jaxrun.protocol.worker_messages import Exit

IN_JAX = """Current thread 0x0001 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 7 in _value
  File "/home/me/train.py", line 12 in <module>
"""
IN_PYTHON = """Current thread 0x0001 (most recent call first):
  File "/v/lib/python3.11/queue.py", line 7 in get
  File "/home/me/train.py", line 12 in <module>
"""
STARTS = {
    "meeting": lambda job: job.spawn(),
    "joining": lambda job: job.join(),
}
TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("signum", TERMINAL)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_before_the_program_runs_a_signal_kills_at_once(simulate, start, signum):
    job = start(simulate(2)).interrupt(signum).wait(1)
    assert job.kills() == [(0, (0, 1))] and job.kills(signal.SIGTERM) == []
    assert job.outcome.reason == "interrupted" and job.outcome.signum == signum


def test_a_signal_before_anything_was_started_ends_the_job(simulate):
    job = simulate(2).interrupt(signal.SIGINT)
    assert job.outcome.reason == "interrupted" and job.statuses == [None, None] and not job.killed


@pytest.mark.parametrize("signum", TERMINAL)
def test_a_signal_while_the_cause_is_looked_for_kills_at_once_and_keeps_the_failure(simulate, signum):
    job = simulate(3).run()
    job.handle(job.failure(1)).wait(0.01).interrupt(signum).wait(1)
    assert job.kills() == [(10, (0, 1, 2))]
    assert job.outcome.reason == "failed"
    assert not job.outcome.workers[1].killed_by_launcher


def test_a_signal_during_the_grace_of_exit_handlers_kills_them(simulate):
    job = simulate(2).run()
    job.handle(job.failure(1)).wait(1).interrupt(signal.SIGINT).wait(1)
    assert job.kills(signal.SIGSTOP) == [(30, (0,))]
    assert job.kills() == [(1000, (0, 1))]
    assert job.outcome.reason == "failed"


def test_a_signal_when_all_is_done_only_hastens_the_end(simulate):
    job = simulate(2).run().done(0, 1).interrupt(signal.SIGINT).wait(1)
    assert job.kills() == [(0, (0, 1))] and job.outcome.reason == "ok"


@pytest.mark.parametrize("late", ["words", "done"])
def test_rank_0_is_continued_when_its_message_crossed_with_sigstop(simulate, late):
    job = simulate(3).run().handle(simulate(3).failure(1)).wait(0.03)
    assert job.kills(signal.SIGSTOP) == [(30, (0,))] and job.kills() == [(30, (2,))]
    job = job.handle(job.failure(0, message="Connection closed by peer")) if late == "words" else job.done(0)
    job.exit(1, 1).exit(-9, 2)
    assert job.kills(signal.SIGCONT) == [(30, (0,))] and job.ranks_sent(Exit) == [0]
    job.exit(1 if late == "words" else 0, 0)
    assert job.outcome.reason == "failed" and job.kills() == [(30, (2,))]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_only_forwarded_to_those_that_still_work(simulate, signum):
    job = simulate(3).run().done(1).interrupt(signum).wait(5)
    assert job.killed == [(0.0, signum, (0, 2))]
    assert job.head.phase is JobPhase.RUNNING and not job.printed


def test_sigquit_shows_the_stacks_and_changes_nothing(simulate):
    job = simulate(2).run()
    job.stacks = {0: IN_JAX, 1: IN_PYTHON}
    job.interrupt(signal.SIGQUIT).wait(1)
    (text,) = job.lines
    assert "2 groups" in text and "train.py:12" in text
    assert job.head.phase is JobPhase.RUNNING and not job.killed


def test_while_ranks_have_a_grace_a_line_says_whom_the_end_waits_for(simulate):
    job = simulate(3).run().interrupt(signal.SIGINT).wait(2.5).done(0).exit(0, 0).wait(1)
    assert job.statuses_shown[1:] == [
        (2.0, "waiting for ranks 0-2 to end; SIGKILL in 28 s"),
        (3.0, "waiting for ranks 1-2 to end; SIGKILL in 27 s"),
    ]


def test_after_a_failure_the_line_names_the_ranks_whose_exit_handlers_run(simulate):
    job = simulate(3).run()
    job.handle(job.failure(1)).wait(2.5)
    assert [text for _, text in job.statuses_shown[1:]] == ["waiting for rank 1 to end; SIGKILL in 3 s"]


def test_stacks_are_requested_only_from_ranks_that_can_show_them(simulate):
    # To a worker without its fault handler, the signal that asks is deadly.
    job = simulate(3).spawn()
    job.handle(job.hello(1))
    assert job.head.handle(LauncherSignalled(signal.SIGQUIT), 0.0) == [TakeSnapshot((1,), SnapshotPurpose.SHOW)]


def test_requests_for_stacks_are_answered_together_and_c_frames_apart(simulate):
    job = simulate(1).run()
    native, plain = TakeSnapshot((0,), SnapshotPurpose.NATIVE), TakeSnapshot((0,), SnapshotPurpose.KEEP)
    assert job.head.handle(Requested("1", StacksRequest(native=True)), 0.0) == [native]
    assert job.head.handle(Requested("2", StacksRequest(native=True)), 0.0) == [native]
    assert job.head.handle(Requested("3", StacksRequest()), 0.0) == [plain]
    reply = SnapshotReply(SnapshotPurpose.NATIVE, {0: IN_JAX}, {0: "futex"}, {0: 1.0}, native_stacks={0: "gloo"})
    (answered,) = job.head.handle(reply, 0.0)
    assert isinstance(answered, AnswerRequests) and answered.numbers == ("1", "2")
    snapshot = Snapshot.from_content(json.loads(json.dumps(answered.answer.content)))
    assert snapshot.natives == {0: "gloo"} and snapshot.dumps == {0: IN_JAX}


def test_the_time_limit_ends_the_job_with_everybodys_stacks(simulate):
    job = simulate(2, job=100.0).run()
    job.stacks = {0: IN_JAX, 1: IN_PYTHON}
    job.wait(101)
    assert job.outcome.reason == "timeout" and job.outcome.stacks == {0: IN_JAX, 1: IN_PYTHON}
    assert job.kills() == [(100_100, (0, 1))]


def test_the_time_limit_counts_the_start_up_too(simulate):
    job = simulate(2, job=1.0).spawn()
    job.handle(job.hello(1)).wait(2)
    assert job.outcome.reason == "timeout" and job.outcome.stacks == {1: ""}


def test_a_job_that_ends_while_its_stacks_are_taken_has_ended_well(simulate):
    job = simulate(2, job=100.0).run().wait(100.05)
    job.done(0, 1).exit(0, 1).exit(0, 0)
    assert job.outcome.reason == "ok"


def test_a_rank_may_end_early_while_the_others_work(simulate):
    job = simulate(3).run()
    job.stacks = {1: IN_PYTHON, 2: IN_JAX}
    job.done(0).wait(600)
    assert job.head.phase is JobPhase.RUNNING and not job.printed


@pytest.mark.parametrize("leaves", [lambda job: job.done(0), lambda job: job.exit(0, 0)], ids=["done", "exit"])
def test_others_that_wait_in_jax_for_a_rank_that_has_ended_are_stuck(simulate, leaves):
    job = simulate(3).run().wait(5)
    job.stacks = {1: IN_JAX, 2: IN_JAX}
    leaves(job).wait(60)
    assert job.outcome.reason == "early-exit" and job.outcome.stacks == {1: IN_JAX, 2: IN_JAX}
    live = (1, 2) if job.outcome.workers[0].status == 0 else (0, 1, 2)
    assert job.kills() == [(17_200, live)]  # 10 s after it ended, and 2 s later, each with 0.1 s for the answers


def test_ranks_that_finish_after_a_first_snapshot_are_not_stuck(simulate):
    job = simulate(3).run()
    job.stacks = {1: IN_JAX, 2: IN_JAX}
    job.done(0).wait(11)
    job.done(1, 2).exit(0, 1, 2).exit(0, 0)
    assert job.outcome.reason == "ok"


def test_rank_0_after_its_failure_report_may_exit_once_the_others_have_ended(simulate):
    job = simulate(3).run()
    job.handle(job.failure(0)).wait(1)
    assert job.kills() == [(30, (1, 2))]
    assert [(ranks, type(message)) for _, ranks, message in job.sent][-1] == ((0,), Exit)
