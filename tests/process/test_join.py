"""Joining: the coordinator's port, every trap that can lead JAX astray, and programs that join by themselves."""

import contextlib
import errno
import inspect
import os
import socket
import struct
import subprocess
import threading

import jax
import pytest
from harness_worker import IPV6, RANK_THREADS

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport, StartCoordinator
from jaxrun.spec.job.worker_variables import common_variables
from jaxrun_runtime import jax_private, join
from jaxrun_runtime.coordinator_tls import RankKey
from jaxrun_runtime.join import PortReservation

pytestmark = pytest.mark.jax_version

_IP_LOCAL_PORT_RANGE = 51  # since Linux 6.3
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
_WHAT_IS_LEFT = """
import os, threading
print(*(thread.name for thread in threading.enumerate()), os.environ["JAX_COORDINATOR_ADDRESS"])
"""


# ---- the joining


@pytest.mark.extended
@pytest.mark.parametrize("interface", _INTERFACES)
def test_two_processes_join_and_prove_it(start, script, interface):
    workers = start([script(_SUM + _WHAT_IS_LEFT)], 2, interface=interface).run()
    assert [worker.out.splitlines(keepends=True)[0] for worker in workers] == _RIGHT
    proofs = [worker.received(DeviceReport)[0] for worker in workers]
    assert [(p.process_index, p.process_count, p.local_devices, p.global_devices) for p in proofs] == [
        (0, 2, 2, 4),
        (1, 2, 2, 4),
    ]
    assert {(p.platform, p.device_kinds, p.nonce) for p in proofs} == {("cpu", ("cpu",), "5eed" * 8 + "-1")}
    address = workers[0].received(CoordinatorReady)[0].address
    assert address.rpartition(":")[0].strip("[]") == interface
    for rank, worker in enumerate(workers):  # nothing of the joining; rank 0 waits for notices of preemption
        *threads, shown = worker.out.splitlines()[1].split()
        of_rank = [name for name in threads if rank or name != "jaxrun-preemption"]
        assert (of_rank, shown) == (RANK_THREADS, address)


def test_a_coordinator_that_fails_leaves_no_thread_waiting_for_it(monkeypatch):
    import jax

    def fail(*arguments, **more):
        raise RuntimeError("no coordinator")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    monkeypatch.setattr(jax_private, "set_gloo_address", lambda address: None)
    monkeypatch.setattr(jax_private, "silence_proxy_warning", lambda: None)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "")  # which it sets
    env = WorkerEnv("ab" * 16, 0, 2, 0, 2, host="h1", channel_fd=3, stacks_fd=4, flight_fd=5, init_timeout=60.0)
    with pytest.raises(RuntimeError, match="no coordinator"):
        join.join(env, None, StartCoordinator("127.0.0.1"), RankKey())
    assert not [thread for thread in threading.enumerate() if thread.name == "jaxrun-announce"]


