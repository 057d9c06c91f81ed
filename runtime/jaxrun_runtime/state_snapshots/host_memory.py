"""The files in /dev/shm that outlive the ranks: two for each rank that keeps something, each whole or not there.

A file has the bytes of its pieces, a manifest as JSON, and a trailer with the manifest's length and digest. It is
written as a draft, in the place of the last file but one, whose memory the kernel need not clear again.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import from_content, to_content
from jaxrun.protocol.compiled_programs import open_shared_directory, snapshot_directory
from jaxrun.protocol.message_tags import digest
from jaxrun.protocol.own_files import draft_name
from jaxrun_runtime.state_snapshots.layout import Manifest

CHUNK_BYTES = 16 * 2**20  # that are checked, and sent, at a time
OWN, COPY = "own", "copy"
_KEPT = 2
_TRAILER = struct.Struct("<Q32s")
_MODE = 0o600
_CGROUP = Path("/sys/fs/cgroup")


class Draft:
    """A file that is being written; nobody else knows its name."""

    def __init__(self, fd: int, name: str, key: tuple[int, str]) -> None:
        self.fd = fd
        self.name = name
        self.key = key

    def write(self, data: memoryview, offset: int) -> None:
        """Raises OSError."""
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self.fd, data[done:], offset + done)


class HostMemory:
    """The snapshots that are on this host, of a job's attempt `attempt` and of those before."""

    def __init__(self, job_id: str, host: str, attempt: int) -> None:
        """Raises OSError if there is no such memory, or it is not this user's alone."""
        self._directory = open_shared_directory(snapshot_directory(job_id, host))
        self._attempt = attempt
        self._written: dict[tuple[int, str], list[str]] = {}  # by this process

    def begin(self, writer: int, kind: str, nbytes: int) -> Draft:
        """Begin a file of what `writer` holds, in the place of the last one but one. Raises OSError without memory."""
        names, draft = self._written.setdefault((writer, kind), []), draft_name()
        if len(names) == _KEPT:
            os.rename(names.pop(0), draft, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(draft, flags, _MODE, dir_fd=self._directory)
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
        os.ftruncate(fd, nbytes)
        return Draft(fd, draft, (writer, kind))

    def commit(self, draft: Draft, manifest: Manifest) -> str:
        """The file is whole: returns its name. Raises OSError."""
        text = json.dumps(to_content(manifest), default=to_content).encode()
        draft.write(memoryview(text + _TRAILER.pack(len(text), digest(text))), manifest.nbytes)
        os.close(draft.fd)
        writer, kind = draft.key
        name = f"{self._attempt}-{manifest.step}-{writer}-{kind}"
        os.replace(draft.name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        names = self._written[draft.key]
        names[:] = [*(one for one in names if one != name), name]
        return name

    def names(self) -> list[str]:
        return sorted(name for name in os.listdir(self._directory) if name.endswith((OWN, COPY)))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """From its end for a negative `offset`. Raises OSError if the file is not there, or shorter."""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        try:
            size = os.fstat(fd).st_size
            data = os.pread(fd, min(nbytes, size), offset if offset >= 0 else size + offset)
        finally:
            os.close(fd)
        if len(data) != nbytes:
            raise OSError(f"{name} ends early")
        return data

    def verify(self, name: str) -> Manifest | None:
        """The manifest of a file, each of whose bytes is what was written; None for any other file."""
        try:
            length, checksum = _TRAILER.unpack(self.read(name, -_TRAILER.size, _TRAILER.size))
            text = self.read(name, -_TRAILER.size - length, length)
            manifest = from_content(Manifest, json.loads(text)) if digest(text) == checksum else None
            if manifest and all(digest(self.read(name, at, size)) == known for at, size, known in manifest.checksums):
                return manifest
        except (OSError, OverflowError, ValueError, ProtocolError):
            pass
        return None

    def remove(self, *, keep: tuple[int, int] | None = None, earlier: bool = False) -> None:
        """Remove all files but those of this attempt and step; `earlier`: those of earlier attempts alone."""
        for name in self.names():
            attempt, step = map(int, name.split("-")[:2])
            if (attempt < self._attempt) if earlier else ((attempt, step) != keep):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._directory)
                for names in self._written.values():
                    names[:] = [one for one in names if one != name]

    def available_bytes(self) -> int:
        """How much memory snapshots may take on this host, what they take now included."""
        there = os.fstatvfs(self._directory)
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = [there.f_bavail * there.f_frsize, int(facts["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups()]
        return min(free) + sum(os.stat(name, dir_fd=self._directory).st_size for name in self.names())


def _left_in_cgroups() -> Iterator[int]:
    """How much each memory cgroup of this process, of version 2, leaves it beside what cannot be reclaimed."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = _CGROUP / next(line for line in lines if line.startswith("0::"))[3:].lstrip("/")
        for cgroup in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):
                facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
                yield int((cgroup / "memory.max").read_text()) - int(facts["anon"]) - int(facts["shmem"])


def chunks(*ends: int) -> list[tuple[int, int]]:
    """From which byte on, and how many: the chunks of a file, none of which goes beyond one of these ends."""
    found: list[tuple[int, int]] = []
    start = 0
    for end in ends:
        found += [(at, min(CHUNK_BYTES, end - at)) for at in range(start, end, CHUNK_BYTES)]
        start = max(start, end)
    return found


def checksums(fd: int, parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, bytes], ...]:
    return tuple((offset, nbytes, digest(os.pread(fd, nbytes, offset))) for offset, nbytes in parts)
