"""Whether the hosts share the directory, and have room on their disks."""

from __future__ import annotations

import os
from collections.abc import Iterator

from jaxrun.frontends.doctor.finding import Finding, failure, ok, warning
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.text import format_bytes

_LITTLE_BYTES = 2**30
_SHARED_MEMORY = "/dev/shm"
_DOCKERS_SHARED_MEMORY = 2**26  # which a container has unless told otherwise; NCCL and data loaders take more


def check_storage(seen: Observation) -> Iterator[Finding]:
    found = [*_check_shared(seen), *_check_disks(seen)]
    yield from found
    if not seen.hosts or found:
        return
    least: dict[str, int] = {}
    for facts in seen.hosts.values():
        for directory, free in facts.disks.items():
            name = _names(directory)
            least[name] = min(free, least.get(name, free))
    room = ", ".join(f"{format_bytes(free)} in {name}" for name, free in least.items())
    shared = "all hosts see this directory; " if len(seen.hosts) > 1 and seen.in_directory else ""
    yield ok(f"{shared}free: {room}")


def _check_shared(seen: Observation) -> Iterator[Finding]:
    blind = [host for host, facts in seen.hosts.items() if not facts.sees_run_dir]
    if blind and seen.in_directory:
        text = f"{', '.join(blind)}: the files of a job in {os.getcwd()} are not seen there"
        yield warning(text, "start in a directory that all hosts share: logs come by network, but checkpoints do not")


def _check_disks(seen: Observation) -> Iterator[Finding]:
    for host, facts in seen.hosts.items():
        for directory, error in facts.disk_errors.items():
            how = "TMPDIR=DIR chooses another" if directory != os.getcwd() else "start elsewhere, or make room"
            yield failure(f"{host}: nothing can be written to {directory}: {error}", f"df -h {directory} there; {how}")
        for directory, free in facts.disks.items():
            if free < _LITTLE_BYTES and directory not in (*facts.disk_errors, _SHARED_MEMORY):
                yield warning(f"{host}: only {format_bytes(free)} are free in {directory}", f"df -h {directory} there")
        if facts.shared_memory <= _DOCKERS_SHARED_MEMORY:
            text = f"{host}: /dev/shm has {format_bytes(facts.shared_memory)}, too little for NCCL and data loaders"
            yield warning(text, "docker run --shm-size=1g, or --ipc=host")


def _names(directory: str) -> str:
    """What it is for the job, as each host may have its own."""
    if directory == os.getcwd():
        return "this directory"
    return directory if directory in ("/tmp", _SHARED_MEMORY) else "TMPDIR"
