"""A rank that waits in the kernel where no signal reaches it (state D), as in a file system or a driver that hangs."""

import os
import re
import shutil
import subprocess
import time

import pytest
from harness import TIME_LIMIT, process_state, started

from jaxrun.controller.head.job_shutdown import UNANSWERED_S

PROGRAM = """
import sys
import time
import jax
from jax.experimental import multihost_utils

multihost_utils.sync_global_devices("start")
print("ready", time.time(), flush=True)
if jax.process_index() == 1:
    open(sys.argv[1], "w").close()
multihost_utils.sync_global_devices("after")
"""


@pytest.fixture
def frozen(tmp_path):
    """A directory in a file system that is frozen: whoever writes there waits in state D until the end of the test."""
    if os.getuid() or not all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))):
        pytest.skip("only root can freeze a file system")
    image, directory = tmp_path / "image", tmp_path / "frozen"
    image.write_bytes(bytes(2**24))
    directory.mkdir()
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, directory], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        subprocess.run(["fsfreeze", "-f", directory], check=True)
        try:
            yield directory
        finally:
            subprocess.run(["fsfreeze", "-u", directory], check=True)
    finally:
        deadline = time.monotonic() + TIME_LIMIT
        while subprocess.run(["umount", directory], capture_output=True).returncode:  # until the last process has ended
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.extended
def test_stall_timeout_gives_up_a_rank_that_no_signal_reaches_and_says_why(frozen, tmp_path):
    (tmp_path / "writes.py").write_text(PROGRAM)
    words = ("-n", "2", "--stall-timeout", "4", str(tmp_path / "writes.py"), str(frozen / "file"))
    with (tmp_path / "screen").open("wb") as screen, started(tmp_path, *words, stderr=screen) as job:
        job.wait_for_output("ready", 2)
        assert job.process.wait(TIME_LIMIT) == 124
        began = max(float(log.read_text().rpartition("ready ")[2].split()[0]) for log in job.run_dir.glob("rank-*.out"))
        taken = time.time() - began
        pids = {event["rank"]: event["pid"] for event in job.events("WorkerSpawned")}
        assert process_state(pids[1]) == "D"
    said = " ".join((tmp_path / "screen").read_text().split())
    assert "rank 1 waits in the kernel for a disk, a file server or a driver, and rank 0 waits for it" in said
    waits = re.search(r"waiting for rank 1 to end, which was sent SIGKILL; jaxrun gives it up in (\d+) s", said)
    assert waits is not None and int(waits[1]) <= UNANSWERED_S - 2, said
    assert "its process waits in the kernel for a disk, a file server or a driver (state D)" in said
    assert 4 + UNANSWERED_S < taken < 60
