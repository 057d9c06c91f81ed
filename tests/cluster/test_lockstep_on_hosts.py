"""Ranks on three hosts that diverge, whichever engine has started them, or of which one is slow."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, TESTBED, Bed, JobRunner
from divergences import CASES, check_report
from harness import HERE, TIME_LIMIT
from launch_modes import ANY, LAUNCHED, OPEN_MPI_5, PYTHON, LaunchMode, row
from test_trace_command import write

from jaxrun.analysis.lockstep.reader import FlightReader

_OF_HOSTS = re.compile(r" \((?:h\d(?:, )?)+\)")
DIVERGE = str(HERE / "diverge.py")
KINDS = {case.kind: case for case in CASES}
MPIRUN = LaunchMode(OPEN_MPI_5, LAUNCHED)


def on_one_host(report: str) -> str:
    """The report less the hosts of the ranks, all of which it must name."""
    assert all(host in report for host in HOSTS), report
    return _OF_HOSTS.sub("", report)


def calls_in(path: Path) -> int:
    """The number of the last call of all ranks that this recorder holds."""
    with path.open("rb") as file:
        return FlightReader(file.fileno()).brief().last_number("0-2")


@pytest.mark.extended
@row("out of step: recorded and told", *ANY)
def test_a_divergence_is_reported_and_the_job_goes_on_and_ends_as_failed(runner: JobRunner) -> None:
    result = runner.jaxrun(DIVERGE, "static-argument")
    assert result.code != 0 and result.verdict()["exit_code"] == 1, result
    report = str(result.verdict()["divergence"])
    check_report(KINDS["static-argument"], len(HOSTS), on_one_host(report))
    assert report in result.err and "may be wrong" in result.err, result


@pytest.mark.extended
@row("out of step: `--lockstep strict` raises it", *ANY)
def test_strict_raises_the_divergence_on_every_host(runner: JobRunner) -> None:
    case = KINDS["threads"]
    result = runner.jaxrun("--lockstep", "strict", DIVERGE, case.kind)
    assert result.code != 0 and result.verdict()["exit_code"] == 1, result
    for rank in range(len(HOSTS)):
        error = (result.run_dir / f"rank-{rank:04d}.err").read_text().rpartition("DivergenceError: ")[2]
        check_report(case, len(HOSTS), on_one_host(error))


@pytest.mark.extended
def test_a_job_that_was_killed_from_outside_left_its_recorders(make_runner) -> None:
    """kill -9 of the launcher: no verdict, but what each rank had called can still be shown."""
    with make_runner(MPIRUN).started(DIVERGE, "rank-0-only") as job:
        job.wait_for_output("mean", 1)
        flights = [job.run_dir / f"rank-{rank:04d}.flight" for rank in range(len(HOSTS))]
        job.wait_until(lambda: all(calls_in(path) >= 4 for path in flights), "call that differs")
        os.kill(job.launcher(), signal.SIGKILL)
        job.process.wait(TIME_LIMIT)
        job.gone()
        command = [TESTBED, "exec", MPIRUN.host, "--", PYTHON, "-m", "jaxrun", "explain", str(job.run_dir)]
        environ = {**os.environ, "JAXRUN_TESTBED_DIR": str(job.bed.root)}
        shown = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIME_LIMIT).stdout
    assert "no verdict" in shown and not (job.run_dir / "verdict.json").exists(), shown
    report = shown[shown.index("the processes disagree") :].partition("\n\n")[0]
    check_report(KINDS["rank-0-only"], len(HOSTS), on_one_host(report))


# ---- a rank that the others wait for, over hosts whose clocks are apart

AHEAD_S = 3.0
# What a process asks for the time of day is shifted, as if the host's clock were.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>

int clock_gettime(clockid_t id, struct timespec *ts) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, ts);
    if (status == 0 && id == CLOCK_REALTIME) ts->tv_sec += AHEAD;
    return status;
}

time_t time(time_t *out) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    if (out) *out = ts.tv_sec;
    return ts.tv_sec;
}

int gettimeofday(struct timeval *tv, void *zone) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    tv->tv_sec = ts.tv_sec;
    tv->tv_usec = ts.tv_nsec / 1000;
    return 0;
}
"""


@pytest.fixture(scope="module")
def clock_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes the clock of the processes that preload it run AHEAD_S ahead."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    options = ["-shared", "-fPIC", "-O1", f"-DAHEAD={AHEAD_S:.0f}", "-o", "clock.so", "clock.c", "-ldl"]
    subprocess.run(["cc", *options], cwd=folder, check=True, timeout=50)
    return folder / "clock.so"


@pytest.mark.extended
@pytest.mark.skipif(sys.version_info < (3, 13), reason="when calls are entered is not known")
def test_the_slow_rank_is_named_although_another_hosts_clock_is_ahead(
    bed: Bed, tmp_path: Path, clock_ahead: Path
) -> None:
    with ExitStack() as stack:
        jobs = []
        for rank, host in enumerate(HOSTS):
            folder = tmp_path / host
            folder.mkdir()
            write(folder, slow=2)
            place = ["--hosts", "3", "--host-rank", str(rank), "--head", "h1:7777", "--run-dir", str(folder / "run")]
            env = {"JAXRUN_TOKEN": "5" * 64, "NO_COLOR": "1"} | ({"LD_PRELOAD": str(clock_ahead)} if rank == 1 else {})
            command = [sys.executable, "-m", "jaxrun", *place, "train.py"]
            jobs.append(stack.enter_context(bed.typed(host, *command, directory=folder, env=env)))
        results = [job.result() for job in jobs]
        jobs[0].gone()
    assert [result.code for result in results] == [0, 0, 0], results
    offsets = {event["rank"]: event for event in results[0].events("RecordClock") if event["error_s"]}
    assert offsets.keys() == {0, 1, 2}
    for rank, event in offsets.items():
        really = -AHEAD_S if rank == 1 else 0.0
        assert abs(event["offset_s"] - really) <= event["error_s"] < 1.0, offsets
    text = " ".join(results[0].err.split())
    assert "rank 2 (h3) came last to" in text and "it was in data.py:6 load." in text, results[0].err
