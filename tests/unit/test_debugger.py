"""The head gives the terminal to the debuggers of ranks, to one after another."""

import signal
from dataclasses import replace

import pytest

from jaxrun.controller.head.debugger import HANDOVER_S
from jaxrun.controller.head.head_state import JobPhase
from jaxrun.protocol.debugger_messages import (
    DebuggerClosed,
    DebuggerDecision,
    DebuggerInput,
    DebuggerOutput,
    DebuggerReadRequest,
    DebuggerRequest,
)
from jaxrun.protocol.worker_messages import Interrupted
from jaxrun.records.event_log.events import TerminalLine


def stop_at_breakpoint(job, *ranks):
    return job.handle(*(DebuggerRequest(rank, "train.py:8 step") for rank in ranks))


def prompt(job, rank):
    return job.handle(DebuggerOutput(rank, f"(Pdb {rank}) "), DebuggerReadRequest(rank))


def answers(job, kind):
    """[(rank, answer)] of what was sent to debuggers."""
    return [(*ranks, message) for _, ranks, message in job.sent if isinstance(message, kind)]


def test_a_rank_at_its_breakpoint_has_the_terminal_until_it_goes_on(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 1), 1)
    assert answers(job, DebuggerDecision) == [(1, DebuggerDecision(True))]
    assert job.terminal == [
        "\n>>> rank 1 is in its debugger at train.py:8 step, and others may wait for it; c goes on\n",
        "(Pdb 1) ",
    ]
    assert job.reads == 1
    job.handle(TerminalLine("p x\n"))
    assert answers(job, DebuggerInput) == [(1, DebuggerInput("p x\n"))]


def test_the_next_rank_gets_the_terminal_when_the_first_goes_on(simulate):
    job = prompt(stop_at_breakpoint(simulate(3).run(), 2, 0, 1), 2)
    assert answers(job, DebuggerDecision) == [(2, DebuggerDecision(True))]
    job.handle(TerminalLine("c\n"), DebuggerClosed(2))
    assert answers(job, DebuggerDecision)[1:] == [(0, DebuggerDecision(True))]
    assert "rank 0 is in its debugger" in job.terminal[-1]
    prompt(job, 0).exit(-11, 0)
    assert answers(job, DebuggerDecision)[2:] == [(1, DebuggerDecision(True))], "an end gives the terminal back, too"


def test_a_rank_that_does_not_come_back_from_a_step_loses_the_terminal_to_one_that_waits(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 0, 1), 0)
    job.wait(100).handle(TerminalLine("n\n")).wait(HANDOVER_S / 2)
    assert len(answers(job, DebuggerDecision)) == 1
    job.wait(HANDOVER_S)
    assert answers(job, DebuggerDecision)[1] == (1, DebuggerDecision(True))
    prompt(job, 0)
    assert job.reads == 1, "it waits for its turn now"
    job.handle(DebuggerClosed(1))
    assert job.terminal[-1] == "(Pdb 0) " and job.reads == 2


def test_a_rank_that_steps_alone_keeps_the_terminal(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 0), 0).handle(TerminalLine("n\n")).wait(60)
    prompt(job, 0)
    assert job.reads == 2 and sum("is in its debugger" in text for text in job.terminal) == 1


def test_the_time_at_a_prompt_counts_for_no_limit(simulate):
    job = simulate(2, job=100.0, stall=60.0).run()
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000)
    assert job.outcome is None
    job.handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(30)
    assert job.outcome is None
    job.wait(60)
    assert job.outcome.reason == "stall"


def test_time_limits_run_on_where_they_stood(simulate):
    job = simulate(2, job=100.0).run().wait(40)
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000).handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(59)
    assert job.outcome is None
    job.wait(2)
    assert job.outcome.reason == "timeout"


def test_without_a_terminal_a_breakpoint_is_refused_and_nobody_is_asked(simulate):
    job = prompt(stop_at_breakpoint(simulate(2, no_terminal="no terminal").run(), 0), 0)
    assert answers(job, DebuggerDecision) == [(0, DebuggerDecision(False, "no terminal"))]
    assert answers(job, DebuggerInput) == [(0, DebuggerInput(""))] and job.reads == 0 and not job.terminal


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_input_of_all_debuggers(simulate, signum):
    job = prompt(stop_at_breakpoint(simulate(3).run().listen(), 0, 1), 0).interrupt(signum)
    assert answers(job, DebuggerInput) == [(0, DebuggerInput(""))]
    assert answers(job, DebuggerDecision)[1:] == [(1, DebuggerDecision(False, "the job is being ended"))]
    prompt(job.handle(Interrupted(0, 0.0)), 0)
    assert answers(job, DebuggerInput)[1:] == [(0, DebuggerInput(""))]


# ---- --pdb


def failure(job, rank, **more):
    return replace(job.failure(rank, **more), waits_for_debugger=True)


def test_the_culprit_is_debugged_before_the_job_is_stopped(simulate):
    job = simulate(3).run()
    collateral = failure(job, 0, message="Gloo AllReduce failed: Connection closed by peer")
    job.handle(collateral, failure(job, 2)).wait(1)
    assert job.head.phase is JobPhase.DEBUGGING and not job.killed
    assert job.lines == ["rank 2 failed: ValueError: bad record\nits debugger follows (--pdb)"]
    assert answers(job, DebuggerDecision) == [(2, DebuggerDecision(True))]
    prompt(stop_at_breakpoint(job, 2), 2).wait(1000).handle(TerminalLine("q\n"), DebuggerClosed(2))
    assert answers(job, DebuggerDecision)[2:] == [(0, DebuggerDecision(False))]
    assert job.lines[1:] == ["rank 2 failed; stopping 1 other"] and job.kills() == [(1_001_000, (1,))]


def test_a_rank_that_fails_while_the_job_is_stopped_is_not_debugged(simulate):
    job = simulate(3).run()
    job.handle(failure(job, 2)).wait(1).handle(DebuggerClosed(2))
    job.handle(failure(job, 0, message="Gloo AllReduce failed: Connection closed by peer"))
    assert answers(job, DebuggerDecision)[1:] == [(0, DebuggerDecision(False))]


def test_a_culprit_that_dies_in_its_debugger_ends_the_job(simulate):
    job = simulate(3).run()
    job.handle(failure(job, 2)).wait(1).exit(-9, 2).wait(1)
    assert job.kills() == [(1000, (0, 1))] and job.outcome.reason == "failed"


def test_without_a_terminal_a_failure_is_not_debugged(simulate):
    job = simulate(2, no_terminal="no terminal").run()
    job.handle(failure(job, 1)).wait(1)
    assert answers(job, DebuggerDecision) == [(1, DebuggerDecision(False))]
    assert job.lines == ["rank 1 failed; stopping 1 other"]
