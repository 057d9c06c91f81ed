"""Steps of a worker before its program: sends the Hello, joins jax.distributed, and reports the devices.

The Hello has the worker's identity, and everything that must be equal on all ranks before they may join. jaxrun passes
all arguments of jax.distributed.initialize, so that JAX detects nothing.

Rank 0 reserves a free port until its coordinator listens there; only then do the others get the address. (With JAX
alone, connecting before the coordinator listens costs seconds of back-off, a busy port is a segmentation fault, and a
port shared with another job mixes their ranks.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import inspect
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import COORDINATOR_ADDRESS, MASTER_ADDR, MASTER_PORT, PROCESS_ID
from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport, Hello, Join, StartCoordinator
from jaxrun.text import format_ranges
from jaxrun_runtime import children, jax_private, run_program
from jaxrun_runtime.agent_channel import AgentChannel, AgentDisconnected
from jaxrun_runtime.coordinator_tls import RankKey, initialize_arguments

_log = logging.getLogger("jaxrun")
_COORDINATOR_POLL_INTERVAL_S = 0.001  # while the coordinator does not listen yet
_HEARTBEAT_TIMEOUT_S = 100  # JAX's default; the agents notice a lost worker much earlier
_RELEVANT_PREFIXES = ("JAX_", "XLA_", "NCCL_", "LIBTPU_")
_RELEVANT_NAMES = ("PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DIFFERS_BY_RANK = (COORDINATOR_ADDRESS, PROCESS_ID, "JAX_LOCAL_DEVICE_IDS", "NCCL_HOSTID", "NCCL_RAS_ADDR")


def build_hello(env: WorkerEnv, argv: list[str], environ: Mapping[str, str], started: float, key: RankKey) -> Hello:
    """Return the Hello of this process. Imports jax. `started`: start of the process, in seconds since the epoch."""
    import jax
    import jaxlib.version
    import numpy

    versions = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": numpy.__version__,
    }
    return Hello(
        rank=env.rank,
        host=env.host,
        pid=os.getpid(),
        time=time.time(),
        started_at=started,
        versions=versions,
        program_hash=hash_program(argv),
        environment=relevant_variables(environ),
        public_key=key.public,
        refusal=jax_private.why_no_survivors() if env.keep_survivors else "",
    )


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what JAX computes, sees or sends, and that must be equal on all ranks."""
    named = {k: v for k, v in environ.items() if k.startswith(_RELEVANT_PREFIXES) and k not in _DIFFERS_BY_RANK}
    return named | {k: environ[k] for k in _RELEVANT_NAMES if k in environ}


def hash_program(argv: list[str]) -> str:
    """Return 16 hex digits for the program's source; empty unless it is one file that is found without importing."""
    is_module, name, _ = run_program.split_argv(argv)
    path = _module_file(name) if is_module else name
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return ""


def _module_file(name: str) -> str:
    search, origin = [os.getcwd(), *sys.path], ""
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            return ""
        search, origin = list(spec.submodule_search_locations or []), spec.origin or ""
    return os.path.join(search[0], "__main__.py") if search else origin


# ---- joining


class PortReservation:
    """A free TCP port, bound but not listening: no other process gets it, but gRPC in this process can listen on it.

    gRPC binds with SO_REUSEPORT. The kernel allows this if the other socket on the port has the same user and has set
    SO_REUSEPORT, too. It never returns a bound port for a bind to port 0.
    """

    def __init__(self, interface: str) -> None:
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((interface, 0))
        port = self._socket.getsockname()[1]
        self.address = f"[{interface}]:{port}" if ":" in interface else f"{interface}:{port}"

    def accepts_connections(self) -> bool:
        """Whether something accepts connections at the port."""
        try:
            with socket.create_connection(self._socket.getsockname()[:2], timeout=1):
                return True
        except OSError:
            return False

    def release(self) -> None:
        self._socket.close()


def join(env: WorkerEnv, channel: AgentChannel, order: StartCoordinator | Join, key: RankKey) -> float:
    """Join as rank 0 (StartCoordinator) or as another rank. Returns when it has joined, in seconds since the epoch."""
    tls = initialize_arguments(key, order.certificate)
    if isinstance(order, StartCoordinator):
        jax_private.set_gloo_address(order.interface)
        master_port = _reserve_master_port(order.interface) if env.torch_env else 0
        _start_coordinator(env, channel, order.interface, master_port, **tls)
    else:
        jax_private.set_gloo_address(local_address_towards(order.address))
        master_port = order.master_port
        _initialize(env, order.address, **tls)
    if env.torch_env:
        os.environ[MASTER_ADDR] = os.environ[COORDINATOR_ADDRESS].rpartition(":")[0].strip("[]")
        os.environ[MASTER_PORT] = str(master_port)
    _accept_initialize_by_program(env)
    return time.time()


