"""The files in /dev/shm that outlive the ranks: two for each region that is kept, each whole or not there.

A file has a header and the region's bytes. The header is written last, with a checksum of all; what is written beyond
it makes it void. Snapshots take the two files in turn, whose memory the kernel need not clear again.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxrun.protocol.shared_memory import open_shared_directory, snapshot_directory
from jaxrun_runtime.state_snapshots.placement import HEADER_BYTES, KeptRegion, Region, StateSnapshot

SLOTS = 2
_CHUNK_BYTES = 16 * 2**20  # that are checked, and sent, at a time
_HEADER = struct.Struct(f"<Qq16sL{HEADER_BYTES - 36}x")  # number, step, structure; a checksum of these and the data
_MODE = 0o600
_CGROUP = Path("/sys/fs/cgroup")

Data = bytes | bytearray | memoryview
Write = Callable[[str, int, int, Data], None]  # HostMemory.write, here or on another host
Read = Callable[[str, int, int], Data]


class HostMemory:
    """What is kept on a host."""

    def __init__(self, job_id: str, host: str) -> None:
        """Raises OSError if there is no such memory, or it is not this user's alone."""
        self._directory = open_shared_directory(snapshot_directory(job_id, host))

    def write(self, name: str, size: int, offset: int, data: Data) -> None:
        """Write into a file, which is made if need be, and has then `size` bytes. Raises OSError without memory."""
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE, dir_fd=self._directory)
        try:
            if os.fstat(fd).st_size != size:
                os.posix_fallocate(fd, 0, size)
                os.ftruncate(fd, size)
            if offset:
                os.pwrite(fd, bytes(HEADER_BYTES), 0)
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(fd)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Raises OSError if the file is not there, or shorter."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        try:
            data = os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)
        if len(data) != nbytes:
            raise OSError(f"{name} ends early")
        return data

    def begin(self, snapshot: StateSnapshot, kept: KeptRegion, data: memoryview) -> None:
        """Write a file without its header. Raises OSError without memory."""
        self.write(file_name(snapshot, kept.region), HEADER_BYTES + kept.nbytes, HEADER_BYTES, data)

    def complete(self, snapshot: StateSnapshot, kept: KeptRegion, copies: Iterable[Write]) -> None:
        """Write the header, and copies of the file. Raises OSError."""
        name, size = file_name(snapshot, kept.region), HEADER_BYTES + kept.nbytes
        checksum = zlib.crc32(repr(snapshot).encode())
        for offset, chunk in _chunks(self.read, name, kept.nbytes):
            checksum = zlib.crc32(chunk, checksum)
            for write in copies:
                write(name, size, offset, chunk)
        header = _HEADER.pack(snapshot.number, snapshot.step, snapshot.structure.encode(), checksum)
        for write in (self.write, *copies):
            write(name, size, 0, header)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._directory))

    def find_whole(self, name: str) -> tuple[StateSnapshot, Region] | None:
        """What a file has, if each of its bytes is what was written."""
        with contextlib.suppress(OSError, ValueError, struct.error):
            attempt, _, leaf, axes = name.split("_")
            number, step, structure, known = _HEADER.unpack(self.read(name, 0, HEADER_BYTES))
            snapshot = StateSnapshot(int(attempt), number, step, structure.decode())
            checksum = zlib.crc32(repr(snapshot).encode())
            for _, chunk in _chunks(self.read, name, os.stat(name, dir_fd=self._directory).st_size - HEADER_BYTES):
                checksum = zlib.crc32(chunk, checksum)
            limits = (axis.split(":") for axis in axes.split(",") if axis)
            region = Region(int(leaf), tuple((int(start), int(stop)) for start, stop in limits))
            return (snapshot, region) if checksum == known else None
        return None

    def remove_before(self, attempt: int, but: StateSnapshot | None = None) -> None:
        """Remove all files of earlier attempts, except those of the snapshot `but`."""
        for name in self.names():
            number, slot = map(int, name.split("_")[:2])
            if number < attempt and (but is None or (number, slot) != (but.attempt, but.number % SLOTS)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._directory)

    def available_bytes(self) -> int:
        """How much memory snapshots may take on this host, what they take now included."""
        there = os.fstatvfs(self._directory)
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = [there.f_bavail * there.f_frsize, int(facts["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups()]
        return min(free) + sum(os.stat(name, dir_fd=self._directory).st_size for name in self.names())


def file_name(snapshot: StateSnapshot, region: Region) -> str:
    axes = ",".join(f"{start}:{stop}" for start, stop in region.bounds)
    return f"{snapshot.attempt}_{snapshot.number % SLOTS}_{region.leaf}_{axes}"


def read_region(read: Read, snapshot: StateSnapshot, region: Region, nbytes: int) -> bytes:
    return b"".join(chunk for _, chunk in _chunks(read, file_name(snapshot, region), nbytes))


def _chunks(read: Read, name: str, nbytes: int) -> Iterator[tuple[int, Data]]:
    """The bytes of a region, in chunks with their offsets in the file."""
    end = HEADER_BYTES + nbytes
    for offset in range(HEADER_BYTES, end, _CHUNK_BYTES):
        yield offset, read(name, offset, min(_CHUNK_BYTES, end - offset))


def _left_in_cgroups() -> Iterator[int]:
    """How much each memory cgroup of this process, of version 2, leaves it beside what cannot be reclaimed."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = _CGROUP / next(line for line in lines if line.startswith("0::"))[3:].lstrip("/")
        for cgroup in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):
                facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
                yield int((cgroup / "memory.max").read_text()) - int(facts["anon"]) - int(facts["shmem"])
