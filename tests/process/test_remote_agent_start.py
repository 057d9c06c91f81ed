"""An agent that finds no head, or loses what has started it, before it has work."""

import os
import socket
import subprocess
import sys
import time

import pytest
from agent_by_hand import alive
from harness import TIME_LIMIT

from jaxrun.protocol import auth
from jaxrun.protocol.env import AgentEnv


def test_an_agent_without_a_head_says_what_it_has_tried(by_hand):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    head = by_hand(rank=4, size=9, JAXRUN_HEAD=f"127.0.0.1:{port}", JAXRUN_INIT_TIMEOUT="0.4")
    status, err = head.end()
    assert status == 69 and err.startswith(
        f"jaxrun: rank 4 on {os.uname().nodename} found no head of the job within 0.4 s"
    )
    assert f"127.0.0.1:{port} refuses connections" in err and head.token not in err


@pytest.mark.parametrize("when", ["while it looks for a head", "before its first line"])
def test_an_agent_ends_with_what_has_started_it(tmp_path, when):
    """As where jaxrun is killed during the start, and its mpirun with it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
        env = {**os.environ, **AgentEnv("0" * 32, address, auth.new_token(), "open-mpi", 60.0).to_env(), **ranks}
        go = tmp_path / "go"
        waits = f"until [ -e {go} ]; do sleep 0.02; done; " if when == "before its first line" else ""
        agent = f"({waits}exec {sys.executable} -m jaxrun.agent) 2> {tmp_path / 'err'}"
        mpirun = subprocess.Popen(
            ["sh", "-c", f"{agent} & echo $!; wait"],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            pid = int(mpirun.stdout.readline())
            if not waits:
                silent.settimeout(TIME_LIMIT)
                silent.accept()[0].close()
            assert alive(pid)
        finally:
            mpirun.kill()
            mpirun.wait()
            mpirun.stdout.close()
            go.touch()
        deadline = time.monotonic() + TIME_LIMIT
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert "what started this agent has ended" in (tmp_path / "err").read_text()


def test_an_agent_with_another_jobs_token_is_refused_and_shows_no_token(by_hand):
    wrong = auth.new_token()
    head = by_hand(token=wrong, timeout=1.5)
    deadline = time.monotonic() + TIME_LIMIT
    while head.process.poll() is None and time.monotonic() < deadline:
        head.loop.run_once(0.02)
    assert head.line is None
    status, err = head.end()
    assert status == 69 and "refuses: it does not know the token of this job" in err
    assert wrong not in err and head.token not in err


@pytest.mark.parametrize(
    ("env", "status", "text"),
    [
        ({"JAXRUN_INIT_TIMEOUT": "soon"}, 70, "JAXRUN_INIT_TIMEOUT='soon' is not a valid float"),
        ({"JAXRUN_HEAD": "nowhere"}, 2, "an address is written host:port"),
        ({"OMPI_COMM_WORLD_RANK": "x"}, 69, "OMPI_COMM_WORLD_RANK='x' is no whole number"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, 69, "OMPI_COMM_WORLD_RANK=1, which is no rank in a job of"),
    ],
    ids=["timeout", "address", "rank", "size"],
)
def test_an_environment_that_is_not_the_jobs_is_an_error_of_one_line(by_hand, env, status, text):
    head = by_hand(**env)
    found, err = head.end()
    assert found == status and err.startswith("jaxrun: ") and text in err and "Traceback" not in err
