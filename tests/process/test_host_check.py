"""--host-check runs in its time, says how it ended, and leaves nothing, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_by_hand import CLEAN, ByHand, remote_jobs
from harness import daemons, jaxrun, seconds_of_daemons, started, wait_until
from msgspec.structs import replace

from jaxrun.protocol.agent_messages import AgentReport, HostCheck, NextAttempt

JOB_ID = "cd" * 16
PROGRAM = "raise SystemExit('the program has started')"


@pytest.fixture
def make_agent(tmp_path):
    """Starts an agent that checks its host with a command, and returns it."""
    with contextlib.ExitStack() as stack:

        def make(command, timeout=60.0):
            by_hand = ByHand(tmp_path, JOB_ID, JAXRUN_STALE="1")
            stack.callback(by_hand.close)
            check = HostCheck(command, timeout, {"COLOUR": "green", "JAXRUN_JOB_ID": JOB_ID})
            by_hand.job_info = replace(by_hand.job_info, host_check=check)
            return by_hand

        yield make


@pytest.fixture
def start(tmp_path):
    with remote_jobs(tmp_path) as run:
        yield run


@pytest.fixture
def endless():
    """A command that starts what outlives it, in other sessions too, and its processes."""
    with seconds_of_daemons() as seconds:
        yield f"setsid sleep {seconds} & sleep {seconds} & sleep {seconds}", lambda: daemons(seconds)


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        ("exit 0", ""),
        ("echo first; echo 'Xid \033[31m79' >&2; echo; exit 3", "exited with status 3: Xid ?[31m79"),
        ("kill -9 $$", "was killed by SIGKILL (9)"),
        ("no-such-command", "exited with status 127: /bin/sh: 1: no-such-command: not found"),
        ("yes | head -100000; echo end; exit 1", "exited with status 1: end"),
        (
            "echo $COLOUR $JAXRUN_ATTEMPT $JAXRUN_JOB_ID $JAXRUN_STALE.; exit 1",
            f"exited with status 1: green 1 {JOB_ID} .",
        ),
    ],
)
def test_the_report_says_how_a_host_check_ended(make_agent, command, failure):
    agent = make_agent(command)
    assert agent.admit().check_failure == failure
    assert agent.shut_down()[0] == 0


def test_processes_that_a_check_leaves_are_killed_before_its_result_is_reported(make_agent, endless):
    command, left = endless
    assert make_agent(f"({command}) & exit 0").admit().check_failure == "" and left() == []


def test_a_check_that_takes_too_long_is_killed_before_its_result_is_reported(make_agent, endless):
    command, left = endless
    assert make_agent(command, timeout=0.5).admit().check_failure == "did not end in 0.5 s" and left() == []


def test_the_next_attempt_and_the_end_of_an_agent_end_its_check(make_agent, endless):
    command, left = endless
    agent = make_agent(command)
    agent.connect()
    wait_until(lambda: len(left()) == 3)
    first = left()
    agent.send(NextAttempt(2, (0,)))
    wait_until(lambda: len(left()) == 3 and not {*left()} & {*first})
    assert agent.receive() and not any(isinstance(message, AgentReport) for message in agent.received)
    agent.process.kill()
    agent.end()
    wait_until(lambda: not left())


def test_a_spare_host_is_checked_once_it_has_ranks(make_agent):
    agent = make_agent("echo $JAXRUN_RANK; exit 1")
    agent.job_info = replace(agent.job_info, attempt=0)
    assert agent.admit().check_failure == ""
    agent.send(NextAttempt(2, (7,)))
    agent.until(lambda: any(getattr(message, "attempt", 0) == 2 for message in agent.received))
    assert agent.received[-1].check_failure == "exited with status 1: 7"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.extended)],
    ids=["Ctrl-C", "SIGTERM", "kill -9"],
)
def test_a_signal_to_the_launcher_ends_the_checks_of_its_agents(start, endless, signum, code):
    command, left = endless
    job = start(CLEAN, CLEAN, host_check=command)
    job.wait_until(lambda: len(left()) == 3, "the check")  # of one agent, as both are on one host
    os.kill(job.process.pid, signum)
    assert job.result().code == code
    wait_until(lambda: not left())
    assert not job.events("WorkerSpawned")


@pytest.mark.extended
def test_a_host_that_fails_ends_the_job_before_any_worker_starts(start):
    job = start(CLEAN, CLEAN, host_check="echo $JAXRUN_ATTEMPT: no GPU; exit 1")
    ended = job.end()
    assert (
        ended.code == 69
        and f"jaxrun: {os.uname().nodename} failed --host-check: exited with status 1: 1: no GPU" in ended.err
    )
    assert not job.events("WorkerSpawned")
    assert sorted(event["check_failure"] for event in job.events("AgentReport")) == [
        "",
        "exited with status 1: 1: no GPU",
    ]


@pytest.mark.extended
def test_a_check_runs_once_on_each_host_before_each_attempt(start, tmp_path):
    fails_once = "run(); sys.exit(3) if os.environ['JAXRUN_ATTEMPT'] == '1' else done()"
    job = start(fails_once, CLEAN, host_check=f"echo $JAXRUN_ATTEMPT >> {tmp_path}/checks", max_restarts=1)
    assert job.end().code == 0
    assert (tmp_path / "checks").read_text().split() == ["1", "2"]


# ---- on this machine


def program(directory: Path) -> str:
    path = directory / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_simulated_host_that_fails_is_named_and_the_program_does_not_start(tmp_path: Path) -> None:
    command = "echo on $JAXRUN_HOST; [ $JAXRUN_HOST = h1 ]"
    options = ("-n", "4", "--simulate-hosts", "2", "--max-restarts", "2", "--host-check", command)
    result = jaxrun(tmp_path, *options, program(tmp_path))
    assert result.code == 69
    assert "jaxrun: h2 failed --host-check: exited with status 1: on h2\n" in result.err, result.err
    assert not result.events("Hello")


@pytest.mark.extended
def test_ctrl_c_ends_a_check_on_this_machine(tmp_path: Path, endless: tuple) -> None:
    command, left = endless
    with started(tmp_path, "-n", "2", "--host-check", command, program(tmp_path)) as job:
        job.wait_until(lambda: len(left()) == 3, "the check")
        job.process.send_signal(signal.SIGINT)
        result = job.end()
    assert result.code == 130 and left() == []
    assert "before the program's first line" in result.err


def test_jaxrun_stop_reaches_a_job_whose_check_runs(tmp_path: Path, endless: tuple) -> None:
    """The job's socket is served meanwhile."""
    command, processes = endless
    with started(tmp_path, "-n", "1", "--host-check", command, program(tmp_path)) as job:
        job.wait_until(lambda: len(processes()) == 3, "the check")
        stopped = subprocess.run([sys.executable, "-m", "jaxrun", "stop", str(job.run_dir)], capture_output=True)
        ended = job.end()
    assert (stopped.returncode, ended.code) == (0, 143), (stopped.stderr, ended.err)
    assert not processes()


def test_dry_run_shows_the_check(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "jaxrun", "-n", "2", "--host-check", "nvidia-smi -q", "--dry-run", program(tmp_path)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "note: before each attempt each host runs --host-check: nvidia-smi -q\n" in shown
