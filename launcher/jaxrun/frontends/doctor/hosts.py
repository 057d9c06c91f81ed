"""Checks of each host: limits of the operating system and the scheduler, cores, disks, GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from jaxrun.analysis.diagnosis.findings import Finding, describe_values, failure, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.text import format_bytes, plural

# A JAX process opens about a hundred, and one for each rank to which it is connected.
_FEW_FILES, _TOO_FEW_FILES = 1024, 256
_FEW_PROCESSES = 1024  # a limit per user, and threads count
_LITTLE_MEMORY = 2**30  # per process
_LITTLE_DISK = 2**30
_UNLIMITED = -1
_LIMITS_FILE = "/etc/security/limits.conf"
_SHARED_MEMORY = "/dev/shm"
_DOCKERS_SHARED_MEMORY = 2**26  # the default of a container; NCCL and data loaders need more
_FIRST_DRIVERS = {"jax-cuda12-plugin": 525, "jax-cuda13-plugin": 580}
_TAKEN = 0.05  # of a GPU's memory: more does not belong to the driver itself


def check_storage(seen: Observation) -> Iterator[Finding]:
    """Check whether the hosts share the directory, and have room on their disks."""
    found = []
    blind = [host for host, facts in seen.hosts.items() if not facts.sees_run_dir]
    if blind and seen.in_directory:
        text = f"{', '.join(blind)}: the files of a job in {os.getcwd()} are not seen there"
        advice = "start in a directory that all hosts share: logs come by network, but checkpoints do not"
        found.append(warning(text, advice))
    found += [finding for host, facts in seen.hosts.items() for finding in _check_disks(host, facts)]
    yield from found
    if seen.hosts and not found:
        least: dict[str, int] = {}
        for facts in seen.hosts.values():
            for directory, free in facts.disks.items():
                name = _purpose(directory)
                least[name] = min(free, least.get(name, free))
        room = ", ".join(f"{format_bytes(free)} in {name}" for name, free in least.items())
        shared = "all hosts see this directory; " if len(seen.hosts) > 1 and seen.in_directory else ""
        yield ok(f"{shared}free: {room}")


def check_limits(seen: Observation) -> Iterator[Finding]:
    """Open files, processes, locked memory and memory."""
    found = [finding for host, facts in seen.hosts.items() for finding in _check_limits(host, facts)]
    found += [finding for host, facts in seen.hosts.items() for finding in _check_memory(seen, host, facts)]
    yield from found
    if seen.hosts and not found:
        yield ok(describe_values({host: _describe_limits(facts) for host, facts in seen.hosts.items()}))


def check_cores(seen: Observation) -> Iterator[Finding]:
    """Check whether processes are bound to few of the available cores."""
    found = []
    for host, facts in seen.hosts.items():
        if facts.cores * len(seen.ranks_on(host)) < facts.all_cores and facts.cores <= 2:
            cores = "one core" if facts.cores == 1 else f"{facts.cores} cores"
            text = f"{host}: each process may use {cores} of {facts.all_cores}, which JAX needs to compute and to send"
            found.append(warning(text, "jaxrun --cpus-per-process N with Slurm; no --bind-to core for mpirun"))
    yield from found
    if seen.hosts and not found:
        shown = describe_values({host: f"{facts.cores} of {facts.all_cores}" for host, facts in seen.hosts.items()})
        yield ok(f"each process may use {shown} cores")


def check_devices(seen: Observation) -> Iterator[Finding]:
    """Check whether JAX uses the GPUs that NVIDIA's driver lists, and driver, CUDA and plugin are compatible."""
    found = [finding for host, facts in seen.hosts.items() for finding in _check_gpus(seen, host, facts)]
    drivers = {host: facts.nvidia_driver for host, facts in seen.hosts.items() if facts.gpus}
    if len(set(drivers.values())) > 1:
        text = f"NVIDIA's drivers differ: {describe_values(drivers)}"
        found.append(warning(text, "install the same driver on all hosts"))
    yield from found
    if seen.devices and not found:
        yield ok(describe_values({host: _describe_devices(seen, host, facts) for host, facts in seen.hosts.items()}))


def _check_disks(host: str, facts: HostFacts) -> Iterator[Finding]:
    for directory, error in facts.disk_errors.items():
        how = "TMPDIR=DIR chooses another" if directory != os.getcwd() else "start elsewhere, or make room"
        yield failure(f"{host}: nothing can be written to {directory}: {error}", f"df -h {directory} there; {how}")
    for directory, free in facts.disks.items():
        if free < _LITTLE_DISK and directory not in (*facts.disk_errors, _SHARED_MEMORY):
            yield warning(f"{host}: only {format_bytes(free)} are free in {directory}", f"df -h {directory} there")
    if facts.shared_memory <= _DOCKERS_SHARED_MEMORY:
        text = f"{host}: /dev/shm has {format_bytes(facts.shared_memory)}, too little for NCCL and data loaders"
        yield warning(text, "docker run --shm-size=1g, or --ipc=host")


