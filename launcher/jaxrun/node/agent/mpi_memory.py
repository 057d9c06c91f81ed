"""The files that MPICH leaves if it is killed.

    /dev/shm/mpich_shm_JOB_NUMBER       shared memory: made and mapped by MPI_Init, removed by MPI_Finalize
    /tmp/hydra_hwloc_xmlfile_RANDOM     the host's topology: made by Hydra's proxy for MPI_Init, removed when it ends

Each rank of a host maps the first kind, so a name in the memory of an own rank is a name of an own job. The second kind
is known by no process. What nobody can need any more is removed by the next job that uses MPICH, and by `jaxrun clean`.
The daemons of Open MPI remove what its ranks have left, and Intel MPI removes the names at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from jaxrun.files import procfs
from jaxrun.files.own_files import remove_file

_MAPPED = re.compile(rb"\s(/dev/shm/mpich_shm_[0-9a-f]+_[0-9]+)$", re.MULTILINE)  # a deleted file has " (deleted)"
_MEMORY, _MAPPED_NAME = "/dev/shm", re.compile(r"mpich_shm_[0-9a-f]+_[0-9]+")
_TOPOLOGIES, _TOPOLOGY_NAME = "/tmp", re.compile(r"hydra_hwloc_xmlfile_\w{6}")
_PROXY = b"hydra_pmi_proxy"
_LOOKS = 3  # for which a file is new: one that another rank has made is mapped a moment later
_ABANDONED_S = 60.0  # after which MPI_Init, also of a process that is not seen from here, has done with a file


class MpiMemory:
    """The shared memory that the ranks of one agent have mapped, which is removed once they have ended.

    on_file:  is called with the path of each file, once
    """

    def __init__(self, on_file: Callable[[str], None]) -> None:
        self._on_file = on_file
        self._files: set[str] = set()
        self._looks: Counter[str] = Counter()  # by file

    def look(self, pids: Iterable[int]) -> None:
        """Note the files of these ranks. Costs nothing unless there is a new file; to be called now and then."""
        names = set(_matching(_MEMORY, _MAPPED_NAME))
        self._looks = Counter({name: self._looks[name] + 1 for name in names})
        if any(looks <= _LOOKS for looks in self._looks.values()):
            for pid in pids:
                self.note(pid)

    def note(self, pid: int) -> None:
        """Note the files of this rank, which uses MPI: later it may have ended, and map nothing any more."""
        new = mapped_files(pid) - self._files
        if new and not self._files:
            remove_abandoned()
        self._files |= new
        for name in new:
            self._on_file(name)

    def remove(self) -> None:
        remove_files(self._files)


def mapped_files(pid: int) -> set[str]:
    """Return the files of MPICH that this process maps; one that has ended maps nothing."""
    return {name.decode() for name in _MAPPED.findall(procfs.read_of(pid, "maps"))}


def remove_files(names: Iterable[str]) -> None:
    """Remove these files, except those of another user."""
    for name in names:
        with contextlib.suppress(OSError):
            remove_file(name)


def remove_abandoned() -> None:
    """Remove the shared memory that no process maps, and topologies that are older than every proxy."""
    before = time.time() - _ABANDONED_S
    memory = {name for name in _matching(_MEMORY, _MAPPED_NAME) if _written_at(name) < before}
    if memory:
        remove_files(memory.difference(*map(mapped_files, procfs.process_ids())))
    topologies = {name for name in _matching(_TOPOLOGIES, _TOPOLOGY_NAME) if _written_at(name) < before}
    if topologies:
        first = min((procfs.started_at(pid) for pid in procfs.process_ids() if _is_proxy(pid)), default=math.inf)
        remove_files(name for name in topologies if _written_at(name) < first)


def _matching(directory: str, name: re.Pattern[str]) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (f"{directory}/{found}" for found in os.listdir(directory) if name.fullmatch(found))


def _written_at(path: str) -> float:
    """The time of the last change; infinity for a file that is gone or another user's."""
    with contextlib.suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        if found.st_uid == os.geteuid():
            return found.st_mtime
    return math.inf


def _is_proxy(pid: int) -> bool:
    return procfs.read_of(pid, "comm").strip() == _PROXY
