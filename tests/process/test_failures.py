"""Jobs on one machine that fail or stall: what each kind of end looks like, and that nothing is left of it.

Which histories of events end a job how is in tests/unit/test_head.py, the texts are in test_verdict.py.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from harness import MISBEHAVE, TIME_LIMIT, is_alive, jaxrun, process_state, started, wait_until, write_fake_runtime

from jaxrun.files.procfs import children
from jaxrun.records.history.explain import explain_run


def test_an_exception_is_the_headline_and_the_exit_handlers_of_its_rank_have_the_grace(tmp_path: Path) -> None:
    flags = ("--rank", "1", "--slow-exit-handler", "600", "--raise", "bad record in shard 2")
    result = jaxrun(tmp_path, "-n", "2", "--grace", "0.5", MISBEHAVE, *flags)
    assert (result.code, result.verdict()["exit_code"], result.verdict()["culprits"]) == (1, 1, [1])
    assert "rank 1 did not end within 0.5 s; sent SIGKILL" in result.err
    assert "in misbehave\n    _raise(flags.message)" in result.err
    assert "Trouble: bad record in shard 2" in result.err
    assert "runpy" not in result.err and "jaxrun_runtime" not in result.err
    assert result.err.count("Traceback (most recent call last)") == 1
    assert "Trouble: bad record" in (result.run_dir / "rank-0001.err").read_text()
    explained = explain_run(result.run_dir)
    assert "Trouble: bad record in shard 2" in explained
    for step in ("spawned", "imported", "joined", "proved"):
        assert step in explained


@pytest.mark.extended
def test_the_culprit_is_named_with_its_thread_though_its_peer_loses_its_connection_at_once(tmp_path: Path) -> None:
    # Without a pause the peer sits in the collective and sees "connection closed" within milliseconds.
    flags = ("--pause", "0", "--after", "50", "--raise-in-thread", "queue is closed", "--os-exit", "7")
    result = jaxrun(tmp_path, "-n", "2", MISBEHAVE, "--rank", "1", *flags)
    assert (result.code, result.verdict()["culprits"]) == (7, [1])
    assert "Loader-1" in result.err and "Trouble: queue is closed" in result.err
    assert "Gloo" not in result.err.partition("jaxrun: rank 1")[2]


CRASH = """
import jax, os, signal, sys, time
if jax.process_index() == 0:
    sys.stdout.write('x' * 300_000 + ' last')
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(600)
"""


def test_a_crash_of_rank_0_keeps_its_output_and_shows_where_python_was_without_noise_of_its_victim(
    tmp_path: Path, script
) -> None:
    result = jaxrun(tmp_path, "-n", "2", str(script(CRASH)))
    assert (result.code, result.verdict()["culprits"]) == (139, [0])
    assert "rank 0 of 2 crashed with SIGSEGV (11)" in result.err and 'program0.py", line 6, in <module>' in result.err
    assert len((result.run_dir / "rank-0000.out").read_text()) == 300_005
    assert [line for line in result.err.splitlines() if line.startswith("[1]")] == []
    log = (result.run_dir / "rank-0001.err").read_text()
    assert "coordination service" in log or log == ""  # it was killed before it said so, or between two lines of that


@pytest.mark.extended
def test_a_signal_before_the_program_has_begun_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", "--grace", "600", MISBEHAVE) as job:
        job.wait_until((job.run_dir / "job.json").exists, "run directory")
        job.process.send_signal(signal.SIGINT)
        assert job.end().code == 130


# ---- what ranks leave behind


# Of a worker by hand: one child in its process group, one in a session of its own, and a daemon whose parent has gone.
LEAVES = """
import subprocess
from multiprocessing.shared_memory import SharedMemory
run()
children = [subprocess.Popen(["sleep", "600"]).pid, subprocess.Popen(["sleep", "600"], start_new_session=True).pid]
grandchild("daemon")
children.append(open("daemon").read())
print("children", *children, SharedMemory(create=True, size=10).name, flush=True)
"""


def _left(run_dir: Path) -> tuple[list[int], Path]:
    """The children that LEAVES has left, and its block of shared memory."""
    (words,) = re.findall(r"^children (.+)$", (run_dir / "rank-0000.out").read_text(), re.MULTILINE)
    *children, block = words.split()
    assert len(children) == 3
    return list(map(int, children)), Path(f"/dev/shm/{block}")


def test_kill_9_of_the_launcher_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    arguments = ("-n", "1", "by_hand.py", f"{LEAVES}\ntime.sleep(600)")
    with started(tmp_path, *arguments, env=write_fake_runtime(tmp_path)) as job:
        job.wait_for_output("children")
        children, block = _left(job.run_dir)
        job.wait_until(lambda: len(job.processes()) >= 5, "worker, its children and their tracker")
        assert block.exists() and all(map(is_alive, children))
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not job.processes() and not block.exists())


@pytest.mark.extended
def test_a_guard_that_is_killed_is_replaced(tmp_path: Path) -> None:
    arguments = ("-n", "1", "by_hand.py", f"{LEAVES}\ntime.sleep(600)")
    screen = tmp_path / "screen"
    with (
        screen.open("wb") as stderr,
        started(tmp_path, *arguments, env=write_fake_runtime(tmp_path), stderr=stderr) as job,
    ):
        job.wait_for_output("children")
        (guard,) = _guards(job.process.pid)
        os.kill(guard, signal.SIGKILL)
        job.wait_until(lambda: "has died; starting another" in screen.read_text(), "line that says so")
        job.wait_until(lambda: _guards(job.process.pid) not in ([], [guard]), "another guard")
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not job.processes())


def _guards(launcher: int) -> list[int]:
    """The children of a launcher that are forks of it."""

    def command(pid: int) -> bytes:
        with suppress(OSError):  # one that has ended meanwhile
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    return [pid for pid in children(launcher) if command(pid) == command(launcher)]


# ---- Ctrl-Z


def test_ctrl_z_stops_all_ranks_and_jaxrun_until_it_goes_on(tmp_path: Path) -> None:
    code = """run()
