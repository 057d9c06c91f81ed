"""Every row of the failure table that one machine can show, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import DAEMONS, MISBEHAVE, TIME_LIMIT, daemons, extended, jaxrun, seconds_of_daemons, started


def test_an_exception_is_the_headline_its_rank_is_named_and_explain_prints_it_again(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "3", MISBEHAVE, "--rank", "2", "--raise", "bad record in shard 2")
    assert result.code == 1
    assert "in misbehave\n    _raise(flags.message)" in result.err
    assert "Trouble: bad record in shard 2" in result.err
    assert "rank 2" in result.err
    assert "runpy" not in result.err and "jaxrun_runtime" not in result.err
    assert result.err.count("Traceback (most recent call last)") == 1
    assert "Trouble: bad record" in (result.run_dir / "rank-0002.err").read_text()
    command = [sys.executable, "-m", "jaxrun", "explain", str(result.run_dir)]
    explained = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Trouble: bad record in shard 2" in explained
    for step in ("spawned", "imported", "joined", "proved"):
        assert step in explained


@pytest.mark.parametrize("attempt", [0, *(extended(number) for number in (1, 2, 3))])
def test_the_culprit_is_named_though_its_peers_lose_their_connections_at_once(tmp_path: Path, attempt: int) -> None:
    # Without a pause the peers sit in the collective and see "connection closed" within milliseconds.
    flags = ("--rank", "1", "--pause", "0", "--os-exit", "7", "--after", str(50 + attempt))
    result = jaxrun(tmp_path, "-n", "3", MISBEHAVE, *flags)
    assert result.code == 7
    assert "rank 1" in result.err
    assert "Gloo" not in result.err.partition("jaxrun: rank 1")[2]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--exit", "7"), 7, "7"),
        (("--signal", "SIGSEGV"), 139, "SIGSEGV (11)"),
        extended(("--exit-text", "no data"), 1, "no data"),
        extended(("--os-exit", "9"), 9, "9"),
        extended(("--signal", "SIGKILL"), 137, "SIGKILL (9)"),
        extended(("--signal", "SIGABRT"), 134, "SIGABRT (6)"),
    ],
)
def test_the_exit_code_is_the_culprits_own(tmp_path: Path, flags: tuple[str, ...], code: int, words: str) -> None:
    result = jaxrun(tmp_path, "-n", "3", MISBEHAVE, "--rank", "1", *flags)
    assert result.code == code
    assert "rank 1" in result.err
    assert words in result.err
    assert result.verdict()["exit_code"] == code
    if code == 139:  # a crash in native code shows where Python was
        assert "misbehave.py" in result.err and "in misbehave" in result.err


def test_rank_0_can_be_the_culprit(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "3", MISBEHAVE, "--rank", "0", "--signal", "SIGKILL")
    assert result.code == 137
    assert "rank 0" in result.err and "SIGKILL" in result.err


def test_noise_of_jax_in_victims_of_a_death_is_only_in_their_logs(tmp_path: Path) -> None:
    program = tmp_path / "sleepers.py"
    program.write_text("import jax, os, time\nos._exit(9) if jax.process_index() == 0 else time.sleep(600)\n")
    result = jaxrun(tmp_path, "-n", "2", str(program))
    assert result.code == 9 and "rank 0 of 2 exited with status 9" in result.err
    assert [line for line in result.err.splitlines() if line.startswith("[1]")] == []
    log = (result.run_dir / "rank-0001.err").read_text()
    assert "Terminating process because the JAX distributed service" in log or log == ""  # it was killed before


@pytest.mark.extended
def test_the_same_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "3", MISBEHAVE, "--rank", "-1", "--raise", "no such file")
    assert result.code == 1
    assert "3 of 3 ranks raised the same error" in result.err
    assert result.err.count("Trouble: no such file") <= 2


def test_the_traceback_of_a_thread_explains_a_death_without_a_failure_report(tmp_path: Path) -> None:
    flags = ("--raise-in-thread", "queue is closed", "--os-exit", "3")
    result = jaxrun(tmp_path, "-n", "2", MISBEHAVE, "--rank", "1", *flags)
    assert result.code == 3
    assert "Loader-1" in result.err and "Trouble: queue is closed" in result.err


@pytest.mark.extended
def test_one_process_fails_like_many(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "1", MISBEHAVE, "--rank", "0", "--raise", "alone")
    assert result.code == 1
    assert "Trouble: alone" in result.err


@pytest.mark.extended
def test_the_exit_handlers_of_the_culprit_run(tmp_path: Path) -> None:
    flags = ("--slow-exit-handler", "0.3", "--raise", "after which it cleans up")
    result = jaxrun(tmp_path, "-n", "2", MISBEHAVE, "--rank", "1", *flags)
    assert result.code == 1
    assert "exit handler ends" in (result.run_dir / "rank-0001.out").read_text()


def test_exit_handlers_have_the_grace_and_no_more(tmp_path: Path) -> None:
    flags = ("--slow-exit-handler", "60", "--raise", "after which it hangs")
    result = jaxrun(tmp_path, "-n", "2", "--grace", "0.5", MISBEHAVE, "--rank", "1", *flags)
    assert result.code == 1
    assert "Trouble: after which it hangs" in result.err


def test_a_time_limit_shows_where_every_rank_is(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--timeout", "6", MISBEHAVE, "--rank", "1", "--hang")
    assert result.code == 124
    assert "2 ranks" in result.err and "1 rank" in result.err
    assert "in misbehave" in result.err or "misbehave.py:" in result.err


def test_an_early_exit_is_named_with_where_the_others_wait(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "3", MISBEHAVE, "--rank", "1", "--finish")
    assert result.code == 124
    assert "rank 1" in result.err and "finished" in result.err
    assert "misbehave.py:" in result.err


def test_a_rank_may_finish_long_before_the_others(tmp_path: Path) -> None:
    program = tmp_path / "uneven.py"
    program.write_text("import jax, time\ntime.sleep(0 if jax.process_index() else 1.5)\nprint('end')\n")
    result = jaxrun(tmp_path, "-n", "2", str(program))
    assert (result.code, result.out.count("end")) == (0, 2)


def test_processes_that_a_worker_leaves_behind_are_ended(tmp_path: Path) -> None:
    flags = ("--rank", "-1", "--leave-children", "--finish")
    result = jaxrun(tmp_path, "-n", "2", MISBEHAVE, *flags)
    assert result.code == 0
    children = [int(pid) for line in result.out.splitlines() if "children" in line for pid in line.split()[2:]]
    assert len(children) == 6
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    flags = ("--rank", "1", "--leave-children", "--shared-memory", "--hang")
    with started(tmp_path, "-n", "2", MISBEHAVE, *flags) as job:
        job.wait_for_output("children")
        assert len(job.processes()) >= 7
        job.process.kill()
        job.process.wait()
        deadline = time.monotonic() + TIME_LIMIT
        while job.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert job.processes() == []
        assert _blocks_left(job.run_dir) == []


@pytest.mark.parametrize("options", [(), extended(("--no-fork",))], ids=["forked", "not forked"])
def test_kill_9_of_the_launcher_leaves_no_daemon(tmp_path: Path, options: tuple[str, ...]) -> None:
    with seconds_of_daemons() as seconds, started(tmp_path, "-n", "2", *options, DAEMONS, seconds) as job:
        job.wait_for_output("ready", 2)
        while len(daemons(seconds)) < 5:
            assert job.process.poll() is None
            time.sleep(0.02)
        job.process.kill()
        deadline = time.monotonic() + TIME_LIMIT
        while daemons(seconds):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _blocks_left(run_dir: Path) -> list[str]:
    """The blocks of shared memory that the ranks have made and that are still there."""
    lines = [line for path in run_dir.glob("rank-*.out") for line in path.read_text().splitlines()]
    blocks = [line.split()[1] for line in lines if line.startswith("block ")]
    assert blocks
    return [name for name in blocks if Path(f"/dev/shm/{name}").exists()]


def test_sigusr_reaches_the_workers_and_sigquit_shows_their_stacks_and_the_job_goes_on(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", MISBEHAVE, "--rank", "-1", "--print-signals", "--steps", "400") as job:
        job.wait_for_output("ready", 2)
        job.process.send_signal(signal.SIGQUIT)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            job.process.send_signal(signum)
            job.wait_for_output(f"received {signum.value}", 2)
        result = job.result()
    assert result.code == 0
    assert "misbehave.py:" in result.err


def test_a_signal_before_the_program_has_begun_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", "--grace", "600", MISBEHAVE) as job:
        job.wait_until((job.run_dir / "job.json").exists, "run directory")
        job.process.send_signal(signal.SIGINT)
        result = job.result()
        assert job.processes() == []
    assert result.code == 130


def test_output_written_right_before_the_end_is_kept(tmp_path: Path) -> None:
    program = tmp_path / "talk.py"
    program.write_text("import sys, os\nsys.stdout.write('x' * 300_000 + ' last'); sys.stdout.flush(); os._exit(4)\n")
    result = jaxrun(tmp_path, "-n", "2", str(program))
    assert result.code == 4
    for rank in range(2):
        log = (result.run_dir / f"rank-{rank:04d}.out").read_text()
        assert len(log) in (0, 300_005)  # a victim may be stopped before it has written anything
    assert any(len((result.run_dir / f"rank-{r:04d}.out").read_text()) for r in range(2))


@pytest.mark.extended
def test_all_ranks_may_end_by_os_exit_0(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "3", MISBEHAVE, "--rank", "-1", "--os-exit", "0")
    assert result.code == 0, result.err
