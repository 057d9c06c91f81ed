"""Reads a directory of a slow file system, into a draft of a copy.

Many files are read at a time, as opening them takes longest. Sockets, devices, .git and run directories are left out.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from jaxrun.errors import UnavailableError
from jaxrun.node.staging.transfer import name_copy
from jaxrun.terminal import print_notice
from jaxrun.text import format_bytes

_NOTICE_INTERVAL_S = 5.0  # between two lines about how much has been read
_THREADS = 16
_PIECE_BYTES = 2**20
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
_LEFT_OUT = (".git", "jaxrun-runs")
Listed = tuple[str, os.stat_result]  # a path, and what its file system says of it


def list_directory(source: str) -> tuple[list[Listed], str]:
    """Return all that is in a directory, and a hash of that: where it is the same, so are the files. Raises OSError."""
    found, folders = list[Listed](), [""]
    with ThreadPoolExecutor(_THREADS) as pool:
        while folders:
            level = [*chain.from_iterable(pool.map(partial(_list_folder, source), folders))]
            folders = [path for path, status in level if stat.S_ISDIR(status.st_mode)]
            found += level
    found.sort()
    seen = [(path, one.st_mode, one.st_ino, one.st_size, one.st_mtime_ns) for path, one in found]
    return found, hashlib.sha256(ascii([source, seen]).encode()).hexdigest()


def _list_folder(source: str, folder: str) -> list[Listed]:
    with os.scandir(os.path.join(source, folder)) as there:
        names = [one for one in there if one.name not in _LEFT_OUT]
        listed = [(os.path.join(folder, one.name), one.stat(follow_symlinks=False)) for one in names]
    return [one for one in listed if stat.S_IFMT(one[1].st_mode) in _KINDS]


def copy_directory(source: str, draft: str, listed: list[Listed]) -> str:
    """Copy what is listed to a draft of a copy, and return the name of the copy.

    Raises OSError, and UnavailableError that names a file which changes meanwhile.
    """
    started = shown_at = time.monotonic()
    nbytes, done, is_over = sum(status.st_size for _, status in listed), 0, threading.Event()
    os.mkdir(f"{draft}/copy")
    for folder in (path for path, status in listed if stat.S_ISDIR(status.st_mode)):
        os.mkdir(f"{draft}/copy/{folder}")
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for size in pool.map(lambda one: _copy_file(source, f"{draft}/copy", one, is_over), listed):
                done += size
                if time.monotonic() > shown_at + _NOTICE_INTERVAL_S:
                    shown_at = time.monotonic()
                    print_notice(f"reading {source}: {format_bytes(done)} of {format_bytes(nbytes)}")
        finally:  # a Ctrl-C waits for no large file
            is_over.set()
    name = name_copy(draft, [path for path, _ in listed])
    took, path = time.monotonic() - started, f"{os.path.dirname(draft)}/{name}"
    print_notice(f"read {source} once: {format_bytes(nbytes)} in {took:.1f} s, to {path}")
    return name


def _copy_file(source: str, copy: str, one: Listed, is_over: threading.Event) -> int:
    """Copy a file or a symbolic link; return how many bytes it has."""
    path, copied, listed = f"{source}/{one[0]}", f"{copy}/{one[0]}", one[1]
    if stat.S_ISLNK(listed.st_mode):
        os.symlink(os.readlink(path), copied)
    if not stat.S_ISREG(listed.st_mode):
        return listed.st_size
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
    return nbytes
