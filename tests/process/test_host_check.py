"""--host-check runs in its time, says how it ended, and leaves nothing, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_by_hand import CLEAN, ByHand, remote_jobs
from harness import daemons, jaxrun, seconds_of_daemons, started, wait_until

from jaxrun.protocol.agent_messages import NextAttempt
from jaxrun.protocol.probe_messages import CheckHost, HostChecked

JOB_ID = "cd" * 16
PROGRAM = "raise SystemExit('the program has started')"


@pytest.fixture
def agent(tmp_path):
    by_hand = ByHand(tmp_path, JOB_ID, COLOUR="green", JAXRUN_STALE="1")
    by_hand.admit()
    yield by_hand
    by_hand.close()


@pytest.fixture
def start(tmp_path):
    with remote_jobs(tmp_path) as run:
        yield run


@pytest.fixture
def endless():
    """A command that starts what outlives it, in other sessions too, and its processes."""
    with seconds_of_daemons() as seconds:
        yield f"setsid sleep {seconds} & sleep {seconds} & sleep {seconds}", lambda: daemons(seconds)


def check(command, timeout=60.0, **variables):
    return CheckHost(0, command, timeout, {"JAXRUN_RANK": "0", **variables})


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        ("exit 0", ""),
        ("echo first; echo 'Xid \033[31m79' >&2; echo; exit 3", "exited with status 3: Xid ?[31m79"),
        ("kill -9 $$", "was killed by SIGKILL (9)"),
        ("no-such-command", "exited with status 127: /bin/sh: 1: no-such-command: not found"),
    ],
)
def test_how_a_check_ended_is_told(agent, command, failure):
    agent.send(check(command))
    assert agent.expect(HostChecked).failure == failure


def test_it_has_the_environment_of_the_ranks_and_the_end_of_its_output_is_kept(agent):
    agent.send(check("yes | head -100000; echo $COLOUR $JAXRUN_HOST $JAXRUN_JOB_ID $JAXRUN_STALE.", JAXRUN_HOST="h7"))
    output = agent.expect(HostChecked).output
    assert output.endswith(f"y\ngreen h7 {JOB_ID} .") and 2**16 - 100 < len(output) <= 2**16
    assert agent.shut_down()[0] == 0


def test_what_it_leaves_and_what_takes_too_long_is_killed_before_it_is_told(agent, endless):
    command, left = endless
    agent.send(check(f"({command}) & exit 0"))
    assert agent.expect(HostChecked).failure == "" and left() == []
    agent.send(check(command, timeout=0.5))
    assert agent.expect(HostChecked).failure == "did not end in 0.5 s" and left() == []


def test_the_next_attempt_and_the_end_of_an_agent_end_its_check(agent, endless):
    command, left = endless
    agent.send(check(command))
    wait_until(lambda: len(left()) == 3)
    agent.send(NextAttempt(2, (0,)))
    agent.until(lambda: any(getattr(message, "attempt", 1) == 2 for message in agent.received))
    assert left() == [] and not any(isinstance(message, HostChecked) for message in agent.received)
    agent.send(check(command))
    wait_until(lambda: len(left()) == 3)
    agent.process.kill()
    agent.end()
    wait_until(lambda: not left())


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


def test_a_host_that_fails_ends_the_job_before_any_worker_starts(start):
    job = start(CLEAN, CLEAN, host_check="echo $JAXRUN_ATTEMPT: no GPU; exit 1")
    ended = job.end()
    assert (
        ended.code == 69
        and f"jaxrun: {os.uname().nodename} failed --host-check: exited with status 1: 1: no GPU" in ended.err
    )
    assert not job.events("WorkerSpawned") and len(job.events("HostChecked")) == 1
    (log,) = job.run_dir.glob("host-check-*.log")
    assert log.read_text() == "1: no GPU"


def test_a_check_runs_before_each_attempt(start):
    fails_once = "run(); sys.exit(3) if os.environ['JAXRUN_ATTEMPT'] == '1' else done()"
    job = start(fails_once, CLEAN, host_check="echo $JAXRUN_ATTEMPT", max_restarts=1)
    assert job.end().code == 0
    logs = sorted(job.run_dir.glob("**/host-check-*.log"))
    assert sorted(log.read_text() for log in logs) == ["1", "2"]
    assert [event["attempt"] for event in job.events("HostChecked")] == [1, 2]


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
    assert [event["rank"] for event in result.events("HostChecked")] == [0, 2]
    assert (result.run_dir / "host-check-h1.log").read_text() == "on h1"
    assert not result.events("Hello")


def test_ctrl_c_ends_a_check_on_this_machine(tmp_path: Path, endless: tuple) -> None:
    command, left = endless
    with started(tmp_path, "-n", "2", "--host-check", command, program(tmp_path)) as job:
        job.wait_until(lambda: len(left()) == 3, "the check")
        job.process.send_signal(signal.SIGINT)
        result = job.end()
    assert result.code == 130 and left() == []
    assert "before the program's first line" in result.err


def test_dry_run_shows_the_check(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "jaxrun", "-n", "2", "--host-check", "nvidia-smi -q", "--dry-run", program(tmp_path)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "note: before each attempt each host runs --host-check: nvidia-smi -q\n" in shown
