"""Fault injection where the workers are on other hosts."""

from __future__ import annotations

import re

import pytest
from harness import MISBEHAVE
from launch_modes import LAUNCHED, MPICH, OPEN_MPI_5, SLURM, Engine, LaunchMode

pytestmark = pytest.mark.extended


@pytest.mark.parametrize(
    ("kind", "engine", "codes", "words"),
    [
        ("kill", OPEN_MPI_5, {137}, "killed by SIGKILL (9)"),
        ("cut", SLURM, {1, 134}, "cut off from the network"),
        ("cut", MPICH, {1, 134}, "cut off from the network"),  # whose ranks hold a connection of the engine's
    ],
    ids=["kill", "cut", "cut MPICH"],
)
def test_a_fault_is_injected_on_its_host(make_runner, kind: str, engine: Engine, codes: set[int], words: str) -> None:
    result = make_runner(LaunchMode(engine, LAUNCHED)).jaxrun(
        "--chaos", f"{kind}:1@300ms", MISBEHAVE, "--steps", "100000"
    )
    verdict = result.verdict()
    assert (result.code in codes, verdict["exit_code"]) == (True, result.code), result
    assert verdict["culprits"] == [1]
    headline = str(verdict["headline"])
    found = re.fullmatch(r"rank 1 of 3 on h2 was (.*), as --chaos asked, (\S+) s into the run\.", headline)
    assert found and found[1] == words and float(found[2]) >= 0.3, headline
