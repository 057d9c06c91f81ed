"""Remote jobs to which agents and others come that do not belong there, and the token that keeps them out."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from remote_job import AGENTS, CLEAN, remote_jobs


@pytest.fixture
def start(tmp_path):
    with remote_jobs(tmp_path) as run:
        yield run


@pytest.mark.extended
def test_two_agents_of_one_rank_are_refused(start):
    job = start(CLEAN, CLEAN, script=AGENTS.replace("RANK=$rank", "RANK=0"))
    assert job.end() == 65 and "two agents say that they are rank 0: process " in job.err


@pytest.mark.extended
def test_agents_of_another_size_are_refused(start):
    job = start(CLEAN, CLEAN, script=AGENTS.replace("SIZE=$1", "SIZE=5"))
    assert job.end() == 65 and "was started as one of 5, but the job has 2 processes" in job.err


def test_agents_in_another_directory_are_refused(start):
    job = start(CLEAN, script="cd /\n" + AGENTS)
    assert job.end() == 69 and f"is not there on {os.uname().nodename}: the agent was started in /" in job.err


def test_other_peers_at_the_port_do_not_disturb_the_job(start):
    code = "run(); print('ready', flush=True); time.sleep(1.0); done()"
    job = start(code, code)
    listening = job.until(lambda: job.events("started"))[0]["listening"]
    port = int(re.search(r"\d:(\d+)", listening)[1])
    with contextlib.ExitStack() as stack:
        resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (100, 100))  # fewer than there are silent strangers
        for _ in range(120):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for data in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(999),
            b"\x00\x00\x00\x05",
            b"\x16\x03\x01\x02\x00",
        ) * 5:
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                peer.sendall(data)
        job.until_output("ready", 2)
        assert job.end() == 0
    assert job.verdict()["exit_code"] == 0
    dropped = job.events("dropped")
    assert 1 <= len(dropped) <= 3 and sum(event["count"] for event in dropped) >= 10, dropped
    assert all(event["text"].startswith("a peer at ") for event in dropped)


def test_a_second_agent_of_a_rank_that_runs_is_refused_and_the_job_goes_on(start, tmp_path):
    over = tmp_path / "over"
    code = f"run(); print('ready', flush=True)\nwhile not os.path.exists({str(over)!r}): time.sleep(0.02)\ndone()"
    job = start(code, code)
    job.until_output("ready", 2)
    first = job.agents()[1]
    environ = dict(line.split("=", 1) for line in os.fsdecode(_read(first, "environ")).strip("\0").split("\0"))
    for size, expected in (
        (2, f"jaxrun: this job runs already: its rank 1 is another process, on {os.uname().nodename}\n"),
        (9, "jaxrun: this job runs already, with 2 processes: none is rank 8\n"),
    ):
        environ |= {"OMPI_COMM_WORLD_RANK": str(size - 1), "OMPI_COMM_WORLD_SIZE": str(size)}
        command = [sys.executable, "-m", "jaxrun.agent"]
        second = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=20)
        assert (second.returncode, second.stderr) == (65, expected)
    assert job.process.poll() is None
    over.touch()
    assert job.end() == 0


def test_the_token_is_in_the_agents_environment_and_nowhere_else(start):
    job = start(*["run(); print(sorted(os.environ), flush=True); print('ready', flush=True); time.sleep(600)"] * 2)
    job.until_output("ready", 2)
    agents = job.agents()
    (token,) = {re.search(rb"\0JAXRUN_TOKEN=([0-9a-f]{64})\0", _read(pid, "environ"))[1] for pid in agents.values()}
    for name in os.listdir("/proc"):
        if name.isdigit():
            assert token not in _read(name, "cmdline"), name
    for event in job.events("spawned"):
        assert b"JAXRUN_TOKEN" not in _read(event["pid"], "environ")
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.end() == 143
    assert token.decode() not in job.out + job.err and "JAXRUN_TOKEN" not in job.out
    files = [path for path in job.run_dir.rglob("*") if path.is_file()]
    assert {"events.jsonl", "job.json", "verdict.json", "rank-0000.out"} <= {path.name for path in files}
    assert all(token not in path.read_bytes() for path in files)


def _read(pid, name):
    with contextlib.suppress(OSError):
        return b"\0" + Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
