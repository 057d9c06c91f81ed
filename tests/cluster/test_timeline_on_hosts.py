"""A profile and one timeline of ranks on three hosts, whose clocks are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_fixture import HOSTS
from harness import HERE
from launch_modes import LAUNCHED, OPEN_MPI_5, PYTHON, LaunchMode

PROGRAM = str(HERE / "profiled.py")
MPIRUN = LaunchMode(OPEN_MPI_5, LAUNCHED)


@pytest.mark.extended
def test_ranks_of_three_hosts_have_one_profile_and_one_timeline(make_runner, tmp_path: Path) -> None:
    with make_runner(MPIRUN).started(PROGRAM) as job:
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
    ends = {event["pid"]: event["ts"] + event["dur"] for event in events if event["name"] == "JAX profile"}
    assert max(ends.values()) - min(ends.values()) < 5e6
    assert "The clocks of the hosts are compared to within " in page.read_text()
