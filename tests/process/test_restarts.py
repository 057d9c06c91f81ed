"""Faults that are injected (--chaos), and jobs that are started again (--max-restarts).

When they are is in tests/unit/test_restarts.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TIME_LIMIT, Result, extended, jaxrun, read_events, started, wait_until, write_fake_runtime

from jaxrun.job_client.running_job import RunningJob
from jaxrun.protocol.job_messages import FaultOrder, SignalOrder
from jaxrun.protocol.names import CONTROL_FD
from jaxrun.records.history.explain import explain_run

# ---- faults


def seconds_after(words: str, text: str) -> float:
    """The number that follows `words` in a text: on a busy machine a fault comes later than asked, never sooner."""
    return float(text.split(words, 1)[1].split()[0])


INTERRUPTED = """
import os, time
descriptors = os.listdir("/proc/self/fd")
links = [os.readlink(f"/proc/self/fd/{{name}}") for name in descriptors if os.path.islink(f"/proc/self/fd/{{name}}")]
try:
    print("ready", {name!r} in os.environ, {link!r} in links, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
time.sleep(600)
"""


@pytest.mark.extended
def test_the_parents_socket_interrupts_breaks_and_ends(tmp_path: Path, script) -> None:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    program = script(INTERRUPTED.format(name=CONTROL_FD, link=os.readlink(f"/proc/self/fd/{number}")))
    environ = {CONTROL_FD: str(number)}
    with ours, theirs, started(tmp_path, "-n", "2", str(program), env=environ, pass_fds=[number]) as job:
        job.wait_for_output("ready False False", 2)
        parent = RunningJob(tmp_path, ours, job.process.pid)
        parent.send(SignalOrder(signal.SIGINT))
        job.wait_for_output("interrupted", 2)
        parent.send(FaultOrder("pause", (1,)))
        parent.send(FaultOrder("kill", ()))
        job.wait_for_event("InjectFault")
        ours.sendall(b"\0\0\0\5what?")
        result = job.end()
    assert result.code == 129, result
    assert "rank 1 was stopped by SIGSTOP (19), as its gang asked" in result.err
    assert "sent what is not understood: a frame is not JSON: b'what?'" in result.err
    assert result.err.count("of the process that started it") == 1


# ---- restarts

# argv: what happens to rank 1 in each attempt, in the step after its third: "kill", "raise", "exit" or "-" for nothing.
PROGRAM = """
import os, signal, sys
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
multihost_utils.sync_global_devices("end")
print("finished", attempt, flush=True)
"""


def steps_of(run_dir: Path, event: str) -> list[tuple[int, int]]:
    """(attempt, rank) of each such event."""
    return [(line["attempt"], line.get("rank")) for line in read_events(run_dir, event)]


@pytest.mark.parametrize("fork", [(), extended(("--no-fork",))], ids=["forked", "not forked"])
def test_a_job_that_fails_is_started_again_until_it_ends_well(tmp_path: Path, script, fork: tuple[str, ...]) -> None:
    arguments = (str(script(PROGRAM)), "kill", "raise", "-")
    result = jaxrun(tmp_path, "-n", "2", "--max-restarts", "2", *fork, *arguments)
    assert result.code == 0, result.err
    assert "attempt 1 of 3 failed: rank 1 of 2 was killed by SIGKILL (9)" in result.err
    assert "attempt 2 of 3 failed: rank 1 of 2 raised ValueError" in result.err
    assert "ValueError: in attempt 2; its log: run/attempt-2/rank-0001.err" in result.err
    assert "2 restarts)" in result.err
    for attempt, folder in ((1, "."), (2, "attempt-2"), (3, "attempt-3")):
        for rank in range(2):
            log = (result.run_dir / folder / f"rank-{rank:04d}.out").read_text()
            assert f"attempt {attempt} reason" in log and "leftovers []" in log
            assert ("finished 3" in log) == (attempt == 3)
            assert (result.run_dir / folder / f"rank-{rank:04d}.flight").exists()
    second = (result.run_dir / "attempt-2" / "rank-0000.out").read_text()
    assert "'rank 1 of 2 was killed by SIGKILL (9)" in second
    verdict = result.verdict()
    assert (verdict["outcome"], verdict["attempt"], len(verdict["earlier"])) == ("ok", 3, 2)
    assert [earlier["outcome"] for earlier in verdict["earlier"]] == ["killed", "failed"]
    assert sorted(steps_of(result.run_dir, "DeviceReport")) == [(a, r) for a in (1, 2, 3) for r in (0, 1)]
    assert steps_of(result.run_dir, "AttemptEnded") == [(1, None), (2, None)]


@pytest.mark.extended
def test_an_injected_fault_ends_an_attempt_as_any_death_comes_once_and_is_explained(tmp_path: Path) -> None:
    words = ("-n", "2", "--max-restarts", "3", "--chaos", "kill:1@300ms", "--chaos", "kill:0@6s")
    codes = ["run(); time.sleep(600)"] * 2
    result = jaxrun(tmp_path, *words, "by_hand.py", *codes, env=write_fake_runtime(tmp_path))
    assert " · --chaos kill:1@0.3s" in result.err
    assert json.loads((result.run_dir / "job.json").read_text())["options"]["chaos"] == ["kill:1@0.3s", "kill:0@6s"]
    (first,) = result.verdict()["earlier"]  # type: ignore[misc]
    assert first["culprits"] == [1]
    assert first["headline"].startswith("rank 1 of 2 was killed by SIGKILL (9), as --chaos asked, ")
    assert seconds_after("as --chaos asked, ", first["headline"]) >= 0.3
    # Killed twice without a step saved: the same signal.
    assert result.code == 137 and "twice in a row, and saved no step in between: that is a bug" in result.err
    assert [event["to"] for event in result.events("InjectFault")] == [[1], [0]]
    explained = explain_run(result.run_dir)
    assert "attempt 1: rank 1 of 2 was killed by SIGKILL (9), as --chaos asked" in explained
    assert "not restarted: it was killed" in explained and "since attempt 2 was started" in explained


@pytest.mark.extended
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, pytest.param(None, id="jaxrun stop")])
def test_a_signal_between_two_attempts_ends_the_job_and_leaves_nothing(
    tmp_path: Path, script, signum: int | None
) -> None:
    arguments = (str(script(PROGRAM)), *["kill", "exit"] * 25)
    with started(tmp_path, "-n", "2", "--max-restarts", "50", *arguments) as job:
        job.wait_until((tmp_path / "run" / "attempt-2").exists, "second attempt")
        if signum is None:
            subprocess.run([sys.executable, "-m", "jaxrun", "stop", job.run_dir], check=True, timeout=TIME_LIMIT)
        else:
            job.process.send_signal(signum)
        code = job.process.wait(TIME_LIMIT)
        if signum != signal.SIGKILL:
            # the last two where it met an attempt that was failing
            assert code in (130 if signum else 143, 7, 137)
        wait_until(lambda: not job.processes())


# ---- workers by hand, without jax


def by_hand(directory: Path, code: str, *options: str) -> Result:
    """A job of one such rank, which may be started again; `attempt` is the number of the attempt."""
    environ = write_fake_runtime(directory)
    code = f"run(); attempt = env.attempt\n{code}"
    return jaxrun(directory, "-n", "1", "--max-restarts", "5", *options, "by_hand.py", code, env=environ)


@pytest.mark.extended
def test_timeout_counts_over_all_attempts(tmp_path: Path) -> None:
    result = by_hand(tmp_path, "time.sleep(600) if attempt > 1 else fail()", "--timeout", "4")
    assert result.code == 124 and "not restarted: --timeout counts over all attempts" in result.err
