"""A rank's stacks, as it writes them when its agent asks, and as Python's fault handler does."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
from harness import started, wait_until
from harness_worker import environment

from jaxrun.analysis.diagnosis.stacks import main_stack, parse_dump
from jaxrun.protocol.env import FAULT_HANDLER_SIGNAL, STACKS_SIGNAL

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


@pytest.mark.jax_version  # as each has a Python of its own
def test_stacks_do_not_crash_a_rank_that_calls_functions(dumps):
    """To its fault handler, one signal in 10 does with Python 3.12.1, in 300 with 3.13.0, in 1,000 with 3.11.7."""
    with dumps(CALLS) as ask:
        for _ in range(2000):
            stack = main_stack(ask(STACKS_SIGNAL))
            assert stack.current and stack.frames[-1].function == "<module>" and len(stack.frames) <= 3


def test_they_are_those_of_the_fault_handler(dumps):
    with dumps(WAITS) as ask:

        def agree():  # once both threads wait
            ours, theirs = parse_dump(ask(STACKS_SIGNAL)), parse_dump(ask(FAULT_HANDLER_SIGNAL))
            theirs = [stack for stack in theirs if "_serve" not in str(stack)]
            return [(s.frames, s.current) for s in theirs] == [(s.frames, s.current) for s in ours] and ours

        other, main = wait_until(agree)
        assert (len(main.frames), main.current, other.current) == (100, True, False)
        assert [frame.function for frame in other.frames].count("dive") == 3


def test_code_that_holds_the_gil_is_shown_by_the_fault_handler(tmp_path):
    (tmp_path / "held.py").write_text(HOLDS_THE_GIL)
    command = [sys.executable, "-m", "jaxrun", "stacks", "run"]

    def shown():
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    with started(tmp_path, "-n", "1", "held.py") as job:
        job.wait_for_output("holds it")
        job.wait_until(lambda: "held.py:7 hold" in shown(), "stacks")
