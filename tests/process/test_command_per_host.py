"""One command per host (`--host-rank`), on one machine that plays two hosts: one job, one verdict, one exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import MISBEHAVE, TIME_LIMIT, end_commands, ended, start_command

from jaxrun.agent.guard import find_marked, job_marker

Hosts = Callable[..., list[subprocess.Popen[str]]]
TOKEN = {"JAXRUN_TOKEN": "5" * 64}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """hosts(WORDS of host 0, WORDS of host 1…): starts a command for each; ends them at the end."""
    started: list[subprocess.Popen[str]] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        head = f"127.0.0.1:{free.getsockname()[1]}"

    def start(*words: list[str], env: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
        for host, own in enumerate(words):
            place = ["--hosts", "2", "--head", head, "--platform", "cpu"]
            rank = [] if "--host-rank" in own else ["--host-rank", str(host)]
            started.append(start_command([*place, *rank, *own], tmp_path, env))
        return started

    yield start
    end_commands(started)


def wait_for_run(tmp_path: Path, rank: int) -> str:
    """Wait until this rank has written something; returns the job's id."""
    deadline = time.monotonic() + TIME_LIMIT
    while not (logs := list(tmp_path.glob(f"jaxrun-runs/*/rank-{rank:04d}.out"))) or not logs[0].read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return str(json.loads((logs[0].parent / "job.json").read_text())["job_id"])


def assert_gone(job_id: str, within: float = 3.0) -> None:
    deadline = time.monotonic() + within
    while left := list(find_marked(job_marker(job_id))):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_the_processes_of_two_commands_are_one_job(hosts: Hosts, tmp_path: Path) -> None:
    """They find each other by the file in the directory that they share."""
    words = ["--nproc-per-node", "2", "-m", "jaxrun_runtime.programs.selfcheck"]
    first, second = ended(hosts(words, words))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "4 processes (cpu) on 2 hosts, with a command on each" in first[2] and "done in" in first[2]
    assert second[1] == ""
    assert "host 1 of 2: ranks 2-3 of 4 join the head" in second[2] and second[2].endswith("jaxrun: done\n")
    assert not list(tmp_path.glob(".jaxrun-attach*"))


def test_the_first_failure_is_the_exit_code_on_every_host(hosts: Hosts) -> None:
    """Beside that, a secret in the environment needs no shared directory."""
    words = ["-n", "2", MISBEHAVE, "--rank", "1", "--exit", "7"]
    first, second = ended(hosts(words, words, env=TOKEN))
    assert (first[0], second[0]) == (7, 7), (first, second)
    assert "rank 1 of 2 ended with status 7" in first[2]
    assert "the job ended with exit 7; why stands on host 0" in second[2]


