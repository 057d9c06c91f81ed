"""Who has jaxrun's terminal and standard input: debuggers of ranks, one after another, and the rank of --stdin."""

import os
import pty
import signal

import pytest
from msgspec.structs import replace

from jaxrun.controller.head.debugger_turns import HANDOVER_S
from jaxrun.controller.head.head_state import JobPhase
from jaxrun.controller.supervisor.job_terminal import resolve_stdin, why_no_terminal
from jaxrun.controller.supervisor.sidecars import check_live
from jaxrun.errors import UsageError
from jaxrun.job_events.events import Requested, TerminalLine
from jaxrun.node.agent.spawn import open_stdin
from jaxrun.protocol.debugger_messages import (
    DebuggerClosed,
    DebuggerDecision,
    DebuggerInput,
    DebuggerOutput,
    DebuggerReadRequest,
    DebuggerRequest,
    TerminalDecision,
)
from jaxrun.protocol.job_messages import OverviewRequest
from jaxrun.protocol.worker_messages import Interrupted
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.engines.slurm import SLURM
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand, Plan, Worker


def stop_at_breakpoint(job, *ranks):
    return job.handle(*(DebuggerRequest(rank, "train.py:8 step", 1) for rank in ranks))


def prompt(job, rank):
    return job.handle(DebuggerOutput(rank, f"(Pdb {rank}) "), DebuggerReadRequest(rank, 2))


def answers(job, kind):
    """[(rank, answer)] of what was sent to debuggers."""
    return [(*ranks, message) for _, ranks, message in job.sent if isinstance(message, kind)]


def test_a_rank_at_its_breakpoint_has_the_terminal_until_it_goes_on(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 1), 1)
    assert answers(job, TerminalDecision) == [(1, TerminalDecision(1, True))]
    assert job.terminal == [
        "\n>>> rank 1 is in its debugger at train.py:8 step, and others may wait for it; c continues\n",
        "(Pdb 1) ",
    ]
    assert job.reads == 1
    job.handle(TerminalLine("p x\n"))
    assert answers(job, DebuggerInput) == [(1, DebuggerInput(2, "p x\n"))]


def test_the_next_rank_gets_the_terminal_when_the_first_goes_on(simulate):
    job = prompt(stop_at_breakpoint(simulate(3).run(), 2, 0, 1), 2)
    assert answers(job, TerminalDecision) == [(2, TerminalDecision(1, True))]
    job.handle(TerminalLine("c\n"), DebuggerClosed(2))
    assert answers(job, TerminalDecision)[1:] == [(0, TerminalDecision(1, True))]
    assert "rank 0 is in its debugger" in job.terminal[-1]
    prompt(job, 0).exit(-11, 0)
    assert answers(job, TerminalDecision)[2:] == [(1, TerminalDecision(1, True))], "an end gives the terminal back, too"


def test_a_rank_that_does_not_come_back_from_a_step_loses_the_terminal_to_one_that_waits(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 0, 1), 0)
    job.wait(100).handle(TerminalLine("n\n")).wait(HANDOVER_S / 2)
    assert len(answers(job, TerminalDecision)) == 1
    job.wait(HANDOVER_S)
    assert answers(job, TerminalDecision)[1] == (1, TerminalDecision(1, True))
    prompt(job, 0)
    assert job.reads == 1, "it waits for its turn now"
    job.handle(DebuggerClosed(1))
    assert job.terminal[-1] == "(Pdb 0) " and job.reads == 2


def test_a_rank_that_steps_alone_keeps_the_terminal(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 0), 0).handle(TerminalLine("n\n")).wait(60)
    prompt(job, 0)
    assert job.reads == 2 and sum("is in its debugger" in text for text in job.terminal) == 1


def test_a_rank_that_does_not_wait_any_more_does_not_get_the_terminal_until_it_asks_again(simulate):
    job = prompt(stop_at_breakpoint(simulate(3).run(), 0, 1, 2), 0).handle(DebuggerClosed(1))
    job.handle(TerminalLine("c\n"), DebuggerClosed(0))
    assert answers(job, TerminalDecision)[1:] == [(2, TerminalDecision(1, True))]
    assert "rank 2 is in its debugger" in job.terminal[-1]
    job.handle(DebuggerRequest(1, "train.py:9 step", 5), DebuggerClosed(2))
    assert answers(job, TerminalDecision)[2:] == [(1, TerminalDecision(5, True))]


def test_a_rank_that_does_not_wait_any_more_is_not_shown_as_debugged(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 0, 1), 0)
    job.handle(DebuggerClosed(1), Requested("3.1", OverviewRequest())).wait(1)
    assert [answer.content.debugged for _, answer in job.answered] == [(0,)]


