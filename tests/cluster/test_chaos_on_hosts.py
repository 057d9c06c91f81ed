"""Fault injection where the workers are on other hosts."""

from __future__ import annotations

import pytest
from harness import MISBEHAVE
from launch_modes import LAUNCHED, OPEN_MPI_5, SLURM, LaunchMode

pytestmark = pytest.mark.extended

TWO = [pytest.param(LaunchMode(engine, LAUNCHED), id=str(engine.label)) for engine in (OPEN_MPI_5, SLURM)]


@pytest.mark.parametrize("mode", TWO)
@pytest.mark.parametrize(
    ("kind", "codes", "words"),
    [("kill", {137}, "killed by SIGKILL (9)"), ("cut", {1, 134}, "cut off from the network")],
)
def test_a_fault_is_injected_on_its_host(go, mode: LaunchMode, kind: str, codes: set[int], words: str) -> None:
    result = go(mode).jaxrun("--chaos", f"{kind}:1@300ms", MISBEHAVE, "--steps", "100000")
    verdict = result.verdict()
    assert (result.code in codes, verdict["exit_code"]) == (True, result.code), result
    assert verdict["culprits"] == [1]
    assert f"rank 1 of 3 on h2 was {words}, as --chaos asked, 0.3" in str(verdict["headline"])
