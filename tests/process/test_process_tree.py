"""Everything that a launcher started is killed, but resource trackers outlive the group that they clean up for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until

from jaxrun.node.agent.process_tree import TRACKER_GRACE_S, children, descendants, group_members, is_tracker, kill_group

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
from jaxrun.node.agent import process_tree

process_tree.become_subreaper()
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True, start_new_session=True)
name, _ = worker.stdout.readline().split()
while not (trackers := set(filter(process_tree.is_tracker, process_tree.descendants(worker.pid)))):
    time.sleep(0.01)
(tracker,) = trackers
if sys.argv[1] == "stopped":
    os.kill(tracker, signal.SIGSTOP)
process_tree.kill_group(worker.pid)
began = time.monotonic()
process_tree.kill_all()
print(name, os.path.exists(f"/proc/{{tracker}}"), time.monotonic() - began)
"""


def test_a_group_is_killed_and_its_tracker_removes_the_shared_memory() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert worker.stdout is not None
    with worker.stdout:
        name, sleeper = worker.stdout.readline().split()
    # The tracker may not have become one yet.
    (tracker,) = wait_until(lambda: list(filter(is_tracker, descendants(worker.pid))))
    below = descendants(worker.pid)
    assert below == children(worker.pid) == {tracker, int(sleeper)}
    assert group_members(worker.pid) == below | {worker.pid}
    kill_group(worker.pid)
    assert worker.wait() == -signal.SIGKILL
    wait_until(lambda: not Path(f"/dev/shm/{name}").exists() and not group_members(worker.pid))
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


# ---- kill_all

# In a process of its own, as kill_all kills every child. Prints the processes started and killed, and the seconds.
BREEDER = """
import json, os, sys, time
from jaxrun.node.agent import process_tree

read, write = os.pipe()

def breed(depth):
    if depth and os.fork() == 0:
        os.setsid()
        os.write(write, b"%d\\n" % os.getpid())
        breed(depth - 1)
        if depth % 2:
            time.sleep(60)
        os._exit(0)

process_tree.become_subreaper()
depth = int(sys.argv[1])
breed(depth)
started = b""
while started.count(b"\\n") < depth:
    started += os.read(read, 1000)
began = time.monotonic()
killed = process_tree.kill_all(50.0)
print(json.dumps([list(map(int, started.split())), killed, time.monotonic() - began]))
"""
SPARES_ONE = """
import json, os, time
from jaxrun.node.agent import process_tree

process_tree.become_subreaper()
def sleeper():
    pid = os.fork()
    if not pid:
        time.sleep(60)
    return pid
guard, others = sleeper(), [sleeper(), sleeper()]
killed = process_tree.kill_all(keep=(guard,))
lives = os.waitpid(guard, os.WNOHANG) == (0, 0)
began = time.monotonic()
again = process_tree.kill_all(50.0, keep=(guard,))
seconds = time.monotonic() - began
os.kill(guard, 9)
print(json.dumps([sorted(killed) == sorted(others), lives, again, seconds < 30]))
"""


def run_code(code: str, *arguments: object) -> Any:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(answer.stdout)


def test_generations_with_sessions_of_their_own_are_gone_and_strangers_are_not_killed() -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        started, killed, _ = run_code(BREEDER, 5)  # the second and fourth end by themselves and leave their children
        assert len(started) == 5
        assert {started[0], started[2], started[4]} <= set(killed) <= set(started)
        assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_one_to_spare_lives_and_is_not_waited_for() -> None:
    assert run_code(SPARES_ONE) == [True, True, [], True]
