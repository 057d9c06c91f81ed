"""Collects what there is on this host, without jax: a missing file or a failing command leaves its fact out."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from jaxrun import __version__
from jaxrun.node.agent.oom import memory_limit, own_memory_cgroup
from jaxrun.node.channel.host_addresses import list_addresses
from jaxrun.protocol.probe_messages import GpuFacts, HostFacts
from jaxrun.spec.job.nvml import NO_DRIVER, GpuUsage, NvmlReading, ask_nvml, has_driver

_PACKAGES = ("jax", "jaxlib", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
_SHARED_MEMORY = "/dev/shm"
_TRIAL_BYTES = 2**20  # written to each disk, and deleted: statfs knows nothing of quotas
_NVML_TIMEOUT_S = 5.0


def collect_facts(rank: int, environ: Mapping[str, str], *, sees_run_dir: bool = True, port: int = 0) -> HostFacts:
    """Return what there is on this host; takes less than a tenth of a second, but for slow drivers and disks."""
    disks, disk_errors = _try_disks(environ)
    gpus = ask_nvml(_NVML_TIMEOUT_S) if has_driver() else NvmlReading()
    limits = {name: resource.getrlimit(number)[0] for name, number in _LIMITS.items()}
    return HostFacts(
        rank=rank,
        time=time.time(),
        host=os.uname().nodename,
        port=port,
        versions=dict(_versions()),
        python=sys.executable,
        name_addresses=_name_addresses(),
        addresses={address.ip: address.interface for address in list_addresses()},
        proxies=_proxies(environ),
        limits=limits | {"nofile hard": resource.getrlimit(resource.RLIMIT_NOFILE)[1]},
        memory=_memory(),
        shared_memory=_space(_SHARED_MEMORY)[0],
        disks=disks,
        disk_errors=disk_errors,
        cores=len(os.sched_getaffinity(0)),
        all_cores=os.cpu_count() or 0,
        gpus=tuple(_gpu(card.name, gpus.usage[card.uuid]) for card in gpus.cards),
        nvidia_driver=gpus.driver,
        nvidia_trouble="" if gpus.trouble == NO_DRIVER else gpus.trouble,
        rdma=any(Path("/sys/class/infiniband").glob("*")),
        sees_run_dir=sees_run_dir,
    )


def _gpu(name: str, usage: GpuUsage) -> GpuFacts:
    return GpuFacts(name, usage.used_bytes, usage.all_bytes)


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield "jaxrun", __version__
    for name in (*_PACKAGES, *_PLUGINS):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in _PACKAGES:
                yield name, "missing"


def _name_addresses() -> tuple[str, ...]:
    """To which the host's name leads, as Gloo, MPI and others look it up."""
    try:
        found = socket.getaddrinfo(os.uname().nodename, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _proxies(environ: Mapping[str, str]) -> dict[str, str]:
    named = {name: environ.get(name) or environ.get(name.upper()) for name in _PROXY_VARIABLES}
    return {name: value.rpartition("@")[2] for name, value in named.items() if value}  # without a password


def _memory() -> dict[str, int]:
    import psutil

    found = psutil.virtual_memory()
    limit = memory_limit(own_memory_cgroup())
    return {"total": found.total, "available": found.available, "limit": -1 if limit is None else limit}


def _space(directory: str) -> tuple[int, int]:
    """All bytes of the disk, and the free ones; 0 where the directory is not there."""
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
    """Why nothing can be written there; empty if something can."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""