def test_a_line_that_is_typed_after_its_debugger_was_left_is_for_nobody(simulate):
    job = prompt(stop_at_breakpoint(simulate(2).run(), 0, 1), 0).handle(DebuggerClosed(0))
    job.handle(TerminalLine("p x\n"))
    assert answers(job, DebuggerInput) == []
    prompt(job, 1).handle(TerminalLine("c\n"))
    assert answers(job, DebuggerInput) == [(1, DebuggerInput(2, "c\n"))]


def test_the_time_at_a_prompt_counts_for_no_limit(simulate):
    job = simulate(2, job=100.0, stall=60.0).run()
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000)
    assert job.outcome is None
    job.handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(30)
    assert job.outcome is None
    job.wait(60)
    assert job.outcome.end.reason == "stall"


def test_time_limits_run_on_where_they_stood(simulate):
    job = simulate(2, job=100.0).run().wait(40)
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000).handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(59)
    assert job.outcome is None
    job.wait(2)
    assert job.outcome.end.reason == "timeout"


def test_at_a_prompt_nobody_is_told_to_save_before_the_end_of_timeout(simulate):
    job = simulate(2, job=60.0, save=20.0).run().listen().wait(10)
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000)
    assert not job.lines and not job.kills(signal.SIGTERM)
    job.handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(29)
    assert not job.lines and not job.kills(signal.SIGTERM)
    job.wait(2)
    assert job.kills(signal.SIGTERM) == [(1040_000, (0, 1))] and job.lines[0].startswith("time limit in 20 s")


@pytest.mark.parametrize("limit", [60.0, None])
def test_the_end_of_an_allocation_comes_nearer_at_a_prompt_too(simulate, limit):
    job = simulate(2, job=limit, save=20.0, ends_at=500.0).run().listen().wait(10)
    prompt(stop_at_breakpoint(job, 0), 0).wait(469)
    assert not job.kills(signal.SIGTERM)
    assert job.wait(2).kills(signal.SIGTERM) == [(480_000, (0, 1))]


def test_of_timeout_and_an_allocation_the_earlier_end_counts_after_a_prompt(simulate):
    job = simulate(2, job=60.0, save=20.0, ends_at=500.0).run().listen().wait(10)
    prompt(stop_at_breakpoint(job, 0), 0).wait(100).handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(29)
    assert not job.kills(signal.SIGTERM)
    assert job.wait(2).kills(signal.SIGTERM) == [(140_000, (0, 1))]


def test_a_program_is_told_once_to_save_however_often_it_is_debugged_then(simulate):
    job = simulate(2, job=60.0, save=20.0).run().wait(45)
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000).handle(TerminalLine("c\n"), DebuggerClosed(0)).listen().wait(14)
    assert not job.lines and not job.kills(signal.SIGTERM)
    assert job.wait(2).outcome.end.reason == "timeout"


def test_a_smaller_job_does_not_look_for_hosts_while_somebody_debugs_it(simulate):
    job = simulate(2, grow=60.0).run().wait(10)
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000)
    assert job.searches == []
    assert len(job.handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(51).searches) == 1


def test_no_fault_of_chaos_comes_while_somebody_debugs(simulate):
    job = simulate(2, chaos="pause:0@20s,pause:1@30s").run().wait(10)
    prompt(stop_at_breakpoint(job, 0), 0).wait(1000)
    assert job.injected == []
    job.handle(TerminalLine("c\n"), DebuggerClosed(0)).wait(30)
    assert job.injected == [(1020.0, "pause", (0,)), (1030.0, "pause", (1,))]


