"""A rank that the others wait for, over three hosts whose clocks are apart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, Bed
from test_stragglers import write

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
    offsets = {event["rank"]: event for event in results[0].events("clock") if "error" in event}
    assert offsets.keys() == {0, 1, 2}
    for rank, event in offsets.items():
        really = -AHEAD_S if rank == 1 else 0.0
        assert abs(event["offset"] - really) <= event["error"] < 1.0, offsets  # type: ignore[operator, arg-type]
    text = " ".join(results[0].err.split())
    assert "rank 2 (h3) came last to" in text and "it was in data.py:6 load." in text, results[0].err
