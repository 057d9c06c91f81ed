"""An agent on another host that is stopped, as on one that swaps: it is named, and the job ends, with its processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from cluster_fixture import Job, JobRunner
from harness import MISBEHAVE
from launch_modes import BASIC, LaunchMode

from jaxrun.head.interruption import REPEATED_SIGNAL_S

MakeRunner = Callable[[LaunchMode], JobRunner]


@pytest.mark.parametrize("mode", BASIC, ids=str)
def test_a_second_ctrl_c_ends_a_job_with_a_stopped_agent(make_runner: MakeRunner, mode: LaunchMode) -> None:
    with make_runner(mode).started(MISBEHAVE, "--steps", "100000") as job:
        stop_agent_of_rank_1(job)
        os.kill(job.launcher(), signal.SIGINT)
        job.wait_until(lambda: "another Ctrl-C" in job.result(timeout=0).err, "answer to Ctrl-C")
        time.sleep(1.5 * REPEATED_SIGNAL_S)
        os.kill(job.launcher(), signal.SIGINT)
        result = job.result(timeout=20)
        job.gone(within=20)
    assert result.code == 130 and "rank 1 (h2) did not answer: no end was reported within 2 s" in result.err, result


@pytest.mark.extended
@pytest.mark.parametrize("mode", BASIC, ids=str)
def test_a_time_limit_holds_against_a_stopped_agent(make_runner: MakeRunner, mode: LaunchMode) -> None:
    with make_runner(mode).started("--timeout", "6", MISBEHAVE, "--steps", "100000") as job:
        stop_agent_of_rank_1(job)
        result = job.result()
        job.gone(within=20)
    assert result.code == 124 and "rank 1 (h2) did not answer: no end was reported within 10 s" in result.err, result


def stop_agent_of_rank_1(job: Job) -> None:
    job.wait_for_output("ready")
    os.kill(job.agent(1), signal.SIGSTOP)