def test_without_a_terminal_a_breakpoint_is_refused_and_nobody_is_asked_and_a_failure_is_not_debugged(simulate):
    job = prompt(stop_at_breakpoint(simulate(2, no_terminal="no terminal").run(), 0), 0)
    assert answers(job, TerminalDecision) == [(0, TerminalDecision(1, False, "no terminal"))]
    assert answers(job, DebuggerInput) == [(0, DebuggerInput(2, ""))] and job.reads == 0 and not job.terminal
    job.handle(failure(job, 1)).wait(1)
    assert answers(job, DebuggerDecision) == [(1, DebuggerDecision(False))]
    assert job.lines == ["rank 1 failed; stopping 1 other"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_input_of_all_debuggers(simulate, signum):
    job = prompt(stop_at_breakpoint(simulate(3).run().listen(), 0, 1), 0).interrupt(signum)
    assert answers(job, DebuggerInput) == [(0, DebuggerInput(2, ""))]
    assert answers(job, TerminalDecision)[1:] == [(1, TerminalDecision(1, False, "the job is being ended"))]
    prompt(job.handle(Interrupted(0, 0.0)), 0)
    assert answers(job, DebuggerInput)[1:] == [(0, DebuggerInput(2, ""))]


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
    assert answers(job, DebuggerDecision)[1:] == [(0, DebuggerDecision(False))]
    assert job.lines[1:] == ["rank 2 failed; stopping 1 other"] and job.kills() == [(1_001_000, (1,))]


def test_a_rank_that_fails_while_the_job_is_stopped_is_not_debugged(simulate):
    job = simulate(3).run()
    job.handle(failure(job, 2)).wait(1).handle(DebuggerClosed(2))
    job.handle(failure(job, 0, message="Gloo AllReduce failed: Connection closed by peer"))
    assert answers(job, DebuggerDecision)[1:] == [(0, DebuggerDecision(False))]


def test_a_culprit_that_dies_in_its_debugger_ends_the_job(simulate):
    job = simulate(3).run()
    job.handle(failure(job, 2)).wait(1).exit(-9, 2).wait(1)
    assert job.kills() == [(1000, (0, 1))] and job.outcome.end.reason == "failed"


# ---- --stdin: which rank reads

MPIRUN = LaunchCommand(OPEN_MPI, "Open MPI 5.0.11", ("mpirun",))
SRUN = LaunchCommand(SLURM, "srun in Slurm job 7", ("srun",))


@pytest.fixture
def stdin(tmp_path):
    """stdin(kind) replaces this process's standard input until the end of the test: "file", "pipe" or "terminal"."""
    before = os.dup(0)
    opened = []

    def replace(kind):
        (tmp_path / "answers").write_text("yes\n")
        if kind == "file":
            new = [os.open(tmp_path / "answers", os.O_RDONLY)]
        else:
            new = os.pipe() if kind == "pipe" else pty.openpty()[::-1]
        opened.extend(new)
        os.dup2(new[0], 0)

    yield replace
    os.dup2(before, 0)
    for descriptor in (before, *opened):
        os.close(descriptor)


def resolve(given, command=None):
    return resolve_stdin(Job(program=("train.py",), stdin=given), command).stdin


@pytest.mark.parametrize(
    ("kind", "command", "decided"),
    [("file", None, "0"), ("terminal", None, "0"), ("pipe", MPIRUN, "0"), ("terminal", SRUN, "none")],
)
def test_rank_0_has_the_input_by_default_but_no_terminal_over_hosts_where_srun_alone_gives_it_to_any_rank(
    stdin, kind, command, decided
):
    stdin(kind)
    assert (resolve("", command), resolve("0", command), resolve("1", SRUN)) == (decided, "0", "1")
    with pytest.raises(UsageError, match=r"--stdin 1 is for .*; with Open MPI 5\.0\.11 it is --stdin 0 or none"):
        resolve("1", MPIRUN)


@pytest.mark.parametrize(("given", "read"), [("1", True), ("0", False), ("none", False)])
def test_a_rank_reads_the_pipe_that_a_launch_command_gives_to_it(stdin, given, read):
    stdin("pipe")
    descriptor = open_stdin(given, 1)
    assert os.path.samestat(os.fstat(descriptor), os.fstat(0)) == read
    os.close(descriptor)


@pytest.mark.parametrize(("given", "readers"), [("", [0]), ("1", [1]), ("none", [])])
def test_the_reader_reads_all_of_a_file_and_the_others_nothing(stdin, given, readers):
    stdin("file")
    found = []
    for rank in range(3):
        with open(open_stdin(given, rank)) as file:
            found += [rank] * (file.read() == "yes\n")
    assert found == readers


def test_a_debugger_needs_a_terminal_that_no_rank_reads(stdin):
    def why(given, command=None, live=False):
        job = Job(program=("p",), stdin=given, live=live)
        return why_no_terminal(Plan(job, "ab" * 16, (Worker(0, 0, 1, "h1"),), (), {}, (), None, (), False, (), command))

    stdin("pipe")
    assert why("0") == "jaxrun's standard input is not a terminal"
    stdin("terminal")
    assert why("0") == why("none", SRUN) == ""
    assert why("none", live=True) == "--live has the terminal"
    assert why("0", SRUN) == "--stdin 0 gives the terminal to rank 0"


def test_the_live_screen_needs_a_terminal(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    with pytest.raises(UsageError, match="--live needs a terminal, and standard input is not one; leave --live out"):
        check_live()
