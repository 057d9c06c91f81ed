"""What an agent finds out and tells before a job that asks for it: real sockets, files and limits."""

import gc
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from harness import TIME_LIMIT, is_dropped, wait_until

from jaxrun.node.agent import host_probe
from jaxrun.node.agent.host_probe import PeerServer, collect_facts, probe_peers, try_to_write
from jaxrun.protocol.auth import new_token, peer_token
from jaxrun.protocol.probe_messages import ProbePeers

TOKEN = peer_token(new_token())


@contextmanager
def serving(token=TOKEN):
    server = PeerServer(token)
    server.start(8)
    try:
        yield server
    finally:
        server.close()


def order(*ports):
    addresses = {rank: f"127.0.0.1:{port}" for rank, port in enumerate(ports)}
    return ProbePeers(addresses, {0: "localhost", 1: "no-such-host.invalid"})


def test_peers_are_reached_by_an_interface_or_not_for_a_reason(monkeypatch):
    monkeypatch.setattr(host_probe, "_LOOKUP_TIMEOUT_S", 60.0)
    with ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(3)]
        stranger = stack.enter_context(serving("another token"))
        closed = stack.enter_context(socket.socket())  # nobody listens there
        closed.bind(("127.0.0.1", 0))
        ports = (*(server.port for server in servers), closed.getsockname()[1], stranger.port)
        found = probe_peers(1, TOKEN, order(*ports))
    assert found.interfaces == {0: "lo", 2: "lo"} and found.unknown_names == ("no-such-host.invalid",)
    assert found.errors == {
        3: "refuses connections",
        4: "refuses: it does not know the token of this job",
    }


def test_silent_strangers_are_dropped_and_keep_no_peer_out():
    with serving() as server, ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        strangers = [stack.enter_context(socket.create_connection(address, TIME_LIMIT)) for _ in range(300)]
        assert probe_peers(0, TOKEN, order(1, server.port)).interfaces == {1: "lo"}
        assert sum(is_dropped(stranger) for stranger in strangers) >= 200
        used = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used < 0.2  # nothing spins


def test_the_server_leaves_neither_a_thread_nor_a_descriptor():
    gc.collect()  # of tests before this one
    before = _own_files_and_threads()
    with serving() as server:
        socket.create_connection(("127.0.0.1", server.port)).close()
    PeerServer(TOKEN).close()
    # A thread that was joined is the kernel's for a moment more; those of tests before may end, too.
    wait_until(lambda: all(now <= then for now, then in zip(_own_files_and_threads(), before, strict=True)))


def _own_files_and_threads():
    return set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))


def test_the_facts_are_those_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {"TMPDIR": "/proc/self", "HTTP_PROXY": "http://me:secret@proxy:3128", "PATH": os.environ["PATH"]}
    facts = collect_facts(3, environ, sees_run_dir=False)
    assert (facts.agent, facts.host, facts.sees_run_dir) == (3, os.uname().nodename, False)
    assert facts.versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts.versions["jax"] != "missing" and facts.addresses["127.0.0.1"] == "lo"
    assert facts.proxies == {"http_proxy": "proxy:3128"}
    assert facts.cores == len(os.sched_getaffinity(0)) and facts.memory["total"] > facts.memory["available"] > 0
    assert facts.disks[str(tmp_path)] > 0 and set(facts.disk_errors) == {"/proc/self"}
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_is_full_cannot_be_written_to(tmp_path):
    script = f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec {sys.executable} -c "$CODE"'
    code = f"from jaxrun.node.agent.host_probe import try_to_write; print(try_to_write({str(tmp_path)!r}))"
    env = {**os.environ, "CODE": code, "PYTHONPATH": os.pathsep.join(sys.path)}
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    done = subprocess.run(unshare, env=env, capture_output=True, text=True, timeout=TIME_LIMIT)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("this machine forbids namespaces")
    assert done.stdout == "No space left on device\n", done.stderr
    assert try_to_write(str(tmp_path)) == ""
