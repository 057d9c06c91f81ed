"""A rank's stacks, as it writes them when its agent asks, and as Python's fault handler does."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from harness import started, wait_until
from harness_worker import environment

from jaxrun.analysis.diagnosis import stacks
from jaxrun.analysis.diagnosis.rank_state import Activity, find_rank_state
from jaxrun.analysis.diagnosis.stacks import main_stack, parse_dump
from jaxrun.node.agent import child_processes
from jaxrun.node.agent.child_processes import describe_children
from jaxrun.protocol.env import FAULT_HANDLER_SIGNAL, STACKS_SIGNAL
from jaxrun.protocol.query_messages import ChildProcess
from jaxrun_runtime import stack_dumps

BEGIN = "import sys\nfrom jaxrun_runtime import stack_dumps\nstack_dumps.write_on_signal(int(sys.argv[1]))\n"
# Each call enters Python from C and leaves it again: there a fault handler meets frames that are no frames yet.
CALLS = f"""{BEGIN}
class Made:
    def __init__(self):
        self.one = 1
def make(_):
    return Made()
sys.setswitchinterval(1e-4)
print("ready", flush=True)
while True:
    list(map(make, range(1000)))
"""
WAITS = f"""{BEGIN}
import threading
def dive(depth):
    if depth:
        dive(depth - 1)
    if threading.current_thread() is threading.main_thread():
        print("ready", flush=True)
    threading.Event().wait() if depth == 0 else None
threading.Thread(target=dive, args=(2,), daemon=True).start()
dive(150)
"""
HOLDS_THE_GIL = """
import ctypes
def hold():
    lock = ctypes.create_string_buffer(64)
    print("holds it", flush=True)
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
hold()
"""


@pytest.fixture
def dumps():
    """dumps(CODE) → a context with a function: signal → what the process with this code then writes."""

    @contextlib.contextmanager
    def start(code):
        file = os.memfd_create("stacks")
        command, pipes = [sys.executable, "-c", code, str(file)], {"stdout": subprocess.PIPE, "text": True}
        child = subprocess.Popen(command, env=environment(), pass_fds=(file,), **pipes)

        def ask(signum):
            before = size = os.fstat(file).st_size
            os.kill(child.pid, signum)
            while size == before or size != os.fstat(file).st_size:  # it grows page by page
                size = os.fstat(file).st_size
                assert child.poll() is None
                time.sleep(0.0005)
            return os.pread(file, 2**20, before).decode()

        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            yield ask
        finally:
            child.kill()
            child.communicate()
            os.close(file)

    return start


@pytest.mark.extended
@pytest.mark.jax_version  # as each has a Python of its own
def test_stacks_do_not_crash_a_rank_that_calls_functions(dumps):
    """To its fault handler, one signal in 10 does with Python 3.12.1, in 300 with 3.13.0, in 1,000 with 3.11.7."""
    with dumps(CALLS) as ask:
        for _ in range(2000):
            stack = main_stack(ask(STACKS_SIGNAL))
            assert stack.current and stack.frames[-1].function == "<module>" and len(stack.frames) <= 3


def test_the_stacks_equal_the_fault_handlers(dumps):
    with dumps(WAITS) as ask:

        def agree():  # once both threads wait
            ours, theirs = parse_dump(ask(STACKS_SIGNAL)), parse_dump(ask(FAULT_HANDLER_SIGNAL))
            theirs = [stack for stack in theirs if "_serve" not in str(stack)]
            return [(s.frames, s.current) for s in theirs] == [(s.frames, s.current) for s in ours] and ours

        other, main = wait_until(agree)
        assert (len(main.frames), main.current, other.current) == (100, True, False)
        assert [frame.function for frame in other.frames].count("dive") == 3


HANDLES = f"""{BEGIN}
import threading
class Loud(ValueError):
    def __str__(self):
        threading.Event().wait()
def wait(name, error):
    try:
        raise error
    finally:
        print("ready", flush=True) if name == "main" else None
        threading.Event().wait()
