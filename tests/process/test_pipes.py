"""Output pipes that are drained into spools and screens, with their threads."""

import fcntl
import os
import signal

import pytest

from jaxrun.node.agent.pipes import Pipe, drain, drain_ready
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.records.output.output import Output


@pytest.fixture
def worker():
    read, write = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, 2**20)
    os.set_blocking(read, False)
    yield Pipe(read, 0, "out"), write
    os.close(read)


@pytest.fixture
def output():
    with open(os.devnull, "wb") as null:
        output = Output(1, log_dir=None, stdout_fd=null.fileno(), stderr_fd=null.fileno())
        yield output
        assert output.close(10)


def never(_):
    raise AssertionError("rested")


def test_drain_reads_up_to_its_limit_and_reports_the_end(worker, output):
    pipe, write = worker
    assert drain(pipe, output) == 0
    os.write(write, b"x" * 2**20)
    assert drain(pipe, output, limit=2**19) == 2**19
    assert drain(pipe, output) == 2**19
    os.close(write)
    assert drain(pipe, output) is None


def test_little_is_followed_by_a_rest_and_much_or_an_end_is_not(worker, output):
    pipe, write = worker
    rests = []
    os.write(write, b"line\n")
    assert drain_ready([pipe], output, rest=rests.append) == []
    assert len(rests) == 1
    assert drain_ready([pipe], output, rest=never) == []
    os.write(write, (b"x" * 99 + b"\n") * 8000)
    assert drain_ready([pipe], output, rest=never) == []
    os.close(write)
    assert drain_ready([pipe], output, rest=never) == [pipe]


# A stuck reader and no disk: the pump must stop reading the worker, and go on when the reader does.
CONGESTED = """
import os, resource, sys, threading
from pathlib import Path
from jaxrun.node.agent.pipes import Pipe, drain
from jaxrun.records.output.output import Output
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
out_read, out = os.pipe()
read, write = os.pipe()
os.set_blocking(read, False)
output = Output(1, log_dir=None, stdout_fd=out)
line = b"x" * 99 + b"\\n"
total = 20_000_000
def work():
    for _ in range(total // 10_000):
        os.write(write, line * 100)
    os.close(write)
threading.Thread(target=work).start()
pipe, count = Pipe(read, 0, "out"), 0
while not output.congested:
    count += drain(pipe, output)
assert drain(pipe, output) == 0 and output.flush_due() is not None
assert 8_000_000 < count < 16_000_000, count
received = []
def receive():
    while data := os.read(out_read, 2**20):
        received.append(data)
receiver = threading.Thread(target=receive)
receiver.start()
while drain(pipe, output) is not None:
    pass
assert output.close(30)
os.close(out)
receiver.join()
assert b"".join(received) == (b"[0] " + line) * (total // 100)
"""


def test_back_pressure_only_without_disk_and_nothing_is_lost(run_python):
    run_python(CONGESTED)


@pytest.fixture
def sigchld_ignored():
    """SIGCHLD is ignored until the test ends."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("sigchld_ignored")
def test_sigchld_is_taken_even_if_it_was_ignored():
    # Whoever ignores it cannot wait for its children: they vanish without a status.
    with SignalPipe((signal.SIGCHLD,)) as pipe:
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert pipe.receive() == [signal.SIGCHLD]
