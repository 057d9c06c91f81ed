"""Resource trackers are told from other processes, and outlive the group that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from jaxrun.agent.process_tree import TRACKER_GRACE_S, children, descendants, group_members, is_tracker, kill_group

# A session with a block of shared memory, thus a tracker, and a process that sleeps. Prints the block and the sleeper.
WORKER = """
import subprocess, sys, time
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=10)
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(block.name, sleeper.pid, flush=True)
time.sleep(600)
"""
# Kills and reaps what it has started: a worker as above. The second argument stops the tracker before.
LAUNCHER = f"""
import os, signal, subprocess, sys, time
from jaxrun.agent import process_tree, subreaper

subreaper.become_subreaper()
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True, start_new_session=True)
name, _ = worker.stdout.readline().split()
(tracker,) = filter(process_tree.is_tracker, process_tree.descendants(worker.pid))
if sys.argv[1] == "stopped":
    os.kill(tracker, signal.SIGSTOP)
process_tree.kill_group(worker.pid)
began = time.monotonic()
subreaper.kill_all()
print(name, os.path.exists(f"/proc/{{tracker}}"), time.monotonic() - began)
"""


def test_a_group_is_killed_and_its_tracker_removes_the_shared_memory() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert worker.stdout is not None
    with worker.stdout:
        name, sleeper = worker.stdout.readline().split()
    below = descendants(worker.pid)
    (tracker,) = filter(is_tracker, below)
    assert below == children(worker.pid) == {tracker, int(sleeper)}
    assert group_members(worker.pid) == below | {worker.pid}
    kill_group(worker.pid)
    assert worker.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while Path(f"/dev/shm/{name}").exists() or group_members(worker.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not is_tracker(worker.pid) and not is_tracker(os.getpid())
    kill_group(worker.pid)  # has ended already


@pytest.mark.parametrize("tracker", ["running", "stopped"])
def test_the_last_sweep_waits_for_trackers_but_not_for_ever(tracker: str) -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHER, tracker], capture_output=True, text=True, timeout=60)
    name, alive, seconds = done.stdout.split()
    left = Path(f"/dev/shm/{name}").exists()
    if left:
        shared_memory.SharedMemory(name).unlink()
    assert (left, alive) == (tracker == "stopped", "False"), done.stderr
    assert (float(seconds) >= TRACKER_GRACE_S) == (tracker == "stopped")