def _purpose(directory: str) -> str:
    """Name a directory's purpose in the job, because each host may have its own directory."""
    if directory == os.getcwd():
        return "this directory"
    return directory if directory in ("/tmp", _SHARED_MEMORY) else "TMPDIR"


def _check_limits(host: str, facts: HostFacts) -> Iterator[Finding]:
    files, processes, locked = (facts.limits.get(name, _UNLIMITED) for name in ("nofile", "nproc", "memlock"))
    if _UNLIMITED < files < _FEW_FILES:
        level = failure if files < _TOO_FEW_FILES else warning
        hard = facts.limits.get("nofile hard", _UNLIMITED)
        how = f"nofile in {_LIMITS_FILE} there (ulimit -Hn)"
        if hard == _UNLIMITED or hard > files:
            how = f"ulimit -n {hard if _UNLIMITED < hard < 65536 else 65536} there, before jaxrun; or {how}"
        yield level(f"{host}: a process may open {files} files", how)
    if _UNLIMITED < processes < _FEW_PROCESSES:
        text = f"{host}: the user may have {processes} processes and threads; each JAX process takes dozens"
        yield warning(text, f"nproc in {_LIMITS_FILE} there (ulimit -u)")
    if facts.fabric.nics and locked != _UNLIMITED:
        text = f"{host}: a process may lock {format_bytes(locked)} of memory, but RDMA needs no limit"
        yield warning(text, f"memlock in {_LIMITS_FILE} there (ulimit -l), or in the unit of Slurm's daemon")


def _check_memory(seen: Observation, host: str, facts: HostFacts) -> Iterator[Finding]:
    ranks = len(seen.ranks_on(host))
    available, limit = facts.memory.get("available", 0), facts.memory.get("limit", _UNLIMITED)
    room = available if limit == _UNLIMITED else min(available, limit)
    if room < _LITTLE_MEMORY * ranks:
        of = f" (the limit of its cgroup is {format_bytes(limit)})" if limit == room else ""
        text = f"{host}: {format_bytes(room)} of memory for {plural(ranks, 'process')}{of}"
        yield warning(text, "sbatch --mem=0 or a larger container; fewer processes on each host")


def _describe_limits(facts: HostFacts) -> str:
    limits = (facts.limits.get(name, _UNLIMITED) for name in ("nofile", "nproc"))
    files, processes = ("any number of" if limit == _UNLIMITED else str(limit) for limit in limits)
    cgroup = facts.memory.get("limit", _UNLIMITED)
    of_cgroup = "" if cgroup == _UNLIMITED else f" (its cgroup: {format_bytes(cgroup)})"
    return (
        f"{files} open files, {processes} processes, {format_bytes(facts.memory.get('total', 0))} of memory{of_cgroup}"
    )


def _check_gpus(seen: Observation, host: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.nvidia_trouble:
        yield warning(
            f"{host}: there is an NVIDIA driver, but {facts.nvidia_trouble}", "what does nvidia-smi print there?"
        )
    for index, gpu in enumerate(facts.gpus):
        if gpu.used_bytes > _TAKEN * gpu.all_bytes > 0:
            taken = f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.all_bytes)}"
            text = f"{host}: {taken} of GPU {index} are used by another process, but JAX reserves 75 %"
            yield warning(text, "nvidia-smi there names it; jaxrun --env XLA_PYTHON_CLIENT_MEM_FRACTION=.2 takes less")
    for plugin, first in _FIRST_DRIVERS.items():
        if facts.gpus and plugin in facts.versions and int(facts.nvidia_driver.split(".")[0] or 0) < first:
            text = f"{host}: {plugin} needs NVIDIA's driver {first} or newer, but {facts.nvidia_driver} is installed"
            yield failure(text, "pip install 'jax[cuda12]', for older drivers; or a newer driver")
    devices = seen.devices_on(host)
    used = sum(found.local_devices for found in devices if found.platform == "gpu")
    if devices and used < len(facts.gpus):
        has_plugin = any(plugin in facts.versions for plugin in _FIRST_DRIVERS)
        text = f"{host}: NVIDIA's driver shows {plural(len(facts.gpus), 'GPU')}, but JAX uses {used or 'none'}"
        more = "-n or --processes-per-host for more; CUDA_VISIBLE_DEVICES?"
        yield warning(text, more if has_plugin else "pip install 'jax[cuda13]'")


def _describe_devices(seen: Observation, host: str, facts: HostFacts) -> str:
    devices = seen.devices_on(host)
    shown = dict.fromkeys(f"{found.local_devices} x {', '.join(found.device_kinds)}" for found in devices)
    processes = f"{plural(len(devices), 'process')}{' on each host' if len(seen.hosts) > 1 else ''}"
    driver = f"; driver {facts.nvidia_driver}" if facts.gpus else ""
    return f"{processes}, with {' or '.join(shown)}{driver}"
