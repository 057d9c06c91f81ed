"""Snapshots of the state in memory: what a job with simulated hosts restores, and that nothing of them is left.

What real hosts lose is in tests/cluster/test_snapshots_on_hosts.py, which part is where in tests/unit.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from harness import HERE, Result, jaxrun, started, wait_until

PROGRAM = str(HERE / "keeps_snapshots.py")
MEMORY = Path(f"/dev/shm/jaxrun-{os.geteuid()}")
NO_SNAPSHOT = "no snapshot in memory is whole, as hosts that kept parts of step 7 are lost; go on from the checkpoint"
pytestmark = pytest.mark.jax_version


def run(tmp_path: Path, *words: str) -> Result:
    result = jaxrun(tmp_path, "-n", "4", "--simulate-hosts", "4", "--max-restarts", "1", PROGRAM, *words)
    assert not kept(result.run_dir), result
    return result


def kept(run_dir: Path) -> list[Path]:
    """The directories in memory of the job."""
    job_id = json.loads((run_dir / "job.json").read_text())["job_id"]
    return list(MEMORY.glob(f"{job_id}-*"))


def lines(result: Result, word: str) -> list[str]:
    return sorted(line for line in result.out.splitlines() if f"] {word}" in line)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("undisturbed"), "none")


def test_an_undisturbed_job_restores_nothing_and_with_other_shardings_the_same_values(undisturbed: Result) -> None:
    assert undisturbed.code == 0 and len(lines(undisturbed, "restored None")) == 4, undisturbed
    assert len(lines(undisturbed, "refused: the snapshots in memory are of a state with other leaves")) == 4
    assert len(lines(undisturbed, "refused: state['mine'] is an array of this rank alone")) == 4
    assert "jaxrun: snapshots take up to 64 KiB of memory on each host" in undisturbed.err
    assert [event["step"] for event in undisturbed.events("CheckpointSaved")][:11] == list(range(1, 12))


@pytest.mark.parametrize(
    ("fate", "restored"),
    [
        pytest.param(("kill", "1"), "7", id="a rank is killed"),
        pytest.param(("lose", "h1,h3"), "7", id="two hosts are lost"),
        pytest.param(("lose", "h1,h2"), "None", id="two neighbours are lost"),
    ],
)
def test_after_a_loss_the_job_ends_with_the_same_bits(
    undisturbed: Result, tmp_path: Path, fate: tuple[str, ...], restored: str
) -> None:
    result = run(tmp_path, *fate)
    assert result.code == 0 and lines(result, "bits") == lines(undisturbed, "bits"), result
    assert all(line.endswith(" True") for line in lines(result, "bits")), result
    again = (result.run_dir / "attempt-2" / "rank-0000.out").read_text()
    assert f"restored {restored}\n" in again and (NO_SNAPSHOT in result.err) == (restored == "None"), result


def test_without_memory_the_first_snapshot_is_refused_in_words(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "1", PROGRAM, "small")
    words = (
        r"MemoryError: snapshots of this state take [\d.]+ KiB of memory on \S+, in /dev/shm, but 1 KiB are free there"
    )
    assert result.code == 1 and re.search(words, result.err), result


def test_a_killed_launcher_leaves_no_snapshot(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", "--simulate-hosts", "2", PROGRAM, "hold") as job:
        job.wait_for_output("holds", 2)
        assert {path.name.partition("-")[2] for path in kept(job.run_dir)} >= {"snapshots-h1", "snapshots-h2"}
        job.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not kept(job.run_dir), "end of the snapshots")
