"""Reads a directory of a slow file system, many files at a time, as opening them takes longest.

Sockets, devices, .git and run directories are left out.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from jaxrun.errors import UnavailableError

_READERS = 16
_PIECE_BYTES = 2**20
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
_LEFT_OUT = (".git", "jaxrun-runs")
Listed = tuple[str, os.stat_result]  # a path, and what its file system says of it


def list_directory(source: str) -> tuple[list[Listed], str]:
    """Return all that is in a directory, and a hash of that: where it is the same, so are the files. Raises OSError."""
    found, folders = list[Listed](), [""]
    with ThreadPoolExecutor(_READERS) as pool:
        while folders:
            level = [one for listed in pool.map(partial(_list_folder, source), folders) for one in listed]
            folders = [path for path, status in level if stat.S_ISDIR(status.st_mode)]
            found += level
    found.sort()
    seen = [(path, one.st_mode, one.st_ino, one.st_size, one.st_mtime_ns) for path, one in found]
    return found, hashlib.sha256(ascii([source, seen]).encode()).hexdigest()


def _list_folder(source: str, folder: str) -> list[Listed]:
    with os.scandir(os.path.join(source, folder)) as there:
        listed = [(os.path.join(folder, one.name), one.stat(follow_symlinks=False)) for one in there]
    return [
        one for one in listed if stat.S_IFMT(one[1].st_mode) in _KINDS and os.path.basename(one[0]) not in _LEFT_OUT
    ]


def copy_directory(source: str, copy: str, listed: list[Listed]) -> Iterator[int]:
    """Copy what is listed, and yield the bytes of each file once it is there.

    Raises OSError, and UnavailableError that names a file which changes meanwhile.
    """
    is_over = threading.Event()

    def copy_one(one: Listed) -> int:
        path, status = one
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(f"{source}/{path}"), f"{copy}/{path}")
        elif stat.S_ISREG(status.st_mode):
            _copy_file(f"{source}/{path}", f"{copy}/{path}", status, is_over)
            return status.st_size
        return 0

    for folder in ("", *(path for path, status in listed if stat.S_ISDIR(status.st_mode))):
        os.mkdir(os.path.join(copy, folder))
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            yield from pool.map(copy_one, listed)
        finally:  # a Ctrl-C waits for no large file
            is_over.set()


def _copy_file(path: str, copied: str, listed: os.stat_result, is_over: threading.Event) -> None:
    try:
        with open(path, "rb") as file, open(copied, "xb") as new:
            while not is_over.is_set() and os.sendfile(new.fileno(), file.fileno(), None, _PIECE_BYTES):
                pass
            status, nbytes = os.fstat(file.fileno()), os.fstat(new.fileno()).st_size
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{path} to {copied}") from None
    if (status.st_ino, status.st_mtime_ns, nbytes) != (listed.st_ino, listed.st_mtime_ns, listed.st_size):
        raise UnavailableError(f"{path} has changed while it was read; start again once nobody writes to it")
    os.chmod(copied, stat.S_IMODE(listed.st_mode))
    os.utime(copied, ns=(listed.st_mtime_ns, listed.st_mtime_ns))
