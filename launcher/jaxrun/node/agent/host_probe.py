"""An agent's part in a job that asks for probes: facts about its host, and which other hosts it can connect to.

Most jobs do not ask, so this module is imported only then. Nothing here needs jax; a missing file or a failing command
leaves its fact out.
"""

from __future__ import annotations

import os
import platform
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from jaxrun.files import procfs
from jaxrun.node.agent.fabric_probe import collect_fabric_facts
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import list_addresses
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.protocol.addresses import parse_addresses
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.connect import ConnectionAttempt, describe_error
from jaxrun.protocol.names import VERSION
from jaxrun.protocol.probe_messages import GpuFacts, HostFacts, PeerResults, ProbePeers
from jaxrun.spec.job.devices import amd_cards, cuda_gpus, rocm_gpus
from jaxrun.spec.job.nvml import NO_DRIVER, NvmlReading, ask_nvml, has_driver

_PACKAGES = ("jax", "jaxlib", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
_SHARED_MEMORY = "/dev/shm"
_TRIAL_BYTES = 2**20  # written to each disk, and deleted, because statfs does not show quotas
_NVML_TIMEOUT_S = 5.0
_AT_ONCE = 64  # connection attempts
_POLL_S = 0.5
_LOOKUP_TIMEOUT_S = 2.0


def collect_facts(agent: AgentId, environ: Mapping[str, str], *, sees_run_dir: bool = True, port: int = 0) -> HostFacts:
    """Return facts about this host; takes less than a tenth of a second, except with slow drivers and disks."""
    disks, disk_errors = _try_disks(environ)
    gpus = ask_nvml(_NVML_TIMEOUT_S) if has_driver() else NvmlReading()
    limits = {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()}
    return HostFacts(
        agent=agent,
        time=time.time(),
        host=os.uname().nodename,
        port=port,
        versions=dict(_versions()),
        python=sys.executable,
        name_addresses=_name_addresses(),
        addresses=_interface_by_address(),
        proxies=_proxies(environ),
        limits=limits | {"nofile hard": resource.getrlimit(resource.RLIMIT_NOFILE)[1]},
        memory=_memory(),
        shared_memory=_space(_SHARED_MEMORY)[0],
        disks=disks,
        disk_errors=disk_errors,
        cores=len(os.sched_getaffinity(0)),
        all_cores=os.cpu_count() or 0,
        gpus=tuple(
            GpuFacts(card.name, gpus.usage[card.uuid].used_bytes, gpus.usage[card.uuid].all_bytes)
            for card in gpus.cards
        ),
        nvidia_driver=gpus.driver,
        nvidia_trouble="" if gpus.trouble == NO_DRIVER else gpus.trouble,
        fabric=collect_fabric_facts(environ, cuda_gpus(environ, gpus).ids or rocm_gpus(environ, amd_cards()).ids),
        sees_run_dir=sees_run_dir,
    )


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield "jaxrun", VERSION
    for name in (*_PACKAGES, *_PLUGINS):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in _PACKAGES:
                yield name, "missing"


def _name_addresses() -> tuple[str, ...]:
    """Return the addresses to which the host's name resolves for Gloo, MPI and others."""
    try:
        found = socket.getaddrinfo(os.uname().nodename, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _interface_by_address() -> dict[str, str]:
    return {address.ip: address.interface for address in list_addresses()}


def _proxies(environ: Mapping[str, str]) -> dict[str, str]:
    named = {name: environ.get(name) or environ.get(name.upper()) for name in _PROXY_VARIABLES}
    return {name: value.rpartition("@")[2] for name, value in named.items() if value}  # without a password


def _memory() -> dict[str, int]:
    limit = procfs.memory_limit(procfs.own_memory_cgroup())
    total, available = procfs.total_bytes() or 0, procfs.available_bytes() or 0
    return {"total": total, "available": available, "limit": -1 if limit is None else limit}


def _space(directory: str) -> tuple[int, int]:
    """Return all and the free bytes of the disk; 0 if the directory does not exist."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _try_disks(environ: Mapping[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    """Free bytes of the directories that a job writes to, and why nothing can be written to some."""
    free, errors = {}, {}
    for directory in dict.fromkeys((os.getcwd(), environ.get("TMPDIR") or "/tmp", _SHARED_MEMORY)):
        free[directory] = _space(directory)[1]
        if error := try_to_write(directory):
            errors[directory] = error
    return free, errors


def try_to_write(directory: str) -> str:
    """Return why nothing can be written there; empty if something can."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# ---- whether the other hosts can be reached


class PeerServer:
    """Listens from its creation on; from `start` to `close`, a thread accepts peers that prove to know the token."""

    def __init__(self, token: str) -> None:
        """Raises UnavailableError if this host has no port left."""
        self._listener = listen_on_tcp((), token, everywhere=True)
        self.port: int = self._listener.sockets[0].getsockname()[1]
        self._stop, self._stopped = socket.socketpair()
        self._thread: threading.Thread | None = None

    def start(self, expected: int) -> None:
        """Start answering; `expected` is how many peers may come at the same moment."""
        self._thread = threading.Thread(target=self._serve, args=(expected,), name="jaxrun-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: a process with threads must not fork."""
        self._stop.close()
        if self._thread is not None:
            self._thread.join()
        self._listener.close()
        self._stopped.close()

    def _serve(self, expected: int) -> None:
        loop, is_over = EventLoop(), threading.Event()
        acceptor = self._listener.accept(loop, 0, lambda peer: peer.connection.close(), expected=expected)
        loop.add_reader(self._stopped.fileno(), 1, is_over.set)
        loop.run_until(is_over.is_set)
        acceptor.close()
        loop.close()


def probe_peers(agent: AgentId, token: str, order: ProbePeers) -> PeerResults:
    """Connect from this agent to all others of the order, starting with the next one, so all start differently."""
    names, interfaces, errors = _interface_by_address(), dict[AgentId, str](), dict[AgentId, str]()
    waiting = sorted(order.addresses.keys() - {agent}, key=lambda peer: (peer < agent, peer), reverse=True)
    attempts: dict[AgentId, ConnectionAttempt] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or attempts:
            while waiting and len(attempts) < _AT_ONCE:
                peer = waiting.pop()
                try:
                    attempts[peer] = ConnectionAttempt(parse_addresses(order.addresses[peer])[0], token, agent)
                    selector.register(attempts[peer].connection, selectors.EVENT_READ, peer)
                except OSError as error:
                    errors[peer] = describe_error(error)
            for peer in [key.data for key, _ in selector.select(_POLL_S)]:
                if attempts[peer].advance():
                    interfaces[peer] = names.get(attempts[peer].connection.getsockname()[0], "")
            for peer, attempt in tuple(attempts.items()):
                if peer not in interfaces and not attempt.check_failure():
                    continue
                if attempt.failure:
                    errors[peer] = attempt.failure
                selector.unregister(attempt.connection)
                attempts.pop(peer).connection.close()
    return PeerResults(agent, interfaces, errors, _find_unknown(order.hosts.values()))


def _find_unknown(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts whose names do not resolve here; in a process, so that a lookup that hangs can be ended."""
    names = tuple(dict.fromkeys(hosts))
    try:
        done = subprocess.run(["getent", "hosts", *names], capture_output=True, text=True, timeout=_LOOKUP_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    known = set(done.stdout.split())
    return tuple(name for name in names if name not in known)
