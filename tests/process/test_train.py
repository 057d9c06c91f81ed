"""The training program ends with the same parameters, bit for bit, whatever stops it in between."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
from harness import Result, jaxrun, started

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
TRAIN = ("-n", "2", "-m", "jaxrun_runtime.programs.train")
LENGTH = ("--steps", "120", "--save-every", "30")


def _parameters(result: Result) -> str:
    assert result.code == 0, result
    found = re.search(r"parameters (\w{16}) after 120 steps", result.out)
    assert found is not None, result
    return found[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _parameters(jaxrun(tmp_path_factory.mktemp("undisturbed"), *TRAIN, "state", *LENGTH))


def test_after_sigterm_a_killed_rank_and_a_restart_the_parameters_are_the_same(
    tmp_path: Path, undisturbed: str
) -> None:
    state, slowly = str(tmp_path / "state"), ("--step-time", "0.02")
    with started(tmp_path, *TRAIN, state, *LENGTH, *slowly) as job:
        job.wait_for_event("stop_polled", 2)
        time.sleep(random.uniform(0, 1))
        job.process.send_signal(signal.SIGTERM)
        stopped = job.result()
    assert stopped.code == 75, stopped
    found = re.search(r"stopped after step (\d+), and saved it", stopped.out)
    assert found is not None and f"may be resumed from step {found[1]}." in str(stopped.verdict()["headline"])
    assert stopped.events("saved")[-1]["step"] == int(found[1])

    faults = ("--max-restarts", "2", "--chaos", f"kill:{random.randrange(2)}@{random.uniform(0.2, 1.5):.1f}s")
    resumed = _run(tmp_path / "again", *faults, *TRAIN, state, *LENGTH, *slowly)
    assert f"goes on after step {found[1]}, bit for bit" in resumed.out
    assert "killed by SIGKILL (9), as --chaos asked" in resumed.err
    assert _parameters(resumed) == undisturbed


@pytest.mark.extended
def test_on_other_devices_it_says_what_is_not_exact_and_with_another_batch_size_it_refuses(tmp_path: Path) -> None:
    program = (*TRAIN[2:], str(tmp_path / "state"), "--steps")
    assert _run(tmp_path / "first", "-n", "1", *program, "1").code == 0
    other = _run(tmp_path / "other", "-n", "2", *program, "2")
    rounding = "saved on 1 device, so equal to an undisturbed run only up to rounding"
    assert f"goes on after step 1, {rounding}" in other.out
    refused = _run(tmp_path / "refused", "-n", "1", *program, "2", "--batch-size", "64")
    assert refused.code == 1 and "is of --batch-size 128; give that, or another DIR" in refused.err


def _run(folder: Path, *arguments: str) -> Result:
    folder.mkdir()
    return jaxrun(folder, *arguments)
