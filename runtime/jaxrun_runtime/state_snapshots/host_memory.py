"""The files in /dev/shm that outlive the ranks. Each file has one region of a snapshot, and is whole or void.

    0_-1_…  0_0_…  0_1_…     slot 0: the description of the state, and the regions of its leaves
    1_-1_…  1_0_…            slot 1: another snapshot

A file has a header and the region's bytes. The header is written last, with a checksum of everything; any later write
to the bytes makes the file void. Snapshots use the two slots in turn. If a new snapshot has a file of the same name, it
overwrites the file in place, so that the kernel need not clear memory again. All other files of the slot are removed
before any rank writes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator

from jaxrun.files import procfs
from jaxrun.files.shared_memory import open_shared_directory, snapshot_directory
from jaxrun.protocol.message_tags import digest
from jaxrun_runtime.state_snapshots.placement import (
    SLOTS,
    Bounds,
    KeptRegion,
    Region,
    Room,
    StateSnapshot,
    header_bytes,
)

_CHUNK_BYTES = 16 * 2**20  # bytes that are checked, and sent, at a time
_HEADER = struct.Struct("<QQq16slLL12x")  # attempt, number, step, structure, leaf, axes, checksum; then the bounds
_AXIS = struct.Struct("<QQ")
_BLOCK_BYTES = 512  # of st_blocks
_MODE = 0o600

Data = bytes | bytearray | memoryview
Write = Callable[[str, int, int, Data], None]  # HostMemory.write, here or on another host
Read = Callable[[str, int, int], Data]


class HostMemory:
    """The snapshots' files on one host."""

    def __init__(self, job_id: str, host: str) -> None:
        """Open the directory. Raises OSError if it cannot be made, or other users may enter it."""
        self._directory = open_shared_directory(snapshot_directory(job_id, host))

    def write(self, name: str, size: int, offset: int, data: Data) -> None:
        """Write `data` into a file. Creates the file, or resizes it to `size` bytes. Raises OSError without memory."""
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE, dir_fd=self._directory)
        try:
            if os.fstat(fd).st_size != size:
                os.posix_fallocate(fd, 0, size)
                os.ftruncate(fd, size)
            if offset:
                os.pwrite(fd, bytes(_HEADER.size), 0)
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(fd)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of a file. Raises OSError if the file does not exist or is shorter."""
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
        header = header_bytes(kept.region)
        self.write(file_name(snapshot.slot, kept.region), header + kept.nbytes, header, data)

    def complete(self, snapshot: StateSnapshot, kept: KeptRegion, copies: Iterable[Write]) -> None:
        """Write the header, and copies of the file. Raises OSError."""
        name, size = file_name(snapshot.slot, kept.region), header_bytes(kept.region) + kept.nbytes
        checksum = _start_checksum(snapshot, kept.region)
        for offset, chunk in _chunks(self.read, name, header_bytes(kept.region), kept.nbytes):
            checksum = zlib.crc32(chunk, checksum)
            for write in copies:
                write(name, size, offset, chunk)
        for write in (self.write, *copies):
            write(name, size, 0, _pack_header(snapshot, kept.region, checksum))

    def names(self) -> list[str]:
        return sorted(os.listdir(self._directory))

    def find_whole(self, name: str) -> tuple[StateSnapshot, Region] | None:
        """Return the snapshot and region of a file, or None if its checksum is wrong."""
        with contextlib.suppress(OSError, ValueError, struct.error):
            snapshot, region, known = self._read_header(name)
            checksum, header = _start_checksum(snapshot, region), header_bytes(region)
            nbytes = os.stat(name, dir_fd=self._directory).st_size - header
            for _, chunk in _chunks(self.read, name, header, nbytes):
                checksum = zlib.crc32(chunk, checksum)
            return (snapshot, region) if checksum == known and name == file_name(snapshot.slot, region) else None
        return None

    def _read_header(self, name: str) -> tuple[StateSnapshot, Region, int]:
        attempt, number, step, structure, leaf, axes, checksum = _HEADER.unpack(self.read(name, 0, _HEADER.size))
        bounds = tuple(_AXIS.iter_unpack(self.read(name, _HEADER.size, axes * _AXIS.size)))
        return StateSnapshot(attempt, number, step, structure.decode()), Region(leaf, bounds), checksum

    def read_whole(self, snapshot: StateSnapshot, region: Region) -> bytes:
        """Return all bytes of a region that this host has. Raises OSError."""
        name, header = file_name(snapshot.slot, region), header_bytes(region)
        return self.read(name, header, os.stat(name, dir_fd=self._directory).st_size - header)

    def empty_slot(self, slot: int, but: Collection[str]) -> None:
        """Remove all files of the slot, and files of no slot, except the names in `but`. Raises OSError."""
        others = tuple(f"{other}_" for other in range(SLOTS) if other != slot)
        for name in self.names():
            if name not in but and not name.startswith(others):
                os.unlink(name, dir_fd=self._directory)

    def room(self) -> Room:
        """Return how much memory is free on this host, and how much each slot takes."""
        there = os.fstatvfs(self._directory)
        free = [there.f_bavail * there.f_frsize, *procfs.bytes_left_in_cgroups()]
        if (available := procfs.available_bytes()) is not None:
            free.append(available)
        held = [0] * SLOTS
        for name in self.names():
            with contextlib.suppress(ValueError, IndexError):
                held[int(name.partition("_")[0])] += self._size(name)
        return Room(max(0, min(free)), held)

    def _size(self, name: str) -> int:
        return os.stat(name, dir_fd=self._directory).st_blocks * _BLOCK_BYTES


def file_name(slot: int, region: Region) -> str:
    return f"{slot}_{region.leaf}_{digest(_pack_bounds(region.bounds)).hex()[:16]}"


def read_region(read: Read, snapshot: StateSnapshot, region: Region, nbytes: int) -> bytes:
    name = file_name(snapshot.slot, region)
    return b"".join(chunk for _, chunk in _chunks(read, name, header_bytes(region), nbytes))


def _pack_header(snapshot: StateSnapshot, region: Region, checksum: int) -> bytes:
    numbers, structure = snapshot[:3], snapshot.structure.encode()
    return _HEADER.pack(*numbers, structure, region.leaf, len(region.bounds), checksum) + _pack_bounds(region.bounds)


def _pack_bounds(bounds: Bounds) -> bytes:
    return b"".join(_AXIS.pack(*axis) for axis in bounds)


def _start_checksum(snapshot: StateSnapshot, region: Region) -> int:
    return zlib.crc32(_pack_header(snapshot, region, 0))


def _chunks(read: Read, name: str, header: int, nbytes: int) -> Iterator[tuple[int, Data]]:
    """Yield the bytes of a region, without its header, in chunks with their offsets in the file."""
    end = header + nbytes
    for offset in range(header, end, _CHUNK_BYTES):
        yield offset, read(name, offset, min(_CHUNK_BYTES, end - offset))
