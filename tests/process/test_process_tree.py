"""Processes: all that a launcher started is killed, but trackers outlive their group; and a worker's system calls."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until, wait_until_dead
from harness_worker import environment

from jaxrun.files.procfs import children, descendants, group_members
from jaxrun.node.agent.process_tree import TRACKER_GRACE_S, is_tracker, kill_group

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
from jaxrun.files import procfs
from jaxrun.node.agent import process_tree

process_tree.become_subreaper()
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True, start_new_session=True)
name, _ = worker.stdout.readline().split()
while not (trackers := set(filter(process_tree.is_tracker, procfs.descendants(worker.pid)))):
    time.sleep(0.01)
(tracker,) = trackers
if sys.argv[1] == "stopped":
    os.kill(tracker, signal.SIGSTOP)
else:
    process_tree.TRACKER_GRACE_S = 60.0  # a busy machine may leave it without a turn for more than the usual second
process_tree.kill_group(worker.pid)
began = time.monotonic()
process_tree.kill_all(50.0)
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
def test_the_last_sweep_waits_a_limited_time_for_trackers(tracker: str) -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHER, tracker], capture_output=True, text=True, timeout=60)
    name, alive, seconds = done.stdout.split()
    left = Path(f"/dev/shm/{name}").exists()
    if left:
        shared_memory.SharedMemory(name).unlink()
    assert (left, alive) == (tracker == "stopped", "False"), done.stderr
    assert float(seconds) >= TRACKER_GRACE_S if tracker == "stopped" else float(seconds) < 30


# ---- kill_all

# In a process of its own, as kill_all kills every child. Prints the processes started and killed, and the seconds.
BREEDER = """
import json, os, sys, time
from jaxrun.files import procfs
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
from jaxrun.files import procfs
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


# ---- a worker's system calls

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOBODY = 65534


def _python(code, **more):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment(), **more
    )


def test_a_child_with_a_parent_death_signal_dies_with_its_parent():
    code = """
import ctypes, os, signal, sys, time
from jaxrun_runtime import linux
pid = os.fork()
if pid == 0:
    linux.die_with_parent()
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    print(os.getpid(), number.value, flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment())
    child, number = map(int, parent.stdout.readline().split())
    assert number == signal.SIGKILL  # which cannot be caught
    parent.kill()
    parent.wait()
    wait_until_dead(child)
    parent.stdout.close()


_SIMULATE = """
import ctypes, os, socket, sys
from jaxrun_runtime import linux
uid = int(sys.argv[1])
pid = os.fork()
if pid == 0:
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as for a process that began as this user
    try:
        linux.become_simulated_host("h2", sys.argv[2])
    except OSError as error:
        print("forbidden", error)
        os._exit(0)
    with open("/proc/sys/kernel/random/boot_id") as file:
        print(socket.gethostname(), file.read().strip(), os.getuid(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("uid", sorted({os.getuid(), _NOBODY}) if os.getuid() == 0 else [os.getuid()])
def test_a_simulated_host_has_a_name_and_a_boot_id_of_its_own(uid):
    boot_id = str(uuid.uuid4())
    before = socket.gethostname(), _BOOT_ID.read_text()
    result = _python(_SIMULATE.replace("sys.argv[1]", repr(uid)).replace("sys.argv[2]", repr(boot_id)))
    assert result.returncode == 0, result.stderr
    if result.stdout.startswith("forbidden"):
        pytest.skip(f"this machine allows no namespaces: {result.stdout}")
    assert result.stdout.split() == ["h2", boot_id, str(uid)]
    assert (socket.gethostname(), _BOOT_ID.read_text()) == before


def test_a_malformed_call_is_an_error_that_names_it(monkeypatch):
    from jaxrun_runtime import linux

    monkeypatch.setattr(linux, "_PR_SET_PDEATHSIG", -1)
    with pytest.raises(OSError, match=r"prctl\(PR_SET_PDEATHSIG\): Invalid argument"):
        linux.die_with_parent()


def test_a_process_title_is_what_others_see_and_the_environment_stays():
    code = """
import sys
from pathlib import Path
from jaxrun_runtime import linux
before = Path("/proc/self/environ").read_bytes(), len(Path("/proc/self/cmdline").read_bytes())
for title in ("jaxrun rank 2: train.py", "x" * 10_000):
    linux.set_process_title("jaxrun rank 2345", title)
    shown = Path("/proc/self/cmdline").read_bytes()
    assert (Path("/proc/self/environ").read_bytes(), len(shown)) == before
    print(shown.rstrip(b"\\0") in (title.encode(), title[: before[1] - 1].encode()))
print(Path("/proc/self/comm").read_text().strip(), sys.argv)
"""
    assert _python(code).stdout == "True\nTrue\njaxrun rank 234 ['-c']\n"
