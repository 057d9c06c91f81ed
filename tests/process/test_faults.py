"""Fault injection into a process that has connections of all kinds."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from jaxrun.agent import faults
from jaxrun.agent.spawn import WorkerPipes
from jaxrun.agent.worker_process import WorkerProcess

# Connects to a port over IPv4 and IPv6, listens, and has a socket pair; echoes on the last.
PROGRAM = """
import socket, sys
v4 = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
v6 = socket.create_connection(("::ffff:127.0.0.1", int(sys.argv[1])))
listener = socket.create_server(("127.0.0.1", 0))
pair = socket.socket(fileno=int(sys.argv[2]))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
pair.sendall(str(listener.getsockname()[1]).encode())
while data := pair.recv(9):
    peer = v4.recv(1)
    pair.sendall(data + peer)
"""


@pytest.fixture
def target():
    """(the child, its two connections, its socket pair, the port at which it listens)."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs:
        argv = [sys.executable, "-IS", "-c", PROGRAM, str(server.getsockname()[1]), str(theirs.fileno())]
        with subprocess.Popen(argv, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            peers = [server.accept()[0] for _ in range(2)]
            port = int(ours.recv(9))
            files = [os.memfd_create("file") for _ in range(4)]
            channel, other = socket.socketpair()
            child = WorkerProcess(1, WorkerPipes(channel, *files), process.pid)
            yield child, peers, ours, port
            process.kill()
            for held in (*peers, child, other):
                held.close()


def test_a_cut_ends_all_connections_and_nothing_else(target):
    child, peers, pair, port = target
    assert faults.inject(child, "cut") == ""
    for peer in peers:
        assert peer.recv(1) == b""
    pair.sendall(b"alive")
    assert pair.recv(9) == b"alive"  # and its own end of the connection is at its end, too
    with socket.create_connection(("127.0.0.1", port)):
        assert faults.inject(child, "cut") == ""  # the old ones again


def test_a_process_without_connections_cannot_be_cut_off():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert faults.cut_connections(process.pid) == "it has no connections"
        process.stdin.close()


@pytest.mark.parametrize(
    "error", [PermissionError(1, "Operation not permitted"), OSError(38, "Function not implemented")]
)
def test_a_refusal_of_the_kernel_is_the_reason(target, monkeypatch, error):
    child, peers, pair, _ = target

    def forbid(process, descriptor):
        raise error

    monkeypatch.setattr(faults, "_copy_descriptor", forbid)
    text = faults.inject(child, "cut")
    assert f"does not let its connections be taken ({error.strerror})" in text
    peers[0].sendall(b"!")
    pair.sendall(b"alive")
    assert pair.recv(9) == b"alive!"


@pytest.mark.parametrize(("kind", "options", "seen"), [("pause", os.WSTOPPED, signal.SIGSTOP), ("kill", os.WEXITED, 9)])
def test_a_signal_goes_to_the_worker_alone(target, kind, options, seen):
    child = target[0]
    assert faults.inject(child, kind) == ""
    assert os.waitid(os.P_PID, child.pid, options | os.WNOWAIT).si_status == seen
    assert child.killed == (kind == "kill")


@pytest.mark.parametrize("kind", ["kill", "pause", "cut"])
def test_a_fault_is_not_injected_without_a_process(target, kind):
    child = target[0]
    child.status = 0
    assert faults.inject(child, kind) == "it has no process"
    assert faults.cut_connections(2**22 + 1) == "it has no process"
