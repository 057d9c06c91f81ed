"""What is in a directory, and its name: a hash over paths, modes, link targets and the contents of files.

Sockets, devices, .git and run directories do not belong to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from jaxrun.errors import UnavailableError
from jaxrun.protocol.own_files import NEW_FILE

CHUNK_BYTES = 2**20
_READERS = 16  # files at a time: on a slow file system, to open them takes longest
_LEFT_OUT = frozenset((".git", "jaxrun-runs"))
_FOLDER_MODE = stat.S_IFDIR | 0o755


class Entry(NamedTuple):
    """A file, a directory or a symbolic link; `mode` says which, `digest` is that of a file.

    mtime_ns:  of a file, which Python compares with that of the compiled module
    """

    path: str
    mode: int
    mtime_ns: int = 0
    size: int = 0
    target: str = ""
    digest: str = ""

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


def name_of(entries: Iterable[Entry]) -> str:
    return hash_of([entry._replace(mtime_ns=0) for entry in entries])


def hash_of(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def read_manifest(data: bytes | bytearray) -> list[Entry]:
    """The entries of which json.dumps has made this. Raises ValueError or TypeError, also for paths that lead out."""
    entries = [Entry(*row) for row in json.loads(data)]
    if any(entry.path.startswith("/") or ".." in entry.path.split("/") for entry in entries):
        raise ValueError("a path leads out of it")
    return entries


def list_directory(source: str) -> tuple[list[Entry], str]:
    """All that is in a directory, without digests, and a hash of what its file system says. Raises OSError.

    Where that hash has not changed, the files have not, and need not be read again.
    """
    found: list[tuple[Entry, int]] = []
    folders = [""]
    with ThreadPoolExecutor(_READERS) as pool:
        while folders:
            lists = pool.map(lambda folder: list(_list_folder(source, folder)), folders)
            level = [one for entries in lists for one in entries]
            found += level
            folders = [entry.path for entry, _ in level if stat.S_ISDIR(entry.mode)]
    found.sort()
    return [entry for entry, _ in found], hash_of([source, found])


def _list_folder(source: str, folder: str) -> Iterator[tuple[Entry, int]]:
    """The entries of one folder, and their inodes."""
    with os.scandir(os.path.join(source, folder)) as there:
        for one in there:
            if one.name in _LEFT_OUT:
                continue
            status, path = one.stat(follow_symlinks=False), os.path.join(folder, one.name)
            if stat.S_ISREG(status.st_mode):
                mode = stat.S_IFREG | (status.st_mode & 0o777)
                yield Entry(path, mode, status.st_mtime_ns, status.st_size), status.st_ino
            elif stat.S_ISLNK(status.st_mode):
                yield Entry(path, stat.S_IFLNK, target=os.readlink(one.path)), status.st_ino
            elif stat.S_ISDIR(status.st_mode):
                yield Entry(path, _FOLDER_MODE), status.st_ino


def copy_files(source: str, copy: str, entries: list[Entry], on_file: Callable[[Entry], None]) -> list[Entry]:
    """Copy the files, each of which is read once, to a directory that has the folders; returns entries with digests.

    `on_file` is called for each. Raises OSError, and UnavailableError that names a file that changes meanwhile.
    """

    is_over = threading.Event()

    def copy_one(entry: Entry) -> Entry:
        if not entry.is_file:
            return entry
        path = os.path.join(source, entry.path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0) as file:
            pieces = iter(lambda: b"" if is_over.is_set() else file.read(CHUNK_BYTES), b"")
            done = entry._replace(digest=write_file(os.path.join(copy, entry.path), entry, pieces))
            status = os.fstat(file.fileno())
            if (file.tell(), status.st_size, status.st_mtime_ns) != (entry.size, entry.size, entry.mtime_ns):
                raise UnavailableError(f"{path} has changed while it was read; start again once nobody writes to it")
        on_file(entry)
        return done

    with ThreadPoolExecutor(_READERS) as pool:
        try:
            return list(pool.map(copy_one, entries))
        finally:  # a Ctrl-C waits for no large file
            is_over.set()


def write_file(path: str, entry: Entry, pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """Write a new file of a copy; returns the digest of its content. Raises OSError."""
    total = hashlib.blake2b(digest_size=16)
    with open(os.open(path, NEW_FILE, 0o600), "wb") as file:
        for piece in pieces:
            total.update(piece)
            try:
                file.write(piece)
                file.flush()  # others may read it from now on
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
        os.fchmod(file.fileno(), stat.S_IMODE(entry.mode))
        os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))
    return total.hexdigest()
