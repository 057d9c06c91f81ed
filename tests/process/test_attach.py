"""`jaxrun attach` on one machine, its processes started by hand: one job, one verdict, one exit code."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import MISBEHAVE, TIME_LIMIT, end_commands, ended, start_command

from jaxrun.agent.guard import find_marked, job_marker


@pytest.fixture
def attach(tmp_path):
    """attach(SIZE, WORDS…): starts as many processes; ends them at the end."""
    started = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start(size, *words, env=None, options=("--platform", "cpu")):
        for rank in range(size):
            place = ["--rank", str(rank), "--size", str(size), "--head", f"127.0.0.1:{port}"]
            started.append(start_command(["attach", *place, *options, *words], tmp_path, env))
        return started

    yield start
    end_commands(started)


def test_processes_that_somebody_started_are_one_job(attach, tmp_path):
    ends = ended(attach(2, "-m", "jaxrun_runtime.programs.selfcheck"))
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "attached to processes started by hand" in ends[0][2] and "done in" in ends[0][2]
    assert ends[1][1:] == ("", "")
    assert not list(tmp_path.glob(".jaxrun-attach*"))


_TORCH = """
import os, socket
from jax.experimental import multihost_utils
at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
server = socket.create_server(("", at[1])) if os.environ["RANK"] == "0" else None
multihost_utils.sync_global_devices("listening")
if server:
    print(server.accept()[0].makefile().read())
else:
    with socket.create_connection(at) as connection:
        connection.sendall(" ".join(os.environ[name] for name in names).encode())
"""


def test_torchruns_variables_lead_the_ranks_to_rank_0(attach, tmp_path):
    (tmp_path / "program.py").write_text(_TORCH)
    ends = ended(attach(2, "program.py", options=("--platform", "cpu", "--torch-env")))
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert ends[0][1] == "[0] 1 2 1 2\n"


def test_the_first_failure_ends_all_of_them_with_its_status(attach, tmp_path):
    """Beside that, a secret in the environment needs no shared directory, wins over the file, and makes no id."""
    processes = attach(2, MISBEHAVE, "--rank", "1", "--exit", "7", env={"JAXRUN_TOKEN": "7" * 64})
    ends = ended(processes)
    job_id = json.loads(next(tmp_path.glob("jaxrun-runs/*/job.json")).read_text())["job_id"]
    assert job_id != hashlib.sha256(b"jaxrun job " + b"7" * 64).hexdigest()[:32]
    assert [code for code, _, _ in ends] == [7, 7], ends
    assert re.search(r"rank 1 of 2 ended with status 7", ends[0][2])


def test_the_loss_of_rank_0_ends_the_others(attach, tmp_path):
    processes = attach(2, MISBEHAVE, "--rank", "9")
    deadline = time.monotonic() + TIME_LIMIT
    while not (logs := list(tmp_path.glob("jaxrun-runs/*/rank-0001.out"))) or not logs[0].read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    text = next(tmp_path.glob("jaxrun-runs/*/job.json")).read_text()
    job_id = re.search(r'"job_id": "([0-9a-f]+)"', text)[1]
    processes[0].kill()
    assert processes[1].wait(TIME_LIMIT) == 69
    deadline = time.monotonic() + TIME_LIMIT
    while list(find_marked(job_marker(job_id))):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_file_of_another_user_in_place_of_rank_0s_is_named(tmp_path):
    words = ["attach", "--rank", "1", "--size", "2", "--rendezvous", str(tmp_path), "--init-timeout", "0.5", MISBEHAVE]

    def refusal(**env):
        command = [sys.executable, "-m", "jaxrun", *words]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=TIME_LIMIT)
        return done.returncode, done.stderr

    code, text = refusal()
    assert code == 69 and "rank 0 has not left its address in" in text
    planted = Path(re.search(r"address in (\S+)\. ", text)[1])
    planted.write_text('{"token": "known to a stranger", "head": "127.0.0.1:9"}')
    planted.chmod(0o666)
    code, text = refusal()
    assert code == 69 and f"{planted} is not trusted: others than you can write it (mode 0666); remove it" in text
    planted.unlink()
    os.mkfifo(planted)
    code, text = refusal()
    assert code == 69 and f"{planted} is not trusted: it is no regular file" in text
    code, text = refusal(JAXRUN_TOKEN="guess me")
    assert code == 2 and "JAXRUN_TOKEN has 8 bytes" in text and "guess me" not in text
