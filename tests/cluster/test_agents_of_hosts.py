"""One agent a host, which holds all ranks of that host, started by a backend that jaxrun does not ship."""

from __future__ import annotations

import json
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from cluster_fixture import READY, RUNS, Bed, Job
from harness import write_fake_runtime
from launch_modes import PYTHON

HERE = Path(__file__).parent
# jaxrun with one more row in its table of engines.
JAXRUN = f"""
import sys
sys.path.append({str(HERE)!r})
from jaxrun.spec import engines
options = (*engines.HOST_OPTIONS, engines.HOST_LIST)
engines.ENGINES["each-host"] = engines.EngineRow("each_host_backend:EACH_HOST", options=options)
from jaxrun.__main__ import entry
entry()
"""


def job(bed: Bed, directory: Path, *codes: str) -> AbstractContextManager[Job]:
    """A job of two ranks on each of h1 and h2, by hand; each runs its code."""
    words = ("--backend", "each-host", "-H", "h1:2,h2:2", "--run-dir", str(directory / "run"), "by_hand.py", *codes)
    return bed.typed("h1", PYTHON, "-c", JAXRUN, *words, directory=directory, env=write_fake_runtime(directory))


@pytest.mark.extended
def test_an_agent_holds_all_ranks_of_its_host(bed: Bed, tmp_path: Path) -> None:
    with job(bed, tmp_path, *[RUNS + "print('hello'); done()"] * 4) as started:
        result = started.result()
        started.gone()
    assert result.code == 0 and sorted(result.out.split("\n")[:4]) == [f"[{rank}] hello" for rank in range(4)], result
    (attempt,) = result.events("AttemptStarted")
    assert attempt["agents"] == {"0": [0, 1], "2": [2, 3]}
    assert {(event["agent"], event["host"]) for event in result.events("AgentReport")} == {(0, "h1"), (2, "h2")}
    workers = json.loads((result.run_dir / "job.json").read_text())["workers"]
    assert [(one["host"], one["local_rank"]) for one in workers] == [("h1", 0), ("h1", 1), ("h2", 0), ("h2", 1)]


@pytest.mark.extended
def test_a_rank_that_is_killed_is_named_and_its_neighbours_end(bed: Bed, tmp_path: Path) -> None:
    with job(bed, tmp_path, *[RUNS + READY] * 3, RUNS + "os.kill(os.getpid(), 9)") as started:
        result = started.result()
        started.gone()
    assert result.code == 128 + signal.SIGKILL and "rank 3 of 4 on h2 was killed by SIGKILL (9)" in result.err, result


def test_an_agent_that_is_lost_takes_all_ranks_of_its_host_with_it(bed: Bed, tmp_path: Path) -> None:
    with job(bed, tmp_path, *[RUNS + READY] * 4) as started:
        started.wait_for_output("ready", count=4)
        os.kill(started.agent(2), signal.SIGKILL)
        result = started.result()
        started.gone()
    assert result.code == 69 and "ranks 2-3" in result.err and "h2" in result.err, result
    assert [event["agent"] for event in result.events("AgentLost")] == [2]
