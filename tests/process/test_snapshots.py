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
from harness import HERE, Result, extended, jaxrun, started, wait_until

PROGRAM = str(HERE / "keeps_snapshots.py")
MEMORY = Path(f"/dev/shm/jaxrun-{os.geteuid()}")
NO_SNAPSHOT = (
    "no snapshot in memory is whole, because the parts of step 7 on h1 and h2 are lost; "
    "continue from the checkpoint on disk"
)
OTHER = "jaxrun: the snapshot of step 12 in memory does not fit `like`: only the snapshot has state['count'], int32[]; "
VALUES = str(HERE / "keeps_values.py")
KILLS = str(HERE / "keeps_under_kills.py")
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


@pytest.mark.extended
def test_an_undisturbed_job_restores_nothing_and_with_other_shardings_the_same_values(undisturbed: Result) -> None:
    assert undisturbed.code == 0 and len(lines(undisturbed, "restored None")) == 4, undisturbed
    assert len(lines(undisturbed, "other None 12")) == 4 and undisturbed.err.count(OTHER) == 1
    assert "only `like` has state['more'], float32[3]" in undisturbed.err
    assert "jaxrun: snapshots take up to 88 KiB of memory on each host" in undisturbed.err
    assert [event["step"] for event in undisturbed.events("CheckpointSaved")][:11] == list(range(1, 12))


