"""Fault injection: into one process that has connections of all kinds, into a job, and by the control line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import MISBEHAVE, extended, jaxrun, started

from jaxrun.node.agent import faults
from jaxrun.node.agent.spawn import WorkerPipes
from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.protocol.names import CONTROL_FD

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


# ---- a job


def seconds_after(words: str, text: str) -> float:
    """The number that follows `words` in a text: on a busy machine a fault comes later than asked, never sooner."""
    return float(text.split(words, 1)[1].split()[0])


def test_a_killed_rank_ends_the_job_as_if_it_had_died_by_itself(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--chaos", "kill:1@300ms", MISBEHAVE)
    assert result.code == 137, result
    assert result.err.splitlines()[0].endswith(" · --chaos kill:1@0.3s")
    headline = str(result.verdict()["headline"])
    assert headline.startswith("rank 1 of 2 was killed by SIGKILL (9), as --chaos asked, ")
    assert seconds_after("as --chaos asked, ", headline) >= 0.3
    assert result.verdict()["culprits"] == [1]
    (note,) = result.events("chaos")
    assert (note["fault"], note["ranks"]) == ("kill", [1])
    assert json.loads((result.run_dir / "job.json").read_text())["chaos"] == ["kill:1@0.3s"]


@pytest.mark.parametrize(
    "flags", [("--pause", "0"), extended(("--hang", "--rank", "-1"))], ids=["in a call", "outside"]
)
def test_a_rank_that_is_cut_off_is_the_cause_of_what_breaks(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--chaos", "cut:0@300ms", MISBEHAVE, *flags)
    assert result.code in (1, 134), result
    assert str(result.verdict()["headline"]).startswith("rank 0 of 3 was cut off from the network, as --chaos asked, ")
    assert result.verdict()["culprits"] == [0]


def test_a_paused_rank_holds_the_others_up_and_is_named(tmp_path: Path) -> None:
    result = jaxrun(tmp_path, "-n", "2", "--chaos", "pause:1@300ms", "--stall-timeout", "3", MISBEHAVE)
    assert result.code == 124, result
    assert "rank 1 was stopped by SIGSTOP (19), as --chaos asked, " in result.err
    assert "rank 1 is stopped by a signal, and rank 0 waits for it" in result.err


INTERRUPTED = """
import os, time
descriptors = os.listdir("/proc/self/fd")
links = [os.readlink(f"/proc/self/fd/{{name}}") for name in descriptors if os.path.islink(f"/proc/self/fd/{{name}}")]
try:
    print("ready", {name!r} in os.environ, {link!r} in links, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
time.sleep(600)
"""


def test_the_control_line_interrupts_breaks_and_ends(tmp_path: Path, script) -> None:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    program = script(INTERRUPTED.format(name=CONTROL_FD, link=os.readlink(f"/proc/self/fd/{number}")))
    environ = {CONTROL_FD: str(number)}
    with ours, theirs, started(tmp_path, "-n", "2", str(program), env=environ, pass_fds=[number]) as job:
        job.wait_for_output("ready False False", 2)
        ours.sendall(b'{"signal": 2}\n')
        job.wait_for_output("interrupted", 2)
        ours.sendall(b'{"fault": "pause", "ranks": [1]}\n{"fault": "kill", "ranks": []}\nwhat?\n')
        ours.close()
        result = job.result()
        assert job.processes() == []
    assert result.code == 129, result
    assert "rank 1 was stopped by SIGSTOP (19), as its gang asked" in result.err
    assert "sent what is not understood: 'what?'" in result.err
    assert result.err.count("process that started it") == 1
