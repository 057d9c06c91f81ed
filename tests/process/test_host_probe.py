"""What an agent measures and tells before a job that asks for it: real sockets, files and limits."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress

import pytest
from harness import TIME_LIMIT

from jaxrun.node.probe.facts import collect_facts, try_to_write
from jaxrun.node.probe.peer_client import measure_peers
from jaxrun.node.probe.peer_server import ANSWER, PING, PeerServer
from jaxrun.protocol.probe_messages import MeasurePeers


@contextmanager
def serving():
    server = PeerServer()
    try:
        yield server
    finally:
        server.close()


def order(*servers, **unreachable):
    ports = {rank: server.port for rank, server in enumerate(servers)} | {int(r[1:]): p for r, p in unreachable.items()}
    return MeasurePeers(
        addresses={rank: f"127.0.0.1:{port}" for rank, port in ports.items()},
        cookies={rank: server.cookie for rank, server in enumerate(servers)} | {int(r[1:]): "" for r in unreachable},
        hosts={0: "localhost", 1: "no-such-host.invalid"},
    )


def test_the_way_to_each_peer_is_measured_and_closed_ones_are_told():
    with ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(3)]
        closed = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed_port = closed.getsockname()[1]
        closed.close()
        found = measure_peers(1, order(*servers, r3=closed_port))
    assert found.errors == {3: "Connection refused"}
    assert found.round_trip.keys() == found.bytes_per_s.keys() == {0, 2}
    assert all(0 < trip < TIME_LIMIT for trip in found.round_trip.values())
    assert all(speed > 1000 for speed in found.bytes_per_s.values())
    assert found.unknown_names == ("no-such-host.invalid",)


def test_a_peer_that_hangs_up_or_listens_to_something_else_is_told():
    with serving() as own, serving() as other:
        asked = order(own, other)
        wrong = MeasurePeers(asked.addresses, {0: own.cookie, 1: "0" * len(other.cookie)}, {})
        assert measure_peers(0, wrong).errors.keys() == {1}


def test_who_does_not_know_the_cookie_is_not_answered():
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), timeout=TIME_LIMIT) as stranger:
        stranger.sendall(b"x" * len(server.cookie) + PING)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_cookie_in_pieces_and_commands_in_one_are_understood():
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), timeout=TIME_LIMIT) as peer:
        peer.sendall(server.cookie[:3].encode())
        peer.sendall(server.cookie[3:].encode() + PING + PING)
        assert peer.recv(1) + peer.recv(1) == ANSWER * 2
        peer.sendall(b"?")
        assert peer.recv(1) == b""


def test_the_server_leaves_neither_a_thread_nor_a_descriptor():
    before = os.listdir("/proc/self/fd"), len(os.listdir("/proc/self/task"))
    with serving() as server:
        socket.create_connection(("127.0.0.1", server.port)).close()
    server.close()
    assert (os.listdir("/proc/self/fd"), len(os.listdir("/proc/self/task"))) == before


def test_the_facts_are_those_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {"TMPDIR": "/proc/self", "HTTP_PROXY": "http://me:secret@proxy:3128", "PATH": os.environ["PATH"]}
    facts = collect_facts(3, environ, sees_run_dir=False)
    assert (facts.rank, facts.host, facts.sees_run_dir) == (3, os.uname().nodename, False)
    assert facts.versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts.versions["jax"] != "missing" and "lo 127.0.0.1" in facts.interfaces
    assert facts.proxies == {"http_proxy": "proxy:3128"}
    assert facts.cores == len(os.sched_getaffinity(0)) and facts.memory["total"] > facts.memory["available"] > 0
    assert facts.disks[str(tmp_path)] > 0 and set(facts.disk_errors) == {"/proc/self"}
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_is_full_cannot_be_written_to(tmp_path):
    script = f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec {sys.executable} -c "$CODE"'
    code = f"from jaxrun.node.probe.facts import try_to_write; print(try_to_write({str(tmp_path)!r}))"
    env = {**os.environ, "CODE": code, "PYTHONPATH": os.pathsep.join(sys.path)}
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    done = subprocess.run(unshare, env=env, capture_output=True, text=True, timeout=TIME_LIMIT)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("this machine forbids namespaces")
    assert done.stdout == "No space left on device\n", done.stderr
    assert try_to_write(str(tmp_path)) == ""
