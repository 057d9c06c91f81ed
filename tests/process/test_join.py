"""Joining: every trap of an environment or a machine that can lead JAX astray."""

import contextlib
import os
import socket
import subprocess
import threading

import pytest
from harness_worker import IPV6, without_gloo

from jaxrun.job.environment import common_settings
from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport
from jaxrun_runtime import join

pytestmark = pytest.mark.jax_version

_INTERFACES = ["127.0.0.1", pytest.param("::1", marks=IPV6)]

# Says who it is, and what a collective over all processes gives.
_SUM = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
n = jax.device_count()
place = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
x = jax.make_array_from_callback((n,), place, lambda index: np.ones(n, "f")[index])
print(jax.process_index(), jax.process_count(), float(jax.jit(lambda a: a.sum())(x)))
"""
_RIGHT = ["0 2 4.0\n", "1 2 4.0\n"]


# ---- the joining


@pytest.mark.parametrize("interface", _INTERFACES)
def test_two_processes_join_and_prove_it(start, script, interface):
    workers = start([script(_SUM)], 2, interface=interface).run()
    assert [worker.out for worker in workers] == _RIGHT
    proofs = [worker.received(DeviceReport)[0] for worker in workers]
    assert [(p.process_index, p.process_count, p.local_devices, p.global_devices) for p in proofs] == [
        (0, 2, 2, 4),
        (1, 2, 2, 4),
    ]
    assert {(p.platform, p.device_kinds, p.nonce) for p in proofs} == {("cpu", ("cpu",), "5eed" * 8)}
    address = workers[0].received(CoordinatorReady)[0].address
    assert address.rpartition(":")[0].strip("[]") == interface


def test_nothing_of_the_joining_is_left_when_the_program_starts(start, script):
    program = "import os, threading, jax\nprint(threading.active_count(), os.environ['JAX_COORDINATOR_ADDRESS'])"
    (worker,) = start([script(program)]).run()
    assert worker.status == 0
    count, address = worker.out.split()
    assert count == "1"
    assert address.startswith("127.0.0.1:")


def test_a_coordinator_that_fails_leaves_no_thread_waiting_for_it(monkeypatch):
    def fail(*arguments, **more):
        raise RuntimeError("no coordinator")

    monkeypatch.setattr(join, "_initialize", fail)
    with pytest.raises(RuntimeError, match="no coordinator"):
        join._start_coordinator(None, None, "127.0.0.1", master_port=0)
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxrun-announce"]


def _dead_proxy():
    """The address of a proxy that accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_proxies_neither_delay_the_joining_nor_raise_a_warning(start, script):
    listener, proxy = _dead_proxy()
    names = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")
    env = {**dict.fromkeys(names, proxy), "no_proxy": "example.org"}
    proxy = {name: value for name, value in common_settings(env, cores=2, workers=2).items() if "proxy" in name}
    with listener:
        workers = start([script(_SUM)], 2, env=env | proxy).run()
    assert [worker.out for worker in workers] == _RIGHT
    assert [worker.err for worker in workers] == ["", ""]


_SLURM_STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "3",
}
_OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_VERSION": "5.0.3",
}


@pytest.mark.parametrize("stale", [_SLURM_STEP, _SLURM_STEP | _OPEN_MPI], ids=["slurm", "both"])
def test_what_another_job_left_in_the_environment_is_not_looked_at(start, script, stale):
    workers = start([script("import jax; jax.distributed.initialize()\n" + _SUM)], 2, env=stale).run()
    assert [worker.out for worker in workers] == _RIGHT, [worker.err for worker in workers]


# ---- the host's own name

_LISTENS = (
    _SUM
    + """
import os, socket
paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
inodes = {os.readlink(path) for path in paths if os.path.lexists(path)}
rows = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
for number in sorted({one.split(":")[0] for one in mine}):
    print(socket.inet_ntoa(bytes.fromhex(number)[::-1]))
print(socket.gethostname())
"""
)


@pytest.mark.parametrize("resolves_to", [None, "127.0.1.1"])
def test_the_hosts_own_name_does_not_matter(start, script, tmp_path, resolves_to):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{resolves_to or '#'} lonely-host\n")
    lines = f'mount --bind {hosts} /etc/hosts && hostname lonely-host && exec "$@"'
    wrap = [
        "unshare",
        *([] if os.getuid() == 0 else ["--map-root-user"]),
        "--mount",
        "--uts",
        "sh",
        "-c",
        lines,
        "sh",
    ]
    if subprocess.run([*wrap, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    workers = start([script(_LISTENS)], 2, fork=False, wrap=wrap).run()
    for worker, sum_line in zip(workers, _RIGHT, strict=True):
        assert worker.out == f"{sum_line}127.0.0.1\nlonely-host\n", worker.err


def test_a_coordinator_that_cannot_listen_ends_the_worker_with_a_failure_report(start, script):
    harness = start([script("")], 2, interface="203.0.113.7")  # not an address of this machine
    with contextlib.suppress(AssertionError):
        harness.run()
    failure = harness.workers[0].failure()
    assert (failure.stage, failure.error) == ("join", "OSError")
    assert "Cannot assign requested address" in failure.message


def test_gloos_messages_are_removed_from_a_members_output_even_in_pieces():
    whole = "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
    torn = (
        "[Gloo] Rank [Gloo] Rank 11 is connected to  is connected to 3\n",
        "3 peer ranks. Expected number of connected peer ranks is : 3\n",
        "3\n",
        "\n",
    )
    assert without_gloo("3\n" + whole + "".join(torn) + "1 2 4.0\n3\n") == "3\n1 2 4.0\n3\n"
