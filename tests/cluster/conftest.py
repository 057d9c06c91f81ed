"""A testbed for the tests that want one, brought up at the first use and taken down at the end, also by `kill -9`.

Each process of pytest has its own, as testbeds do not meet: so tests may cut a host off while others run elsewhere, and
leave all hosts on and linked.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# `cluster_fixture` and `launch_modes` from here, the helpers of the other tests, and the testbed's own modules.
HELPERS = (HERE, HERE.parent / "process", HERE.parent / "unit", HERE.parents[1] / "scripts" / "testbed.d")
sys.path[:0] = map(str, HELPERS)

import cluster_fixture  # noqa: E402
import launch_modes  # noqa: E402
import requirements  # noqa: E402
import state  # noqa: E402

SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips on a machine that cannot have a testbed."""
    missing = requirements.missing_packages(lambda command: shutil.which(command, path=SYSTEM_PATH))
    try:
        requirements.require_root(os.geteuid())
        requirements.require_packages(missing)
        requirements.require_namespaces()
    except state.Refusal as refusal:
        pytest.skip(f"a testbed {refusal} (scripts/test does it as root)")


@pytest.fixture(scope="session")
def bed(machine: None) -> Iterator[cluster_fixture.Bed]:
    with cluster_fixture.brought_up(cluster_fixture.HOSTS) as bed:
        yield bed


@pytest.fixture(scope="module")
def cell(bed: cluster_fixture.Bed) -> Iterator[cluster_fixture.Bed]:
    """The testbed with a running Grid Engine, which the tests of other modules do not have."""
    missing = requirements.missing_packages(
        lambda command: shutil.which(command, path=SYSTEM_PATH), requirements.GRID_ENGINE_PACKAGES
    )
    if missing:
        pytest.skip(f"Grid Engine needs {', '.join(missing)}: run scripts/testbed install")
    bed.run("grid-engine")
    yield bed
    bed.run("grid-engine", "--end")


@pytest.fixture
def mended(bed: cluster_fixture.Bed) -> Iterator[None]:
    """Whatever becomes of the hosts, they are on and linked afterwards."""
    try:
        yield
    finally:
        while bed.moved:
            bed.run("off", bed.moved.pop())
        for host in bed.hosts:
            match bed.row(host)[3]:
                case "cut":
                    bed.run("mend", host)
                    bed.end_slurmd(host)
                case "off":  # or Slurm may wait for the end of its jobs for longer than for the host itself
                    bed.inside("ctl", "scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=off")
        bed.run("up")


@pytest.fixture
def make_runner(
    bed: cluster_fixture.Bed, tmp_path: Path
) -> Callable[[launch_modes.LaunchMode], cluster_fixture.JobRunner]:
    """make_runner(MODE) → a JobRunner of this launch mode. Skips where its engine is missing."""

    def make(mode: launch_modes.LaunchMode) -> cluster_fixture.JobRunner:
        if reason := mode.engine.missing():
            pytest.skip(reason)
        return cluster_fixture.JobRunner(bed, mode, tmp_path)

    return make


@pytest.fixture
def runner(
    request: pytest.FixtureRequest, make_runner: Callable[[launch_modes.LaunchMode], cluster_fixture.JobRunner]
) -> cluster_fixture.JobRunner:
    """The same for a row of the matrix, in which it leaves its mark (see `launch_modes.row`)."""
    mode, row = request.param
    mark = f"{mode.engine.title} | {mode.direction} | {row}"
    file, line, _ = request.node.location
    place = f"{Path(file).name}:{line:04d}"
    request.node.user_properties += [("matrix", mark), ("order", place), ("with", launch_modes.versions())]
    return make_runner(mode)
