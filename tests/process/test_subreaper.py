"""Nothing that a launcher started outlives kill_all."""

import json
import subprocess
import sys
from pathlib import Path

# In a process of its own, as kill_all kills every child. Prints the processes started and killed, and the seconds.
LAUNCHER = """
import json, os, sys, time
from jaxrun.agent import subreaper

read, write = os.pipe()

def breed(depth):
    if depth and os.fork() == 0:
        os.setsid()
        os.write(write, b"%d\\n" % os.getpid())
        breed(depth - 1)
        if depth % 2:
            time.sleep(60)
        os._exit(0)

subreaper.become_subreaper()
depth = int(sys.argv[1])
breed(depth)
started = b""
while started.count(b"\\n") < depth:
    started += os.read(read, 1000)
began = time.monotonic()
killed = subreaper.kill_all()
print(json.dumps([list(map(int, started.split())), killed, time.monotonic() - began]))
"""


def _run(depth):
    command = [sys.executable, "-c", LAUNCHER, str(depth)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(answer.stdout)


def test_generations_with_sessions_of_their_own_are_gone():
    started, killed, _ = _run(5)  # the second and fourth end by themselves and leave their children behind
    assert len(started) == 5
    assert {started[0], started[2], started[4]} <= set(killed) <= set(started)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


def test_without_children_it_returns_at_once():
    started, killed, seconds = _run(0)
    assert started == killed == [] and seconds < 2.5  # half of what it waits for others


def test_the_one_to_spare_lives_and_the_others_are_gone():
    code = """
import json, os, time
from jaxrun.agent import subreaper

subreaper.become_subreaper()
def sleeper():
    pid = os.fork()
    if not pid:
        time.sleep(60)
    return pid
guard, others = sleeper(), [sleeper(), sleeper()]
killed = subreaper.kill_all(spare=(guard,))
lives = os.waitpid(guard, os.WNOHANG) == (0, 0)
began = time.monotonic()
again = subreaper.kill_all(spare=(guard,))
seconds = time.monotonic() - began
os.kill(guard, 9)
print(json.dumps([sorted(killed) == sorted(others), lives, again, seconds]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    gone, lives, again, seconds = json.loads(done.stdout)
    assert gone and lives and again == [] and seconds < 2.5


def test_processes_of_others_are_not_killed():
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        assert stranger.pid not in _run(2)[1]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
