"""A worker as its agent sees it."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
from harness import wait_until, wait_until_dead

from jaxrun.errors import ProtocolError
from jaxrun.node.agent.spawn import WorkerPipes
from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.protocol.codec import encode
from jaxrun.protocol.worker_messages import Done, Exit


@pytest.fixture
def worker():
    """(the child, the worker's end of its channel)."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    pipes = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    child = WorkerProcess(2, WorkerPipes(ours, *pipes, os.memfd_create("stacks"), os.memfd_create("flight")))
    yield child, theirs
    child.pipes.close()
    theirs.close()


@pytest.fixture
def process(worker):
    """The child with a real process: a shell that leads a session, and a sleeper of its own."""
    child, _ = worker
    script = "trap 'exit 7' USR1; sleep 60 & echo $!; wait"
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
    child.pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], os.environ, file_actions=actions, setsid=True)
    os.close(write)
    sleeper = int(os.read(read, 100))
    yield child, sleeper
    child.signal(signal.SIGKILL)
    if child.status is None:
        os.waitpid(child.pid, 0)
        child.status = -9
    os.close(read)


def test_messages_are_received_before_the_end_of_the_channel(worker):
    child, theirs = worker
    child.send(Exit())
    assert child.receive() == []
    theirs.sendall(encode(Done(2, 1.0)))
    theirs.close()  # with an unread message of ours
    assert child.receive() == [Done(2, 1.0)]
    assert child.receive() is None


def test_garbage_is_refused_and_nothing_is_read_after_it(worker):
    child, theirs = worker
    theirs.sendall(b"\0\0\0\2{]" + encode(Done(2, 1.0)))
    with pytest.raises(ProtocolError, match="not of version"):
        child.receive()
    child.pipes.channel.close()
    assert child.receive() is None
    assert theirs.recv(1) == b""


def test_sending_to_a_worker_that_has_gone_is_nothing(worker):
    child, theirs = worker
    theirs.close()
    child.send(Exit())
    child.send(Exit())
    child.pipes.channel.close()
    child.send(Exit())


def test_without_a_process_there_is_nothing_to_signal_or_to_measure(worker):
    child, _ = worker
    child.signal(signal.SIGKILL)
    assert not child.killed and not child.live
    child.pid = 2**22 + 1  # no process can have it
    assert child.cpu_seconds() == 0.0 and child.kernel_wait() == ""
    child.signal(signal.SIGKILL)


def test_sigkill_reaches_what_the_worker_has_started(process):
    child, sleeper = process
    child.signal(signal.SIGKILL)
    assert child.killed
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -9
    child.status = -9
    wait_until_dead(sleeper)


def test_any_other_signal_is_for_the_worker_alone(process):
    child, sleeper = process
    child.signal(signal.SIGUSR1)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 7
    os.kill(sleeper, signal.SIGKILL)  # it lives, or this raises
    child.status = 7
    assert not child.killed


@pytest.mark.parametrize(("kind", "options", "seen"), [("pause", os.WSTOPPED, signal.SIGSTOP), ("kill", os.WEXITED, 9)])
def test_a_fault_is_a_signal_for_the_worker_alone(process, kind, options, seen):
    child, sleeper = process
    assert child.inject_fault(kind) == ""
    assert os.waitid(os.P_PID, child.pid, options | os.WNOWAIT).si_status == seen
    assert child.killed == (kind == "kill")
    os.kill(sleeper, signal.SIGKILL)  # it lives, or this raises
    child.status = 0
    assert child.inject_fault(kind) == "it has no process"
    child.status = None


def test_a_worker_that_was_reaped_is_left_alone(worker):
    child, _ = worker
    child.pid, child.status = os.getpid(), 0  # its number may be another's by now
    child.signal(signal.SIGKILL)
    assert not child.live


def test_stacks_are_read_once(worker):
    child, _ = worker
    os.write(child.pipes.stacks, b"first\n")
    assert child.read_new_stacks() == "first\n"
    os.write(child.pipes.stacks, b"second \xff\n")
    assert child.read_new_stacks() == "second \ufffd\n"
    assert child.read_new_stacks() == ""


def test_cpu_time_and_what_it_waits_in_are_the_kernels(worker):
    child, _ = worker
    child.pid = os.getpid()
    used = child.cpu_seconds()
    waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used >= time.process_time() + waited_for.ru_utime + waited_for.ru_stime - 0.1
    assert isinstance(child.kernel_wait(), str)


def test_cpu_time_of_a_ranks_children_counts(worker):
    child, _ = worker
    starts = "t = threading.Thread(target=subprocess.run, args=[[sys.executable, '-c', 'while True: pass']])"
    program = f"import subprocess, sys, threading; {starts}; t.start(); t.join()"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        child.pid = process.pid
        wait_until(lambda: child.cpu_seconds() >= 0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert child.cpu_seconds() == 0.0


@pytest.mark.parametrize(
    ("script", "is_at_work"),
    [("while :; do :; done", True), ("exec sleep 60", True), ("read line", False), ("sleep 60; :", False)],
)
def test_a_main_thread_that_runs_or_sleeps_reads_no_input(worker, script, is_at_work):
    """The last one waits for a child, which might read."""
    child, _ = worker
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True) as shell:
        child.pid = shell.pid
        wait_until(lambda: child.kernel_wait() if script.startswith(("exec", "read", "sleep")) else child.is_at_work)
        try:
            wait_until(lambda: child.is_at_work == is_at_work)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
