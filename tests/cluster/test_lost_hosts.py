"""A host that is cut off, or loses its power, while it works: it is named, and the job ends everywhere, in seconds.

No connection is closed then: all stay open in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from cluster_fixture import ENGINE, JobRunner
from harness import MISBEHAVE
from launch_modes import ANY, BASIC, LAUNCHED, SOME, row

pytestmark = pytest.mark.usefixtures("mended")


@row("`host cut`", *SOME, always=BASIC)
def test_a_host_that_is_cut_off_is_named_and_ends_its_worker_by_itself(
    runner: JobRunner, measured: Callable[[str, float], None]
) -> None:
    lose(runner, "cut", measured)


# To its engine, such a host is one that is cut off. (Attached to Open MPI 5, mpirun kills rank 0, and the head with it,
# once it has lost its daemon there.)
@row("`host off`", *ANY)
def test_a_host_that_loses_its_power_is_named(runner: JobRunner, measured: Callable[[str, float], None]) -> None:
    lose(runner, "off", measured)


def lose(runner: JobRunner, how: str, measured: Callable[[str, float], None]) -> None:
    """Take h2 away in this way; check the report and what is left of the job."""
    ours = runner.mode.direction == LAUNCHED
    with runner.started(MISBEHAVE, "--steps", "100000") as job:
        job.wait_for_output("ready")
        began = time.monotonic()
        runner.bed.run(how, "h2")
        job.wait_until((job.run_dir / "verdict.json").exists, "verdict")
        decided = time.monotonic() - began
        # An mpirun that we have not started may wait for its own daemon on that host for as long as it likes.
        if ours:
            job.result(timeout=30)
        ended = time.monotonic() - began
        left = job.gone(but_for=() if ours else ENGINE)
        result = job.result(timeout=0)
    measured("seconds until the verdict", decided)
    measured("seconds until nothing was left on any host", ended + left)
    verdict = result.verdict()
    assert (verdict["exit_code"], verdict["culprits"]) == (69, [1]), result
    assert "rank 1 of 3 on h2 was lost" in str(verdict["headline"])
    assert "rank 1 of 3 on h2 was lost" in result.err or not ours  # an mpirun that dies shows no more of what we say
    assert result.code == 69 or not ours
    assert decided < 25 and ended < 30
