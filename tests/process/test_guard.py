"""The guard kills everything that a launcher leaves behind when it dies by kill -9."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TIME_LIMIT, is_alive, kill, wait_until, wait_until_dead

from jaxrun.node.agent.guard import find_marked, job_marker
from jaxrun.node.agent.mpi_memory import mapped_files, remove_files

# A launcher with a guard, a child that carries the job's mark, and the child's daemon in its own session.
LAUNCHER = """
import os, subprocess, sys, time
from jaxrun.node.agent.guard import Guard

job_id, pid_file, order = sys.argv[1:]
guard = Guard(f'JAXRUN_JOB_ID={job_id}')
daemon = f"setsid sh -c 'echo $$ >> {pid_file}; sleep 600' & echo $$ >> {pid_file}; sleep 600"
child = subprocess.Popen(["sh", "-c", daemon], env={**os.environ, "JAXRUN_JOB_ID": job_id})
while not (os.path.exists(pid_file) and len(open(pid_file).read().split()) == 2):
    time.sleep(0.01)
if order.startswith("/"):
    guard.add_file(order)
if order == "disarm a stopped one":
    os.kill(guard.pid, 19)
if order.startswith("disarm"):
    guard.disarm()
    guard.disarm()
print(guard.pid, child.pid, flush=True)
if order == "wait" or order.startswith("/"):
    time.sleep(600)
child.kill()
"""


@pytest.fixture
def launch(tmp_path):
    """launch(ORDER) → (the launcher, its guard's process id, those of its child and the child's daemon)."""
    job_id = os.urandom(16).hex()
    started = []

    def start(order):
        pid_file = tmp_path / "pids"
        command = [sys.executable, "-c", LAUNCHER, job_id, pid_file, order]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(launcher)
        guard = int(launcher.stdout.readline().split()[0])
        return launcher, guard, [int(pid) for pid in pid_file.read_text().split()]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    kill(find_marked(job_marker(job_id)))


def test_kill_9_of_the_launcher_leaves_nothing_though_the_terminal_has_signalled_the_guard(launch):
    launcher, guard, pids = launch("wait")
    wait_until(lambda: os.getsid(guard) == guard != os.getsid(launcher.pid))
    assert all(map(is_alive, pids))
    for signum in (2, 15, 1):
        os.kill(guard, signum)
    launcher.kill()
    launcher.wait()
    wait_until_dead(*pids, guard)


def test_a_launcher_that_forgets_its_guard_leaves_nothing_either(launch):
    launcher, guard, pids = launch("exit")
    assert launcher.wait(TIME_LIMIT) == 0
    wait_until_dead(*pids, guard)


def test_what_ranks_of_mpich_have_mapped_is_known_and_removed_if_the_agent_is_killed(launch):
    path = Path(f"/dev/shm/mpich_shm_{os.urandom(4).hex()}_0")
    path.write_bytes(bytes(4096))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert mapped_files(os.getpid()) == {str(path)}
            launcher, guard, pids = launch(str(path))
            launcher.kill()
            launcher.wait()
            wait_until_dead(*pids, guard)
            assert not path.exists()
            assert mapped_files(os.getpid()) == set(), "nobody has the name of a deleted file"
        assert mapped_files(2**22) == set()
        remove_files([str(path)])  # it is gone already
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("order", ["disarm", "disarm a stopped one"])
def test_a_disarmed_guard_ends_and_kills_nothing(launch, order):
    launcher, guard, pids = launch(order)
    assert launcher.wait(TIME_LIMIT) == 0
    wait_until_dead(guard)
    assert any(map(is_alive, pids))


def test_a_guard_keeps_none_of_the_launchers_streams_open(launch):
    launcher, guard, _ = launch("wait")
    wait_until(lambda: os.listdir(f"/proc/{guard}/fd") == ["0"])  # it may just have been forked
    assert os.readlink(f"/proc/{guard}/fd/0") != os.readlink(f"/proc/{launcher.pid}/fd/1")


# A subreaper with a guard, a daemon, and a worker with a child: child and daemon have no environment,
# and sessions of their own.
BARE_LAUNCHER = """
import os, subprocess, sys, time
from jaxrun.node.agent.guard import Guard
from jaxrun.node.agent.process_tree import become_subreaper

def tell(pid):
    os.write(1, b"%d\\n" % pid)  # at once: two processes tell

def sleeper():
    null = subprocess.DEVNULL
    bare = {"env": {}, "start_new_session": True, "stdin": null, "stdout": null, "stderr": null}
    tell(subprocess.Popen(["sleep", "600"], **bare).pid)

guard = Guard("JAXRUN_JOB_ID=" + os.urandom(16).hex())
tell(guard.pid)
become_subreaper()
if os.fork() == 0:  # the parent of a daemon, which ends at once
    sleeper()
    os._exit(0)
if os.fork() == 0:  # a worker
    os.close(guard._held)  # the owner alone holds it
    tell(os.getpid())
    sleeper()
    time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def _looks(guard):
    """How often the guard has gone to sleep."""
    words = Path(f"/proc/{guard}/status").read_text().split()
    return int(words[words.index("voluntary_ctxt_switches:") + 1])


def test_descendants_without_a_mark_are_killed_too():
    launcher = subprocess.Popen([sys.executable, "-c", BARE_LAUNCHER], stdout=subprocess.PIPE, text=True)
    pids = []
    try:
        guard, *pids = (int(launcher.stdout.readline()) for _ in range(4))
        looks = _looks(guard)
        wait_until(lambda: _looks(guard) >= looks + 20)
        assert all(map(is_alive, pids))
        launcher.kill()
        launcher.wait()
        wait_until_dead(*pids, guard)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        kill(pids)


@pytest.mark.parametrize("added", [True, False], ids=["added", "killed before it could be added"])
def test_a_launch_command_can_clean_up_before_it_is_killed(tmp_path, added):
    ready, cleaned = tmp_path / "ready", tmp_path / "cleaned"
    script = f"trap 'touch {cleaned}; exit' TERM; touch {ready}; while :; do sleep 0.05; done"
    code = f"""
import os, time
from jaxrun.node.agent import guard
guard._TERM_GRACE_S = 60.0  # however long the machine stands still
made = guard.Guard(launch_mark="X=1")
pid = os.posix_spawn("/bin/sh", ["sh", "-c", {script!r}], {{"X": "1"}}, setsid=True)
if {added}:
    made.add(pid)
while not os.path.exists({str(ready)!r}):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], timeout=TIME_LIMIT)
    wait_until(cleaned.exists)


def test_only_the_jobs_own_processes_are_marked():
    job_id = os.urandom(16).hex()
    child = subprocess.Popen(["sleep", "600"], env={"JAXRUN_JOB_ID": job_id})
    another = {"JAXRUN_JOB_ID": job_id + "0", "X": f"JAXRUN_JOB_ID={job_id}"}
    other = subprocess.Popen(["sleep", "600"], env=another)
    try:
        # While a program is being executed, its environment is empty.
        wait_until(lambda: all(Path(f"/proc/{process.pid}/environ").read_bytes() for process in (child, other)))
        assert list(find_marked(job_marker(job_id))) == [child.pid]
    finally:
        for process in (child, other):
            process.kill()
            process.wait()