full = OSError(28, "No space left on device")
threading.Thread(target=wait, args=("Loader", full), name="Loader", daemon=True).start()
wait("main", Loud("bad record", 3))
"""


def test_the_exceptions_that_threads_handle_are_read_without_the_programs_code(dumps):
    with dumps(HANDLES) as ask:

        def handled():  # once both threads wait
            found = {stack.name: stack.notes.handled for stack in parse_dump(ask(STACKS_SIGNAL))}
            return all(found.get(name) for name in ("", "Loader")) and found

        found = wait_until(handled)
        assert [(one.error, one.message) for one in found[""]] == [("Loud", "bad record")]
        assert [(one.error, one.message) for one in found["Loader"]] == [
            ("OSError", "[Errno 28] No space left on device")
        ]
        assert found[""][0].places[-1][2] == "wait"
        assert not any(stack.notes.handled for stack in parse_dump(ask(FAULT_HANDLER_SIGNAL)))


@pytest.mark.extended
def test_code_that_holds_the_gil_is_shown_by_the_fault_handler(tmp_path):
    (tmp_path / "held.py").write_text(HOLDS_THE_GIL)
    command = [sys.executable, "-m", "jaxrun", "stacks", "run"]

    def shown():
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    with started(tmp_path, "-n", "1", "held.py") as job:
        job.wait_for_output("holds it")
        job.wait_until(lambda: "held.py:7 hold" in shown(), "stacks")


LIVE = {
    "queue.Queue().get()": Activity.DATA,
    "threading.Event().wait()": Activity.THREAD,
    "threading.Semaphore(0).acquire()": Activity.THREAD,
    "subprocess.run(['sleep', '60'])": Activity.PROCESS,
    "pdb.set_trace(); print()": Activity.PROMPT,
    "pair[0].recv()": Activity.DATA,
    "listening.accept()": Activity.NETWORK,
    "input()": Activity.INPUT,
    "time.sleep(60)": Activity.SLEEP,
    "os.system('sleep 60')": Activity.PROCESS,
}


@pytest.mark.parametrize("line", LIVE)
def test_this_python_and_this_kernel_are_understood(tmp_path, line):
    """A rank that sleeps without a Python frame is known by its kernel state only, which may be unreadable."""
    program, answer = tmp_path / "program.py", tmp_path / "stacks"
    program.write_text(
        "import faulthandler, multiprocessing, os, pdb, queue, signal, socket, subprocess, threading, time\n"
        f"faulthandler.register(signal.SIGUSR1, open({str(answer)!r}, 'w'))\n"
        "listening = socket.create_server(('127.0.0.1', 0))\n"
        "pair = multiprocessing.Pipe()\n"
        f"def main():\n    {line}\n"
        "print('ready', flush=True)\nmain()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, program], start_new_session=True, **pipes)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not _does(child, answer, LIVE[line]):
            assert time.monotonic() < deadline, answer.read_text()
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _does(child, answer, doing):
    child.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
    wait = Path(f"/proc/{child.pid}/wchan").read_text()
    seen = find_rank_state(0, answer.read_text(), wait)
    return seen.place == "program.py:6 main" and (seen.activity is doing or (wait == "0" and not seen.call))


def _dump_of(block):
    """What the fault handler of this Python writes while `block` runs in a second thread."""
    thread = threading.Thread(target=block, name="Loader-1", daemon=True)
    thread.start()
    wait_until(lambda: sys._current_frames()[thread.ident].f_code.co_name == block.__name__, "a thread in the block")
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def test_this_pythons_own_dump_is_read():
    done = threading.Event()
    try:
        dump = _dump_of(done.wait)
    finally:
        done.set()
    functions = [frame.function for frame in stacks.main_stack(dump).frames]
    assert functions[:2] == ["_dump_of", "test_this_pythons_own_dump_is_read"]
    assert any("wait" in [frame.function for frame in stack.frames] for stack in stacks.parse_dump(dump))


def test_a_ranks_own_stacks_name_threads_and_say_which_are_daemons():
    go = threading.Event()
    for name, daemon in (("Loader]\n-1", False), ("Watcher", True)):
        threading.Thread(target=go.wait, name=name, daemon=daemon).start()
    try:
        found = {stack.name: stack.is_daemon for stack in parse_dump(stack_dumps.describe_threads())}
    finally:
        go.set()
    assert found["Loader??-1"] is False and found["Watcher"] is True


def test_children_are_described_with_their_command_or_how_they_ended(monkeypatch):
    monkeypatch.setattr(child_processes, "_MAX_CHILDREN", 1000)  # other tests may have left some
    sleeper = subprocess.Popen(["sleep", "1000"])
    killed = subprocess.Popen(["sleep", "1000"])
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    try:
        killed.kill()
        found = {}
        deadline = time.monotonic() + 60
        while found.get(ended.pid) is None or found[ended.pid].status is None or found[killed.pid].status is None:
            assert time.monotonic() < deadline
            found = {child.pid: child for child in describe_children(os.getpid())}
        assert found[sleeper.pid] == ChildProcess(sleeper.pid, "sleep 1000")  # no fork: it has another command
        assert (found[killed.pid].status, found[ended.pid].status) == (-9, 3)
    finally:
        sleeper.kill()
        for child in (sleeper, killed, ended):
            child.wait()