def local_address_towards(address: str) -> str:
    """Return the address of this host's interface that reaches `address` ("host:port"). Sends nothing."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def report_devices(env: WorkerEnv, joined: float) -> DeviceReport:
    """Start JAX's backend and report its devices. All processes must call this at the same time."""
    import jax

    nonce = jax_private.exchange_nonce(env.rank, env.nonce, env.init_timeout)
    local = jax.local_devices()
    return DeviceReport(
        rank=env.rank,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        local_devices=len(local),
        global_devices=jax.device_count(),
        device_kinds=tuple(sorted({device.device_kind for device in local})),
        platform=local[0].platform,
        nonce=env.nonce if nonce is None else nonce,
        joined_at=joined,
        time=time.time(),
        cores=_bound_to(),
    )


def _bound_to() -> str:
    """Return the cores of this process as ranges, "0-3,8"; empty if it may run on all cores of its host."""
    cores = os.sched_getaffinity(0)
    return format_ranges(cores, ",") if len(cores) < (os.cpu_count() or 0) else ""


def _reserve_master_port(interface: str) -> int:
    """Reserve a free port for as long as this process lives.

    The program can listen there with SO_REUSEADDR, as servers do: the kernel allows this if the other socket on the
    port has set SO_REUSEADDR, too, and does not listen.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((interface, 0))
    port: int = reserved.getsockname()[1]
    reserved.detach()
    return port


def _start_coordinator(env: WorkerEnv, channel: AgentChannel, interface: str, master_port: int, **tls: str) -> None:
    """Start the coordinator and join it; a thread sends CoordinatorReady as soon as it listens."""
    port = PortReservation(interface)
    joined = threading.Event()

    def announce() -> None:
        while not port.accepts_connections():
            if joined.wait(_COORDINATOR_POLL_INTERVAL_S):
                return
        with contextlib.suppress(AgentDisconnected):
            channel.send(CoordinatorReady(env.rank, port.address, master_port))

    announcer = threading.Thread(target=announce, name="jaxrun-announce", daemon=True)
    announcer.start()
    try:
        _initialize(env, port.address, coordinator_bind_address=port.address, **tls)
    finally:
        joined.set()  # ends the thread if the coordinator has failed, or has already closed in a job of one process
        announcer.join()
        port.release()


def _initialize(env: WorkerEnv, address: str, **more: Any) -> None:
    import jax

    os.environ[COORDINATOR_ADDRESS] = address
    jax_private.silence_proxy_warning()
    arguments = {
        "coordinator_address": address,
        "num_processes": env.size,
        "process_id": env.rank,
        "local_device_ids": list(env.local_device_ids) or None,
        "cluster_detection_method": "deactivate",
        "initialization_timeout": max(1, int(env.init_timeout)),
        "heartbeat_timeout_seconds": _HEARTBEAT_TIMEOUT_S,
        **more,
    }
    known = inspect.signature(jax.distributed.initialize).parameters
    jax.distributed.initialize(**{name: value for name, value in arguments.items() if name in known})


def _accept_initialize_by_program(env: WorkerEnv) -> None:
    """Replace jax.distributed.initialize, so that the program's own call of it does nothing."""
    import jax

    original: Callable[..., None] = jax.distributed.initialize
    owner, told_in = os.getpid(), set[int]()

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> None:
        if os.getpid() != owner:  # in a process that the program has forked
            if os.getpid() not in told_in:
                told_in.add(os.getpid())
                print(children.what_initialize_says(env.rank), file=sys.stderr)
            return
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        _log.debug("jax.distributed.initialize: jaxrun has joined rank %d of %d already", env.rank, env.size)
        if env.keep_survivors and env.rank == 0 and (seconds := given.get("heartbeat_timeout_seconds")) is not None:
            _log.warning("heartbeat_timeout_seconds=%s has no effect: jaxrun itself tells the ranks of a loss", seconds)
        ours = {"num_processes": env.size, "process_id": env.rank}
        other = [f"{name}={given[name]}" for name in ours if given.get(name) not in (None, ours[name])]
        other += [f"{name}={value}" for name, value in given.items() if name.startswith("mtls_") and value]
        if other:
            _log.warning(
                "the program's call jax.distributed.initialize(%s) has no effect: jaxrun has already joined this "
                "process as rank %d of %d",
                ", ".join(other),
                env.rank,
                env.size,
            )

    jax_private.replace_initialize(initialize)
