"""Ctrl-C, SIGTERM and SIGHUP at the launcher of a job that runs."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
from harness import HERE, MISBEHAVE, Result, extended, started

from jaxrun.head.interruption import REPEATED_SIGNAL_S

pytestmark = pytest.mark.jax_version
INTERRUPTED = str(HERE / "interrupted.py")


def test_ctrl_c_is_keyboard_interrupt_in_every_rank_that_it_reaches(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "3", "--grace", "5", INTERRUPTED) as job:
        job.wait_for_output("ready", 3)
        time.sleep(0.5)  # for rank 1 to be in its call, and rank 2 in its loop
        job.process.send_signal(signal.SIGINT)
        result = job.result()
        assert job.processes() == []
    assert result.code == 130, result
    # Rank 0 leaves the call that rank 1 waits in, so that rank 1 returns to Python, with an error of the call.
    caught = ["ready", "caught", "finally", "exit handler"]
    assert _written(result, 0) == caught, result
    assert _written(result, 1) == (caught if sys.version_info >= (3, 12) else [caught[0], *caught[2:]]), result
    assert _written(result, 2) == ["ready"], result
    assert "Ctrl-C: KeyboardInterrupt in ranks 0-2" in result.err
    assert "rank 2 did not end within 5 s; sent SIGTERM and SIGKILL" in result.err
    headline = str(result.verdict()["headline"])
    assert "rank 2 did not end in time (stuck at interrupted.py:22 endless, in JAX: " in headline
    assert "Traceback" not in result.err and "preemption_notifier" not in result.err
    log = (result.run_dir / "rank-0000.err").read_text()
    assert log.endswith("KeyboardInterrupt\n") and "jaxrun_runtime" not in log


def _written(result: Result, rank: int) -> list[str]:
    lines = (result.run_dir / f"rank-{rank:04d}.out").read_text().splitlines()
    return [line for line in lines if not line.startswith("[Gloo]")]


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, script) -> None:
    program = script("""
import time
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("caught", flush=True)
    time.sleep(600)
""")
    with started(tmp_path, "-n", "1", "--grace", "600", str(program)) as job:
        job.wait_for_output("ready")
        job.process.send_signal(signal.SIGINT)
        job.wait_for_output("caught")
        time.sleep(REPEATED_SIGNAL_S)
        job.process.send_signal(signal.SIGINT)
        result = job.result()
    assert result.code == 130


def test_sigterm_is_jaxs_preemption_notice(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", MISBEHAVE, "--until-preempted") as job:
        job.wait_for_output("listening", 2)
        job.process.terminate()
        result = job.result()
    assert result.code == 75, result
    assert result.out.count("preempted") == 2
    assert "SIGTERM: asked ranks 0-1 to end (SIGTERM); SIGKILL follows in 30 s" in result.err
    assert "preemption_notifier" not in result.err
    assert "preemption_notifier" in (result.run_dir / "rank-0000.err").read_text()


def test_a_programs_own_handler_of_sigterm_is_run(tmp_path: Path, script) -> None:
    program = script("""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(600)
""")
    with started(tmp_path, "-n", "1", str(program)) as job:
        job.wait_for_output("ready")
        job.process.terminate()
        assert job.result().code == 75


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), extended(signal.SIGHUP, 129)])
def test_sigterm_that_nobody_listens_to_ends_the_job_at_once(tmp_path: Path, signum: int, code: int) -> None:
    with started(tmp_path, "-n", "2", "--grace", "600", MISBEHAVE, "--hang") as job:
        job.wait_for_output("ready", 2)
        job.process.send_signal(signum)
        result = job.result()
        assert job.processes() == []
    assert result.code == code
    assert "no rank listens to SIGTERM, so 2 ranks were killed at once" in result.err
