"""scripts/bench kills, with a few kills: at random moments of its start jaxrun leaves nothing, whatever the engine."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path

import pytest
from cluster_fixture import Bed
from launch_modes import MPI, SLURM, Engine

BENCH = Path(__file__).parents[2] / "scripts/bench.d"
sys.path.insert(0, str(BENCH))  # its files import each other by name
kills = import_module("kills")
sys.path.remove(str(BENCH))

PARTS = 2  # of the start, in each of which there is a kill


@pytest.mark.extended
@pytest.mark.parametrize("engine", [kills.ONE_HOST, *MPI, SLURM], ids=lambda engine: engine.label)
def test_kill_9_leaves_nothing_10_s_later(bed: Bed, engine: Engine) -> None:
    if engine is not kills.ONE_HOST and (reason := engine.missing()):
        pytest.skip(reason)
    seconds = kills.seconds_to_start(bed, engine)
    moments = [seconds * (part + random.random()) / PARTS for part in range(PARTS)]
    samples = [kills.measure(bed, engine, moment) for moment in moments]
    assert not [one for one in samples if one.wrong or one.gone is None]
