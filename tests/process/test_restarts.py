"""Jobs on this machine that are started again (--max-restarts)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT, extended, jaxrun, started

# argv: what happens to rank 1 in each attempt, in the step after its third: "kill", "raise", "exit" or "-" for nothing.
PROGRAM = """
import os, signal, sys, time
import jaxrun_runtime as jr
from jax.experimental import multihost_utils

attempt = int(os.environ["JAXRUN_ATTEMPT"])
fate = sys.argv[1:][attempt - 1]
leftovers = [name for name in os.environ if name.startswith("OF_ATTEMPT_")]
os.environ[f"OF_ATTEMPT_{attempt}"] = "1"
print("attempt", attempt, "reason", repr(os.environ["JAXRUN_RESTART_REASON"]), "leftovers", leftovers, flush=True)
for step in range(4):
    multihost_utils.sync_global_devices(f"{step}")
if jr.rank == 1:
    if fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "exit":
        os._exit(7)
    if fate == "raise":
        raise ValueError(f"in attempt {attempt}")
    if fate == "wait":
        print("waiting", flush=True)
        time.sleep(600)
multihost_utils.sync_global_devices("end")
print("finished", attempt, flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def steps_of(run_dir: Path, event: str) -> list[tuple[int, int]]:
    """(attempt, rank) of each such event."""
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [(line.get("attempt", 1), line.get("rank")) for line in lines if line["event"] == event]


@pytest.mark.parametrize("fork", [(), extended(("--no-fork",))])
def test_a_job_that_fails_is_started_again_until_it_ends_well(
    tmp_path: Path, program: str, fork: tuple[str, ...]
) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--max-restarts", "2", *fork, program, "kill", "raise", "-")
    assert result.code == 0, result.err
    assert "attempt 1 of 3 failed: rank 1 of 3 was killed by SIGKILL (9)" in result.err
    assert "attempt 2 of 3 failed: rank 1 of 3 raised ValueError" in result.err
    assert "ValueError: in attempt 2; its log: run/attempt-2/rank-0001.err" in result.err
    assert "2 restarts)" in result.err
    for attempt, folder in ((1, "."), (2, "attempt-2"), (3, "attempt-3")):
        for rank in range(3):
            log = (result.run_dir / folder / f"rank-{rank:04d}.out").read_text()
            assert f"attempt {attempt} reason" in log and "leftovers []" in log
            assert ("finished 3" in log) == (attempt == 3)
            assert (result.run_dir / folder / f"rank-{rank:04d}.flight").exists()
    second = (result.run_dir / "attempt-2" / "rank-0000.out").read_text()
    assert "'rank 1 of 3 was killed by SIGKILL (9)" in second
    verdict = result.verdict()
    assert (verdict["outcome"], verdict["attempt"], len(verdict["earlier"])) == ("ok", 3, 2)
    assert [earlier["outcome"] for earlier in verdict["earlier"]] == ["killed", "failed"]
    assert sorted(steps_of(result.run_dir, "proof")) == [(a, r) for a in (1, 2, 3) for r in (0, 1, 2)]
    assert steps_of(result.run_dir, "attempt_ended") == [(1, None), (2, None)]


def test_the_same_exception_twice_is_a_bug_and_explain_shows_both_attempts(tmp_path: Path, program: str) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--max-restarts", "5", program, *["raise"] * 6)
    assert result.code == 1
    assert "in attempt 2" in result.err and "in attempt 3" not in result.err
    assert f"not restarted: it raised ValueError at {program}:" in result.err
    assert "twice in a row, and saved no step in between: that is a bug, not bad luck." in result.err
    command = [sys.executable, "-m", "jaxrun", "explain", str(result.run_dir)]
    explained = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "attempt 1: rank 1 of 2 raised ValueError" in explained
    assert "not restarted: it raised" in explained and "since attempt 2 was started" in explained


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_at_all", "a ModuleNotFoundError does not go away by itself"),
        extended("import sys; sys.exit(75)", "exit 75 asks for a new job, later"),
    ],
)
def test_what_cannot_get_better_is_not_tried_again(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "program.py").write_text(source)
    result = jaxrun(tmp_path, "-n", "1", "--max-restarts", "5", str(tmp_path / "program.py"))
    assert result.code in (1, 75) and f"not restarted: {words}." in result.err
    assert not (result.run_dir / "attempt-2").exists()


def test_restart_on_leaves_exceptions_out_and_the_last_restart_is_the_last(tmp_path: Path, program: str) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--max-restarts", "1", "--restart-on", "lost", program, "kill", "raise")
    assert result.code == 1 and "not restarted: --restart-on lost leaves this out." in result.err


def test_timeout_counts_over_all_attempts(tmp_path: Path, program: str) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--max-restarts", "5", "--timeout", "6", program, "kill", "wait")
    assert result.code == 124 and "not restarted: --timeout counts over all attempts" in result.err


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_stop_by_ctrl_c_restarts_nothing(tmp_path: Path, program: str, attempts: int) -> None:
    fates = ["kill"] * (attempts - 1) + ["wait"] * 2
    with started(tmp_path, "-n", "2", "--max-restarts", "5", program, *fates) as job:

        def waits() -> bool:
            logs = list(tmp_path.glob("run/**/rank-0001.out"))
            return len(logs) == attempts and any("waiting" in log.read_text() for log in logs)

        job.wait_until(waits, "rank that waits")
        job.process.send_signal(signal.SIGINT)
        result = job.result()
        assert result.code == 130 and "not restarted: it was asked to stop" in result.err
        assert result.verdict()["attempt"] == attempts and job.processes() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("delay", [0.0, extended(0.02), extended(0.1), extended(0.3)])
def test_a_signal_between_two_attempts_ends_the_job_and_leaves_nothing(
    tmp_path: Path, program: str, signum: signal.Signals, delay: float
) -> None:
    with started(tmp_path, "-n", "2", "--max-restarts", "50", program, *["kill", "exit"] * 25) as job:
        job.wait_until((tmp_path / "run" / "attempt-2").exists, "second attempt")
        time.sleep(delay)
        job.process.send_signal(signum)
        code = job.process.wait(TIME_LIMIT)
        if signum == signal.SIGINT:
            assert code in (130, 7, 137)  # the last two where it met an attempt that was failing
        deadline = time.monotonic() + TIME_LIMIT
        while job.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert job.processes() == []


def test_an_injected_fault_comes_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import time, jax\nfrom jax.experimental import multihost_utils as m\n"
        "for i in range(600):\n    m.sync_global_devices(str(i)); time.sleep(0.1)\n"
    )
    faults = ("--chaos", "kill:1@300ms", "--chaos", "kill:0@1s")
    result = jaxrun(tmp_path, "-n", "2", "--max-restarts", "3", *faults, str(tmp_path / "program.py"))
    # Killed twice without a step saved: the same signal.
    assert result.code == 137 and "twice in a row" in result.err
    assert [event["ranks"] for event in result.events("chaos")] == [[1], [0]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-restarts", "-1"), "--max-restarts must be 0 or more, not -1"),
        (("--max-restarts", "1", "--pdb"), "--pdb and --max-restarts 1 contradict; give one of them"),
        (("--max-restarts", "1", "--stdin", "all"), "--stdin all and --max-restarts 1 contradict"),
        (("--max-restarts", "1", "--restart-on", "oom"), "--restart-on"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    result = jaxrun(tmp_path, "-n", "2", *options, __file__)
    assert result.code == 2 and words in result.err and "Traceback" not in result.err
