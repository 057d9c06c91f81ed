"""`jaxrun top` of a job over three hosts: one rank on each, of which one is late."""

from __future__ import annotations

import re
import sys
import time

from cluster_fixture import TIME_LIMIT, JobRunner
from launch_modes import LAUNCHED, OPEN_MPI_5, LaunchMode

PROGRAM = """
import time, jax
from jax.experimental import multihost_utils
print("ready", flush=True)
for step in range(10):
    multihost_utils.sync_global_devices(f"step {step}")
print("ten steps", flush=True)
if jax.process_index() == 1:
    time.sleep(1000)
multihost_utils.sync_global_devices("never")
"""


def test_each_rank_has_a_row_with_its_host_and_the_late_one_comes_first(make_runner, tmp_path) -> None:
    (tmp_path / "late.py").write_text(PROGRAM)
    runner: JobRunner = make_runner(LaunchMode(OPEN_MPI_5, LAUNCHED))
    with runner.started(str(tmp_path / "late.py")) as job:
        job.wait_for_output("ten steps")
        text, deadline = "", time.monotonic() + TIME_LIMIT
        while not re.search(r"^! 1 ", text, re.MULTILINE):
            assert time.monotonic() < deadline, text
            text = runner.bed.inside(runner.mode.host, sys.executable, "-m", "jaxrun", "top", str(job.run_dir))
        rows = [line.split() for line in text.splitlines() if re.match(r"[! ] \d", line)]
        assert [row[:4] for row in rows[:1]] == [["!", "1", "h2", "sleeps"]]
        assert [row[:3] for row in rows[1:]] == [["0", "h1", "waits"], ["2", "h3", "waits"]], text
        assert "3 ranks on 3 hosts" in text and all(row[-2:] == ["ten", "steps"] for row in rows), text
        assert len(re.findall(r" \d+%  +\d+M  ", text)) == 3, text
