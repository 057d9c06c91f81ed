"""--keep-survivors, and ranks that are killed at bad moments: the job goes on, or says why not, and never hangs."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import Job, started
from survivor_programs import NEEDS_LIVE_DEVICES, STEP, TRAINING, write

pytestmark = [pytest.mark.extended, *NEEDS_LIVE_DEVICES]

KILLS = 20
# Well below the 30 s for which Gloo waits for a rank that does not come; on a quiet machine it is less than 1 s.
HANG_S = 15.0


HELPERS = """
import threading

def dies(mine, at, after=None):
    \"\"\"Whether it is time for this rank, which then dies at once, or `after` so many seconds.\"\"\"
    if rank != mine or step != at or os.path.exists(f"dead-{mine}"):
        return False
    open(f"dead-{mine}", "w").close()
    if after is None:
        os.kill(os.getpid(), 9)
    threading.Timer(after, os.kill, (os.getpid(), 9)).start()
    return True

def long(x):
    for _ in range(3000):
        x = jnp.sin(x) + x
    return x

"""


def endless(tmp_path: Path, inside: str = "") -> list[str]:
    """A program that trains until the file `over` exists, and does what `inside` says in each live_devices."""
    code = TRAINING.format(fails="pass").replace("while step < last:", f'{HELPERS}while not os.path.exists("over"):')
    code = code.replace(
        "            if devices != known:\n", f"            {inside}\n            if devices != known:\n"
    )
    return [write(tmp_path, code), "0", "0x0p+0", "0"]


def kill(job: Job, rank: int) -> int:
    """Kill the process that the rank has now, if it has one; returns its number, or 0."""
    pid = next((event["pid"] for event in reversed(job.events("WorkerSpawned")) if event["rank"] == rank), 0)
    with suppress(ProcessLookupError):
        if pid and pid in job.processes():
            os.kill(pid, signal.SIGKILL)
            return pid
    return 0


def longest_pause(events: list[dict[str, Any]], out: str) -> float:
    """The longest time until a step of rank 0 since anything else has happened to any rank."""
    steps = [float(at) for at, *_ in STEP.findall(out)]
    marks = [event["logged"] for event in events if event["type"] in ("WorkerSpawned", "WorkerExited", "RecordReturn")]
    return max(step - max(mark for mark in [*marks, *steps] if mark < step) for step in steps[1:])


def test_a_job_goes_on_through_kills_at_random_moments(tmp_path: Path) -> None:
    choose, killed = random.Random(53), set[int]()  # of which one that takes its time to die is hit twice
    words = ("-n", "4", "--keep-survivors", "--max-restarts", str(2 * KILLS))
    with started(tmp_path, *words, *endless(tmp_path)) as job:
        job.wait_for_event("DeviceReport", count=4)
        while len(killed) < KILLS:
            time.sleep(choose.uniform(0.0, 0.8))
            killed |= {kill(job, rank) for rank in choose.sample(range(1, 4), choose.choice((1, 1, 2)))} - {0}
            assert job.process.poll() is None, job.result()
        count = len(job.events("RecordReturn"))
        job.wait_until(lambda: len(job.events("RecordReturn")) > count, "another return")
        (tmp_path / "over").touch()
        result = job.end()
    assert result.code == 0 and "; restarting" not in result.err, result
    assert longest_pause(job.events(), result.out) < HANG_S
    assert len(re.findall(r"was killed by SIGKILL \(9\), .* and it is started again", result.err)) == len(killed)


MOMENTS = {
    "before the first collective": ("dies(2, 0)", 1),
    "while it compiles": ("dies(2, 10, 0.1) and jax.jit(long)(1.0)", 1),
    "while it waits in the barrier of live_devices": (
        "dies(2, 10, 0.3); rank == 0 and step == 10 and time.sleep(1)",
        1,
    ),
    "together with another rank": ("dies(1, 10); dies(2, 10)", 2),
    "while another rank is on its way back": ("dies(1, 10); dies(2, 10, 0.2)", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_dies_at_a_bad_moment_comes_back(tmp_path: Path, moment: str) -> None:
    inside, deaths = MOMENTS[moment]
    with started(tmp_path, "-n", "3", "--keep-survivors", "--max-restarts", "4", *endless(tmp_path, inside)) as job:
        job.wait_for_event("RecordReturn", count=deaths)
        job.wait_for_output("step 20")
        (tmp_path / "over").touch()
        result = job.end()
    assert result.code == 0 and "; restarting" not in result.err, result
    assert longest_pause(job.events(), result.out) < HANG_S
    assert result.err.count("it is started again") == deaths == result.err.count(" is back, ")


# Rank 0 joins, so that the program can start, once rank 2 was killed.
LATE = """
import os, time
while os.environ.get("JAXRUN_RANK") == "0" and not os.path.exists("killed"):
    time.sleep(0.01)
"""


def test_a_rank_that_dies_before_the_program_starts_ends_the_attempt_and_all_start_again(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE)
    words = ("-n", "3", "--no-fork", "--keep-survivors", "--max-restarts", "1", *endless(tmp_path))
    with started(tmp_path, *words, env={"PYTHONPATH": str(tmp_path)}) as job:
        job.wait_until(lambda: kill(job, 2), "rank 2")
        (tmp_path / "killed").touch()
        job.wait_until(lambda: any(event["attempt"] == 2 for event in job.events("WorkerSpawned")), "attempt 2")
        job.wait_for_event("AttemptEnded")
        (tmp_path / "over").touch()
        result = job.end()
    assert result.code == 0 and "attempt 1 of 2 failed: rank 2 of 3 was killed by SIGKILL (9)" in result.err, result
    assert "go on (--keep-survivors)" not in result.err


def test_a_fault_of_chaos_is_survived_and_said_to_be_injected(tmp_path: Path) -> None:
    words = ("-n", "3", "--keep-survivors", "--max-restarts", "2", "--chaos", "kill:2@0.5s", "--chaos", "kill:1@2s")
    with started(tmp_path, *words, *endless(tmp_path)) as job:
        job.wait_for_event("RecordReturn", count=2)
        (tmp_path / "over").touch()
        result = job.end()
    assert result.code == 0 and "; restarting" not in result.err, result
    for rank in (1, 2):
        how = rf"rank {rank} of 3 was killed by SIGKILL \(9\), as --chaos asked, [\d.]+ s into the run"
        assert re.search(how + "; .* and it is started again", result.err)
        assert re.search(how + ", and was back after", str(result.verdict()["details"]))


def test_a_rank_comes_back_on_its_host_with_a_command_on_each_host(tmp_path: Path) -> None:
    with socket.socket() as free:  # bound here, so that nobody else gets the port of the head
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        place = ("--hosts", "2", "--head", f"127.0.0.1:{free.getsockname()[1]}", "-n", "4", "--keep-survivors")
        words = (*place, "--max-restarts", "1", *endless(tmp_path))
        host_1 = [sys.executable, "-m", "jaxrun", "--run-dir", "other"]
        with (
            started(tmp_path, "--host-rank", "0", "--chaos", "kill:3@0.5s", *words) as job,
            started(tmp_path, "--host-rank", "1", *words, command=host_1) as other,
        ):
            job.wait_for_event("RecordReturn")
            (tmp_path / "over").touch()
            result, second = job.end(), other.result()
    assert (result.code, second.code) == (0, 0) and "; restarting" not in result.err, (result, second)
    assert re.search(r"rank 3 .*is back, [\d.]+ s after it was lost: ranks 0-3 go on", result.err), result
