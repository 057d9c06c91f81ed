"""Fault injection where the workers are on other hosts."""

from __future__ import annotations

import pytest
from harness import MISBEHAVE
from launch_modes import LAUNCHED, OPEN_MPI_5, SLURM, Way

pytestmark = pytest.mark.extended

TWO = [pytest.param(Way(engine, LAUNCHED), id=str(engine.label)) for engine in (OPEN_MPI_5, SLURM)]


@pytest.mark.parametrize("way", TWO)
@pytest.mark.parametrize(
    ("kind", "codes", "words"),
    [("kill", {137}, "killed by SIGKILL (9)"), ("cut", {1, 134}, "cut off from the network")],
)
def test_a_fault_on_order_is_done_on_its_host(go, way: Way, kind: str, codes: set[int], words: str) -> None:
    result = go(way).jaxrun("--chaos", f"{kind}:1@300ms", MISBEHAVE, "--steps", "100000")
    verdict = result.verdict()
    assert (result.code in codes, verdict["exit_code"]) == (True, result.code), result
    assert verdict["culprits"] == [1]
    assert f"rank 1 of 3 on h2 was {words}, as --chaos asked, 0.3" in str(verdict["headline"])
