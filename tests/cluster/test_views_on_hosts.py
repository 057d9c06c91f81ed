"""What is seen of a job over three hosts: `jaxrun top`, a profile, and one timeline, whose clocks are compared."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, TIME_LIMIT, JobRunner
from launch_modes import LAUNCHED, OPEN_MPI_5, PYTHON, LaunchMode

MPIRUN = LaunchMode(OPEN_MPI_5, LAUNCHED)
LATE = """
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
PROFILED = """
import os, time, jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
spread = lambda part: jax.make_array_from_process_local_data(split, np.float32(part))

@jax.jit
def step(x, stop):
    return x + x.mean(), stop.max()

rows, stop = spread(np.ones((2, 8))), False
print("ready", flush=True)
while not stop:
    time.sleep(0.005)
    rows, wanted = step(rows, spread([os.path.exists("stop")]))
    stop = float(wanted) > 0  # the ranks agree on it
"""
MakeRunner = Callable[[LaunchMode], JobRunner]


def test_each_rank_has_a_row_with_its_host_and_the_late_one_comes_first(
    make_runner: MakeRunner, tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(LATE)
    with make_runner(MPIRUN).started(str(tmp_path / "late.py")) as job:
        job.wait_for_output("ten steps")
        text, deadline = "", time.monotonic() + TIME_LIMIT
        while not re.search(r"^! 1 ", text, re.MULTILINE):
            assert time.monotonic() < deadline, text
            text = job.bed.inside(MPIRUN.host, PYTHON, "-m", "jaxrun", "top", str(job.run_dir))
        rows = [line.split() for line in text.splitlines() if re.match(r"[! ] \d", line)]
        assert [row[:4] for row in rows[:1]] == [["!", "1", "h2", "sleeps"]]
        assert [row[:3] for row in rows[1:]] == [["0", "h1", "waits"], ["2", "h3", "waits"]], text
        assert "3 ranks on 3 hosts" in text and all(row[-2:] == ["ten", "steps"] for row in rows), text
        assert len(re.findall(r" \d+%  +\d+M  ", text)) == 3, text


@pytest.mark.extended
def test_ranks_of_three_hosts_have_one_profile_and_one_timeline(make_runner: MakeRunner, tmp_path: Path) -> None:
    (tmp_path / "profiled.py").write_text(PROFILED)
    with make_runner(MPIRUN).started(str(tmp_path / "profiled.py")) as job:
        job.wait_for_output("ready")
        command = ("-m", "jaxrun", "profile", "--steps", "3", str(job.run_dir))
        text = job.bed.inside(MPIRUN.host, PYTHON, *command)
        assert "of ranks 0-2 ..." in text and "3 profiles, " in text
        (job.directory / "stop").touch()
        result = job.result()
        assert result.code == 0, result
    (session,) = (result.run_dir / "profile/plugins/profile").iterdir()
    names = [f"rank-{rank:04d}-{host}.xplane.pb" for rank, host in enumerate(HOSTS)]
    assert sorted(file.name for file in session.iterdir()) == names

    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    files = ("--trace", str(trace), "--html", str(page))
    subprocess.run([sys.executable, "-m", "jaxrun", "explain", *files, str(result.run_dir)], check=True)
    events = json.loads(trace.read_text())["traceEvents"]
    for rank, host in enumerate(HOSTS):
        of_rank = [event for event in events if event["pid"] == rank + 1]
        assert of_rank[0]["args"] == {"name": f"rank {rank} ({host})"}
        slices = {event["name"] for event in of_rank if event["ph"] == "X"}
        assert {"find the devices", "program", "jit(step)", "compile jit(step)", "JAX profile"} <= slices
    # All end after the same call: on one clock, within less than the time that the job has taken.
    ends = {event["pid"]: event["ts"] + event["dur"] for event in events if event["name"] == "JAX profile"}
    assert max(ends.values()) - min(ends.values()) < 60e6
    assert "The clocks of the hosts are compared to within " in page.read_text()
