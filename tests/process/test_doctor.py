"""`jaxrun doctor` on this machine alone: what it prints, its exit status, and that it leaves nothing."""

import json
import os
import subprocess
import sys

import pytest
from harness import TIME_LIMIT


def doctor(folder, *words, env=None):
    return subprocess.run(
        [sys.executable, "-m", "jaxrun", "doctor", *words],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})},
        capture_output=True,
        text=True,
        timeout=2 * TIME_LIMIT,
    )


def test_two_processes_of_this_machine_are_examined_and_nothing_is_left(tmp_path):
    done = doctor(tmp_path, "-n", "2", "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    content = json.loads(done.stdout)
    checks = {found["check"]: found["text"] for found in content["findings"]}
    assert checks["start"].startswith("2 processes joined") and checks["devices"].startswith("2 processes")
    assert list(content["hosts"]) == [os.uname().nodename]
    timings = {(one["collective"], one["size"] >= 2**20) for one in content["collectives"]}
    assert {("psum", False), ("all_gather", True), ("ppermute", True)} <= timings
    assert all(one["bytes_per_s"] > 0 for one in content["collectives"])
    assert not list(tmp_path.iterdir())


def test_a_job_that_cannot_start_is_a_failure_with_the_reason(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no jax today')\n")
    done = doctor(tmp_path, env={"PYTHONPATH": os.pathsep.join((str(tmp_path), *filter(None, sys.path)))})
    assert done.returncode == 69, done.stdout
    assert "FAIL  start" in done.stdout and "no jax today" in done.stdout
    assert done.stdout.splitlines()[-1] == "jaxrun doctor: 1 failure"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train.py",), "unexpected extra argument (train.py)"),
        (("--submit",), "no option --submit of jaxrun doctor"),
        (("-H", "h1"), "-H/--host is for --backend mpirun"),
        (("--backend", "slurm"), "SLURM_JOB_ID is not set"),
    ],
)
def test_wrong_usage_starts_nothing(tmp_path, words, text):
    done = doctor(tmp_path, *words, env={"SLURM_JOB_ID": ""})
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
    assert not done.stdout and not list(tmp_path.iterdir())