print('pid', os.getpid(), flush=True)
while not os.path.exists('go'):
    time.sleep(0.01)
done()"""
    with started(tmp_path, "-n", "2", "by_hand.py", code, code, env=write_fake_runtime(tmp_path)) as job:
        job.wait_for_output("pid", 2)
        pids = [int((job.run_dir / f"rank-000{rank}.out").read_text().split()[1]) for rank in (0, 1)]
        job.process.send_signal(signal.SIGTSTP)
        job.wait_until(lambda: {process_state(pid) for pid in (job.process.pid, *pids)} == {"T"}, "stop of all")
        (tmp_path / "go").touch()
        job.process.send_signal(signal.SIGCONT)
        assert job.process.wait(TIME_LIMIT) == 0
        assert len(job.events("Resumed")) == 1


# ---- jobs that stall


@pytest.mark.extended
@pytest.mark.jax_version
def test_a_stall_is_reported_with_its_cause_and_signals_reach_the_ranks_meanwhile(tmp_path: Path) -> None:
    flags = ("--steps", "7", "--rank", "1", "--loop-until", "go", "--print-signals")
    screen = tmp_path / "screen"
    notice = re.compile(r"no progress for \d+ s: .*misbehave\.py:\d+ main.* · more: jaxrun stacks run$", re.MULTILINE)
    with (
        screen.open("wb") as stderr,
        started(tmp_path, "-n", "2", "--stall-notice", "0.5", MISBEHAVE, *flags, stderr=stderr) as job,
    ):
        # Rank 1 is where it stays; the start may have stalled, too, on a busy machine.
        job.wait_until(lambda: notice.search(screen.read_text()), "notice of the stall")
        assert job.events("StallNotice")
        job.process.send_signal(signal.SIGQUIT)
        job.wait_until(lambda: "2 ranks, 2 groups" in screen.read_text(), "stacks")
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            job.process.send_signal(signum)
            job.wait_for_output(f"received {signum.value}")  # of rank 1, which is in Python
        (tmp_path / "go").touch()
        result = job.result()
    assert result.code == 0, result
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        assert result.out.count(f"received {signum.value}") == 2


LIVES = """
import time
until = time.monotonic() + 8
while time.monotonic() < until:
    print("here", flush=True)
    time.sleep(0.3)
"""


@pytest.mark.extended
def test_output_is_a_sign_of_life(tmp_path: Path, script) -> None:
    result = jaxrun(tmp_path, "-n", "1", "--stall-timeout", "7", str(script(LIVES)))
    assert result.code == 0 and "no output" not in result.err, result