def test_commands_that_differ_are_refused_with_the_difference(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("raise SystemExit('this program must not run')\n")
    first, second = ended(hosts(["-n", "4", "p.py"], ["-n", "6", "p.py"], env=TOKEN))
    assert (first[0], second[0]) == (65, 65), (first, second)
    assert "was started for 6 processes in all, host 0 for 4\n-n, --hosts" in first[2]
    assert second[2].endswith("jaxrun: the job ended with exit 65; why stands on host 0\n")


def test_a_host_rank_that_is_given_twice_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("raise SystemExit('this program must not run')\n")
    one = ["--host-rank", "1", "-n", "2", "p.py"]
    # Host 0 comes last, so that it hears of both.
    ends = ended(hosts(one, one, ["--host-rank", "0", "-n", "2", "p.py"], env=TOKEN))
    assert [code for code, _, _ in ends] == [65, 65, 65], ends
    assert f"--host-rank 1 was given twice on {os.uname().nodename}\neach host needs a number of its own" in ends[2][2]


def test_a_host_that_does_not_come_is_named_with_what_to_try(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("")
    ((code, _, err),) = ended(hosts(["-n", "2", "--init-timeout", "1.5", "p.py"]))
    assert code == 69 and "missing: " in err and "--host-rank 1)" in err
    assert "is jaxrun started there, with the same --hosts, --head and JAXRUN_TOKEN" in err


def test_a_host_that_finds_no_head_says_once_where_it_looked(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("")
    words = ["--host-rank", "1", "--init-timeout", "0.5", "-n", "4", "p.py"]
    ((code, _, err),) = ended(hosts(words))
    assert code == 69 and err.count("found no head") == 1
    assert "ranks 2-3 on " in err and "host 0 has not left its address in" in err and "export JAXRUN_TOKEN" in err
    with_token = hosts(words, env=TOKEN)[1:]
    ((code, _, err),) = ended(with_token)
    assert code == 69 and "refuses connections" in err and "why stands" not in err


def test_ctrl_c_on_another_host_ends_the_job_on_all(hosts: Hosts, tmp_path: Path) -> None:
    words = ["-n", "2", "--grace", "1", MISBEHAVE, "--rank", "9"]
    processes = hosts(words, words, env=TOKEN)
    job_id = wait_for_run(tmp_path, 1)
    processes[1].send_signal(signal.SIGINT)
    first, second = ended(processes)
    assert (first[0], second[0]) == (130, 130), f"{first[2]}\n{second[2]}"
    assert_gone(job_id)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_a_command_that_is_killed_leaves_nothing_on_either_host(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    words = ["-n", "2", MISBEHAVE, "--rank", "9"]
    processes = hosts(words, words, env=TOKEN)
    job_id = wait_for_run(tmp_path, 1)
    processes[victim].kill()
    ends = ended(processes)
    assert (ends[victim][0], ends[1 - victim][0]) == (-9, 69), ends
    expected = ("rank 1 of 2", "the head at 127.0.0.1 was lost: its host is gone, or jaxrun there was killed")
    assert expected[1 - victim] in ends[1 - victim][2]
    assert_gone(job_id)


RESTARTED = """
import os, signal
import jaxrun_runtime as jr
from jax.experimental import multihost_utils

attempt = os.environ["JAXRUN_ATTEMPT"]
print("attempt", attempt, flush=True)
multihost_utils.sync_global_devices("start")
if attempt == "1" and jr.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == "2" and jr.rank == 1:
    raise ValueError("again")
multihost_utils.sync_global_devices("end")
print("end", flush=True)
"""


def test_a_job_is_started_again_by_the_same_agents(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RESTARTED)
    words = ["-n", "4", "--max-restarts", "2", "program.py"]
    first, second = ended(hosts(words, words))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "attempt 1 of 3 failed: rank 2 of 4 was killed by SIGKILL (9)" in first[2]
    assert "attempt 2 of 3 failed: rank 1 of 4 raised ValueError" in first[2]
    (run_dir,) = (
        path for path in (tmp_path / "jaxrun-runs").iterdir() if (path / "job.json").exists() and not path.is_symlink()
    )
    for folder, attempt in (("", 1), ("attempt-2", 2), ("attempt-3", 3)):
        for rank in range(4):
            log = (run_dir / folder / f"rank-{rank:04d}.out").read_text()
            assert f"attempt {attempt}\n" in log and ("end" in log) == (attempt == 3)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    agents = {(event["rank"], event["pid"]) for event in events if event["event"] == "reported"}
    assert len(agents) == 4 and len([event for event in events if event["event"] == "reported"]) == 12
    assert_gone(str(json.loads((run_dir / "job.json").read_text())["job_id"]))


def test_agents_that_jaxrun_did_not_start_cannot_be_replaced(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os\nif os.environ['JAXRUN_RANK'] == '1': os.kill(os.getppid(), 9)\nimport time; time.sleep(60)"
    )
    words = ["-n", "2", "--max-restarts", "2", "program.py"]
    first, _ = ended(hosts(words, words))
    assert first[0] == 69 and "not restarted: agents are gone that jaxrun did not start." in first[2], first