@pytest.mark.parametrize(
    ("fate", "restored"),
    [
        pytest.param(("kill", "1"), "7", id="a rank is killed"),
        extended(("lose", "h1,h3"), "7", id="two hosts are lost"),
        extended(("lose", "h1,h2"), "None", id="two neighbours are lost"),
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


@pytest.mark.extended
def test_without_memory_on_one_host_the_first_snapshot_is_refused_in_words_on_all(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--simulate-hosts", "2", PROGRAM, "small")
    words = (
        r"MemoryError: snapshots of this state take [\d.]+ KiB of memory on h2, in /dev/shm, but 1 KiB are free there;"
    )
    assert result.code == 1 and re.search(words, result.err), result
    assert "2 of 2 ranks raised MemoryError" in result.err, result


def test_a_killed_launcher_leaves_no_snapshot(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "2", "--simulate-hosts", "2", PROGRAM, "hold") as job:
        job.wait_for_output("holds", 2)
        found = {path.name.partition("-")[2]: path for path in kept(job.run_dir)}
        for host in ("snapshots-h1", "snapshots-h2"):  # a slot has its snapshot, and nothing of the first one
            slots = {slot: [path.name[2:] for path in sorted(found[host].glob(f"{slot}_*"))] for slot in (0, 1)}
            assert slots[0] == slots[1] and len(slots[0]) == len([*found[host].iterdir()]) / 2, slots
        job.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not kept(job.run_dir), "end of the snapshots")


# ---- values


@pytest.mark.extended
@pytest.mark.parametrize(("ranks", "hosts"), [(3, 1), extended(4, 2)])
def test_values_of_every_kind_come_back_as_what_they_were(tmp_path: Path, ranks: int, hosts: int) -> None:
    place = ("-n", str(ranks), "--simulate-hosts", str(hosts))
    result = jaxrun(tmp_path, *place, "--max-restarts", "1", VALUES, "kill")
    assert result.code == 0 and "differs" not in result.out, result
    assert len(lines(result, "restored 5 None RestoredState(step=1, state={})")) == ranks, result
    assert len(lines(result, "came back True 7 [1. 1. 1. 1.]")) == ranks, result


CANNOT = "snapshot cannot keep this state"
ADVICE = "make it a jax.Array, a numpy array or a Python number, or leave it out"
STRUCT = f"is of type ShapeDtypeStruct; {ADVICE}"
REFUSED = {
    "leaves": f"{CANNOT}: | state['a'] is of type str; {ADVICE} | state['b'] is of type object, which has no bytes"
    f" | state['c'] {STRUCT} | state['d'] was given away (donated) or deleted; pass what the step has returned",
    "unequal": f"{CANNOT}: | state['array'] must be equal on all ranks: ranks 1-3 differ from rank 0"
    " | state['number'] must be equal on all ranks: ranks 2-3 differ from rank 0",
    "leaves that differ": f"{CANNOT}: | rank 0 has state['of 0'], which ranks 1, 3 have not"
    " | state['y'] is not alike on all ranks: float64[2] of its own on ranks 0-1, float64[3] of its own on ranks 2-3"
    " | rank 1 has state['of 1'], which ranks 0, 2 have not",
    "steps that differ": "all ranks must call snapshot for the same step, "
    "not step 0 on rank 0, step 1 on rank 1, step 2 on rank 2, step 3 on rank 3",
    "negative": f"{CANNOT}: | the step must be from 0 to 2**63 - 1, not -1 | state['a'] is of type object; {ADVICE}",
    "too large": f"{CANNOT}: the step must be from 0 to 2**63 - 1, not 18446744073709551616",
    "on one rank": f"{CANNOT}: on rank 1 the step must be a whole number, not 1.5",
    "traced": f"{CANNOT}: state['x'] has no value yet: "
    "this is within a function that JAX traces; call it outside of that",
    "like": f"restore cannot use this `like`: state['a'] is of type str; {ADVICE}",
    "likes that differ": "restore cannot use this `like`: state['x'] is not alike on all ranks: "
    "float64[0] on rank 0, float64[1] on rank 1, float64[2] on rank 2, float64[3] on rank 3",
}


@pytest.mark.extended
def test_what_cannot_be_kept_is_named_leaf_by_leaf_on_all_ranks_and_the_job_can_go_on(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "4", VALUES, "refused")
    assert result.code == 0, result
    expected = [f"{name}: {text}" for name, text in REFUSED.items()]
    expected.append("goes on: RestoredState(step=3, state={'x': 1})")
    for rank in range(4):
        assert (result.run_dir / f"rank-000{rank}.out").read_text().splitlines() == expected


@pytest.mark.extended
def test_such_an_error_has_the_line_of_the_program_and_is_not_restarted(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "1", "--max-restarts", "3", VALUES, "usage")
    assert result.code == 1 and "a SnapshotError does not go away by itself" in result.err, result
    traceback = str(result.verdict()["traceback"])
    assert 'jr.snapshot(1, {"name": "text"})' in traceback and "state_snapshots" not in traceback, traceback


THREADS = """
import threading, numpy as np, jaxrun_runtime as jr
failed = []
def keep(number):
    try:
        for step in range(number, 40, 2):
            jr.snapshot(step, {"x": np.full(1000 * (number + 1), step)} | {str(at): at for at in range(number * 5)})
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=keep, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failed)
"""


@pytest.mark.extended
def test_threads_of_a_rank_take_turns(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(THREADS)
    result = jaxrun(tmp_path, "-n", "1", "threads.py")
    assert result.code == 0 and lines(result, "[]"), result


LAST = """
import time, numpy as np, jaxrun_runtime as jr
from jaxrun_runtime.state_snapshots.host_memory import HostMemory
complete = HostMemory.complete
def complete_slowly(*arguments):
    time.sleep(0.5)
    complete(*arguments)
HostMemory.complete = complete_slowly
for step in range(2):
    jr.snapshot(step, {"x": np.zeros(8)})
"""


def test_a_program_that_ends_well_waits_until_its_last_snapshot_is_whole(tmp_path: Path) -> None:
    (tmp_path / "last.py").write_text(LAST)
    result = jaxrun(tmp_path, "-n", "2", "--simulate-hosts", "2", "last.py")
    assert result.code == 0 and [event["step"] for event in result.events("CheckpointSaved")] == [0, 1], result


@pytest.mark.extended
def test_a_directory_of_the_job_that_is_not_this_users_alone_is_named_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, jaxrun_runtime as jr\nfrom jaxrun.files import shared_memory\n"
        "os.mkdir('memory'); shared_memory._MEMORY = os.path.abspath('memory')\n"
        "for path in shared_memory._own_directories(os.environ['JAXRUN_JOB_ID']):\n    os.mkdir(path, 0o755)\n"
        "jr.snapshot(1, {})\n"
    )
    result = jaxrun(tmp_path, "-n", "1", "program.py")
    path = rf"{tmp_path}/memory/jaxrun-\d+-[0-9a-f]+"
    words = rf"snapshots cannot be kept: {path} on \S+: it is not this user's alone: .*; have it removed"
    assert result.code == 1 and re.search(words, result.err), result


# ---- kills


@pytest.mark.extended
@pytest.mark.parametrize("kills", [3, extended(20)])
def test_a_kill_at_any_moment_leaves_the_latest_whole_snapshot(tmp_path: Path, kills: int) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--simulate-hosts", "2", "--max-restarts", "99", KILLS, str(kills))
    assert result.code == 0, result
    assert len(lines(result, f"killed {kills} times")) == 2, result