def _dead_proxy():
    """The address of a proxy that accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


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


@pytest.mark.extended
def test_proxies_and_variables_of_another_job_neither_delay_the_joining_nor_raise_a_warning(start, script):
    listener, proxy = _dead_proxy()
    names = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")
    env = {**dict.fromkeys(names, proxy), "no_proxy": "example.org"}
    proxies = {name: value for name, value in common_variables(env, cores=2, workers=2).items() if "proxy" in name}
    program = "import jax; jax.distributed.initialize()\n" + _SUM
    with listener:
        workers = start([script(program)], 2, env=_SLURM_STEP | _OPEN_MPI | env | proxies).run()
    assert [(worker.out, worker.err) for worker in workers] == [(line, "") for line in _RIGHT]


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


@pytest.mark.extended
@pytest.mark.parametrize("resolves_to", [None, "127.0.1.1"])
def test_the_hosts_own_name_does_not_matter(start, script, tmp_path, resolves_to):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{resolves_to or '#'} lonely-host\n")
    lines = f'mount --bind {hosts} /etc/hosts && hostname lonely-host && exec "$@"'
    wrap = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), "--mount", "--uts", "sh", "-c", lines, "sh"]
    if subprocess.run([*wrap, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    workers = start([script(_LISTENS)], 2, fork=False, wrap=wrap).run()
    for worker, sum_line in zip(workers, _RIGHT, strict=True):
        assert worker.out == f"{sum_line}127.0.0.1\nlonely-host\n", worker.err


@pytest.mark.extended
def test_a_coordinator_that_cannot_listen_ends_the_worker_with_a_failure_report(start, script):
    harness = start([script("")], 2, interface="203.0.113.7")  # not an address of this machine
    with contextlib.suppress(AssertionError):
        harness.run()
    failure = harness.workers[0].failure()
    assert (failure.stage, failure.error) == ("join", "OSError")
    assert "Cannot assign requested address" in failure.message


# ---- the reservation of the coordinator's port


@pytest.fixture
def reserved():
    port = PortReservation("127.0.0.1")
    yield port
    port.release()


def _number(port):
    return int(port.address.rpartition(":")[2])


@pytest.mark.parametrize(
    ("interface", "shape"), [("127.0.0.1", "127.0.0.1:{}"), pytest.param("::1", "[::1]:{}", marks=IPV6)]
)
def test_the_address_is_written_as_grpc_reads_it(interface, shape):
    port = PortReservation(interface)
    assert port.address == shape.format(_number(port))
    port.release()


@pytest.mark.parametrize("interface", ["127.0.0.1", "0.0.0.0"])
def test_nobody_else_can_bind_a_reserved_port_unasked(reserved, interface):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError) as caught:
            other.bind((interface, _number(reserved)))
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("shared", [False, True])
def test_a_reserved_port_is_never_handed_out(reserved, shared):
    number = _number(reserved)
    with socket.socket() as other:
        if shared:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            other.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("I", number << 16 | number))
        except OSError:
            pytest.skip("this kernel cannot narrow the range of ports for one socket")
        with pytest.raises(OSError) as caught:
            other.bind(("127.0.0.1", 0))
    assert caught.value.errno == errno.EADDRINUSE


def test_two_reservations_differ(reserved):
    others = [PortReservation("127.0.0.1") for _ in range(50)]
    assert len({port.address for port in [reserved, *others]}) == 51
    for port in others:
        port.release()


def test_it_connects_only_when_somebody_listens(reserved):
    assert not reserved.accepts_connections()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", _number(reserved)))
        assert not reserved.accepts_connections()
        listener.listen()
        assert reserved.accepts_connections()
    reserved.release()
    assert not reserved.accepts_connections()


# ---- programs that call jax.distributed.initialize by themselves

_INITIALIZE = {
    "bare": ("jax.distributed.initialize()", ""),
    "right": ("jax.distributed.initialize('h:1', jr.size, jr.rank)", ""),
    "by-name": ("jax.distributed.initialize(process_id=jr.rank, num_processes=jr.size)", ""),
    "from-import": ("from jax.distributed import initialize; initialize(local_device_ids=[0])", ""),
    "private": ("from jax._src.distributed import initialize; initialize()", ""),
    "ask": ("assert jax.distributed.is_initialized(); jax.distributed.initialize()", ""),
    "wrong-size": ("jax.distributed.initialize(num_processes=99)", "initialize(num_processes=99)"),
    "wrong-both": ("jax.distributed.initialize('h:1', 99, 98)", "initialize(num_processes=99, process_id=98)"),
    "unknown": ("jax.distributed.initialize(no_such_argument=1)", None),
    "certificate": ("if jax.__version_info__ >= (0, 12): jax.distributed.initialize(mtls_key_file='k')", None),
    "debug": ("import logging; logging.basicConfig(level='DEBUG'); jax.distributed.initialize()", None),
}


@pytest.fixture(scope="module")
def initialized(run_cases):
    tail = "\nprint(jax.process_index() == jr.rank, jax.process_count())"
    return run_cases({n: f"import jax, jaxrun_runtime as jr\n{call}{tail}" for n, (call, _) in _INITIALIZE.items()})


@pytest.mark.parametrize(
    ("name", "said"), [(name, said) for name, (_, said) in _INITIALIZE.items() if said is not None]
)
def test_initialize_in_the_program_does_nothing_and_warns_about_contradicting_arguments(initialized, name, said):
    worker = initialized[name]
    assert (worker.status, worker.out) == (0, f"True {len(_INITIALIZE) + 1}\n"), worker.err
    assert said in worker.err and len(worker.err.splitlines()) == bool(said)


def test_an_argument_that_jax_does_not_know_is_the_error_that_it_always_is(initialized):
    failure = initialized["unknown"].failure()
    assert failure.error == "TypeError"
    assert "no_such_argument" in failure.message


def test_certificates_that_come_too_late_are_reported(initialized):
    has_tls = "mtls_key_file" in inspect.signature(jax.distributed.initialize).parameters
    told = "initialize(mtls_key_file=k) has no effect: jaxrun has already joined"
    assert (told in initialized["certificate"].err) == has_tls


def test_debug_logging_reports_that_jaxrun_has_joined(initialized):
    assert "DEBUG:jaxrun:jax.distributed.initialize: jaxrun has joined" in initialized["debug"].err
