"""Ranks inside another command (--wrap), which becomes the rank, starts it or keeps it apart; their cores (--bind)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import (
    MISBEHAVE,
    TIME_LIMIT,
    Job,
    extended,
    is_alive,
    jaxrun,
    process_state,
    started,
    wait_until,
    write_fake_runtime,
)

RUNS = "run(); print('ready', flush=True); "
WAITS = RUNS + "time.sleep(1000)"
FORKS = """sh -c '"$@"; exit $?' sh"""  # says 128 + n of a signal n, as bwrap does
SANDBOX = "bwrap --dev-bind / / --unshare-pid --proc /proc --new-session"  # numbers and sessions of its own
needs_bwrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed (scripts/testbed)")
# The shell stands for all that start the rank.
WRAPS = [pytest.param(FORKS, id="forks"), pytest.param(SANDBOX, id="sandbox", marks=needs_bwrap)]


def words(wrap: str, codes: Sequence[str], *options: str) -> tuple[str, ...]:
    return ("-n", str(len(codes)), "--wrap", wrap, "--grace", "2", *options, "by_hand.py", *codes)


def pids(job: Job) -> list[int]:
    """Of the ranks, as they are in the log."""
    job.wait_for_event("Hello", 2)
    return [event["pid"] for event in sorted(job.events("Hello"), key=lambda event: event["rank"])]


KILLED = ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL (9)")
RAISES = ("fail('bad record', 137)", 137, "raised ValueError")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("wrap", "code", "status", "text"),
    [
        (FORKS, *KILLED),
        (FORKS, *RAISES),
        (FORKS, "os.kill(os.getpid(), signal.SIGSEGV)", 139, "crashed with SIGSEGV (11)"),
        (FORKS, "os._exit(7)", 7, "exited with status 7"),
        pytest.param(SANDBOX, *KILLED, marks=needs_bwrap),
        pytest.param(SANDBOX, *RAISES, marks=needs_bwrap),
    ],
)
def test_how_a_rank_ends_is_known_through_the_command(
    tmp_path: Path, wrap: str, code: str, status: int, text: str
) -> None:
    result = jaxrun(tmp_path, *words(wrap, [WAITS, f"run(); {code}; os._exit(1)"]), env=write_fake_runtime(tmp_path))
    assert result.code == status and f"rank 1 of 2 {text}" in result.err, result


@pytest.mark.extended
@pytest.mark.parametrize("wrap", WRAPS)
def test_stacks_and_signals_reach_the_rank_itself(tmp_path: Path, wrap: str) -> None:
    code = "signal.signal(signal.SIGUSR1, lambda *_: print('USR1', flush=True)); " + WAITS
    with started(tmp_path, *words(wrap, [code] * 2, "--grace", "60"), env=write_fake_runtime(tmp_path)) as job:
        job.wait_for_output("ready", 2)
        job.process.send_signal(signal.SIGUSR1)
        job.wait_for_output("USR1", 2)
        command = [sys.executable, "-m", "jaxrun", "stacks", str(job.run_dir)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
        assert "2 ranks  0-1" in shown.stdout and "worker_by_hand.py" in shown.stdout, shown
        job.process.send_signal(signal.SIGINT)
        result = job.end()
    assert result.code == 130, result
    assert "all ranks ended by themselves" in result.err, result


@pytest.mark.extended
@pytest.mark.parametrize("wrap", WRAPS)
def test_chaos_stops_the_rank_itself_and_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path, wrap: str) -> None:
    with started(tmp_path, *words(wrap, [WAITS] * 2, "--chaos", "pause:1@0s"), env=write_fake_runtime(tmp_path)) as job:
        rank_0, rank_1 = pids(job)
        job.wait_until(lambda: process_state(rank_1) == "T", "the pause")
        assert process_state(rank_0) != "T"
        left = [*job.processes(), rank_0, rank_1]
        job.process.kill()
        wait_until(lambda: not any(map(is_alive, left)), left)


@pytest.mark.extended
@pytest.mark.parametrize("wrap", WRAPS)
def test_the_end_of_the_command_is_that_of_the_rank(tmp_path: Path, wrap: str) -> None:
    with started(tmp_path, *words(wrap, [WAITS] * 2), env=write_fake_runtime(tmp_path)) as job:
        job.wait_for_output("ready", 2)
        spawned = {event["rank"]: event["pid"] for event in job.events("WorkerSpawned")}
        os.kill(spawned[1], signal.SIGKILL)
        result = job.end()  # the rank may have outlived it, but not the job
    assert result.code == 137 and "rank 1 of 2 was killed by SIGKILL" in result.err, result


def test_the_words_have_rank_local_rank_and_host(tmp_path: Path) -> None:
    says = """sh -c 'echo "$1 $2" >&2; shift 2; exec "$@"' sh"""
    wrap = ("--wrap", f"{says} %r-%l-%h 100%%r", "--wrap", "env INNER=%r")
    code = "run(); print('inner', os.environ['INNER'], flush=True); done()"
    options = (*wrap, "-n", "2", "--simulate-hosts", "2")
    result = jaxrun(tmp_path, *options, "by_hand.py", code, code, env=write_fake_runtime(tmp_path))
    assert result.code == 0, result
    for rank in range(2):
        assert f"{rank}-0-h{rank + 1} 100%r\n" in (tmp_path / f"run/rank-000{rank}.err").read_text()
        assert (tmp_path / f"run/rank-000{rank}.out").read_text() == f"inner {rank}\n"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("wrap", "code", "text"),
    [
        ("no-%r", 69, "rank 0 could not be started: No such file or directory (no-0)"),
        (f"{sys.executable} closer.py", 1, "the command of --wrap closes descriptors that it inherits"),
        ("env -i", 1, "the command of --wrap passes on no variables"),
        ("true", 1, "exited with status 0 before the end of its program"),
    ],
)
def test_a_wrap_command_that_cannot_contain_a_rank_is_explained(
    tmp_path: Path, wrap: str, code: int, text: str
) -> None:
    (tmp_path / "closer.py").write_text("import os, sys; os.closerange(3, 100); os.execv(sys.argv[1], sys.argv[1:])")
    result = jaxrun(tmp_path, "-n", "2", "--wrap", wrap, MISBEHAVE, "--steps", "3")
    assert result.code == code and text in result.err, result


@pytest.mark.parametrize(
    ("wrap", "tool"),
    [
        extended(SANDBOX, "bwrap", id="bubblewrap"),
        extended("perf record -q -o perf.%r", "perf", id="perf"),
        extended("numactl --localalloc", "numactl", id="numactl"),
        extended("unshare --pid --fork", "unshare", id="unshare"),
    ],
)
def test_real_tools_with_jax(tmp_path: Path, wrap: str, tool: str) -> None:
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    result = jaxrun(
        tmp_path, "-n", "2", "--wrap", wrap, "--init-timeout", "200s", MISBEHAVE, "--after", "3", "--raise", "bad"
    )
    assert result.code == 1 and "rank 1 of 2 raised Trouble" in result.err, result


# ---- the cores that ranks really stay on

PROGRAM = "import os\nprint(*sorted(os.sched_getaffinity(0)))\n"
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.extended
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--bind", "cores"), [CORES[: len(CORES) // 2], CORES[len(CORES) // 2 :]]),
        (("--bind", "cores", "--wrap", f"taskset -c {CORES[0]}"), [[CORES[0]], [CORES[0]]]),  # it counts for more
        ((), [CORES, CORES]),
    ],
)
def test_ranks_stay_on_their_cores_and_explain_shows_them(
    tmp_path: Path, options: tuple[str, ...], expected: list[list[int]]
) -> None:
    (tmp_path / "cores.py").write_text(PROGRAM)
    result = jaxrun(tmp_path, "-n", "2", *options, "cores.py")
    shown = [(tmp_path / f"run/rank-000{rank}.out").read_text().split() for rank in range(2)]
    assert result.code == 0 and shown == [list(map(str, cores)) for cores in expected], result
    command = [sys.executable, "-m", "jaxrun", "explain", str(result.run_dir)]
    explained = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT).stdout
    assert ("cores that ranks stay on" in explained) == (expected[0] != list(range(os.cpu_count() or 0))), explained
