"""should_stop where the ranks are on other hosts."""

from __future__ import annotations

import re

import pytest
from harness import HERE
from launch_modes import ATTACHED, LAUNCHED, OPEN_MPI_5, SLURM, LaunchMode

pytestmark = pytest.mark.extended
STOPPING = str(HERE / "stopping.py")


@pytest.mark.parametrize("mode", [LaunchMode(SLURM, LAUNCHED), LaunchMode(OPEN_MPI_5, ATTACHED)], ids=str)
def test_all_ranks_stop_at_the_same_step_before_the_time_limit(make_runner, mode: LaunchMode) -> None:
    result = make_runner(mode).jaxrun("--timeout", "50", "--save-time", "47", STOPPING, "3")
    verdict = result.verdict()
    assert (verdict["outcome"], verdict["exit_code"]) == ("preempted", 75), result
    where = re.findall(r"stops in .*", result.out)
    assert len(where) == 3 and len(set(where)) == 1, result
    step = where[0].split()[-1]
    assert f"(time limit in 47 s); the job may be resumed from step {step}." in str(verdict["headline"])
