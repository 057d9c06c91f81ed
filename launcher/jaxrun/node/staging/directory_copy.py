"""Reads a directory of a slow file system into a draft of a copy.

Many files are read at a time, because opening them takes longest. Sockets, devices, .git, run directories and jaxrun's
own copies are left out. Links to places outside the directory keep their target, links within it lead to the copy.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from jaxrun.errors import UnavailableError
from jaxrun.node.staging.archive import COPIED_MODE, name_copy
from jaxrun.node.staging.copies import STAGE_PREFIX
from jaxrun.terminal import print_notice
from jaxrun.text import format_bytes

_NOTICE_INTERVAL_S = 5.0  # between two lines about how much has been read
_THREADS = 16
_PIECE_BYTES = 2**20
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
_LEFT_OUT = re.compile(rf"\.git|jaxrun-runs|{STAGE_PREFIX}\d+")
# O_NONBLOCK: opening a file that has become a FIFO would block.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Listed = tuple[str, os.stat_result]  # a path, and its status in the file system


def list_directory(source: str) -> tuple[list[Listed], str]:
    """Return the content of a directory, and a hash of it: if that is equal, so are the files. Raises OSError."""
    found, folders = list[Listed](), [""]
    with ThreadPoolExecutor(_THREADS) as pool:
        while folders:
            level = [*chain.from_iterable(pool.map(partial(_list_folder, source), folders))]
            folders = [path for path, status in level if stat.S_ISDIR(status.st_mode)]
            found += level
    found.sort()
    seen = [(path, *_identity(one)) for path, one in found]
    return found, hashlib.sha256(ascii([source, seen]).encode()).hexdigest()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Return values that differ once a file has changed. A program may reset st_mtime, but not st_ctime."""
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_mode, status.st_dev, status.st_ino, status.st_size, *times


def _list_folder(source: str, folder: str) -> list[Listed]:
    with os.scandir(os.path.join(source, folder)) as there:
        names = [one for one in there if not _LEFT_OUT.fullmatch(one.name)]
        listed = [(os.path.join(folder, one.name), one.stat(follow_symlinks=False)) for one in names]
    return [one for one in listed if stat.S_IFMT(one[1].st_mode) in _KINDS]


def copy_directory(source: str, draft: str, listed: list[Listed]) -> str:
    """Copy the listed files to a draft of a copy, and return the name of the copy.

    Raises OSError, and UnavailableError that names a file which changed meanwhile.
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
        finally:  # a Ctrl-C does not wait for a large file
            is_over.set()
    name = name_copy(draft, [path for path, _ in listed])
    took, path = time.monotonic() - started, f"{os.path.dirname(draft)}/{name}"
    print_notice(f"read {source} once: {format_bytes(nbytes)} in {took:.1f} s, to {path}")
    return name


def _copy_file(source: str, copy: str, one: Listed, is_over: threading.Event) -> int:
    """Copy a file or a symbolic link; return its number of bytes."""
    path, copied, listed = f"{source}/{one[0]}", f"{copy}/{one[0]}", one[1]
    if stat.S_ISLNK(listed.st_mode):
        os.symlink(copied_link(source, one[0], os.readlink(path)), copied)
    if not stat.S_ISREG(listed.st_mode):
        return listed.st_size
    has_changed = UnavailableError(f"{path} has changed while it was read; start again once nobody writes to it")
    try:
        with open(os.open(path, _READ), "rb") as file, open(copied, "xb") as new:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise has_changed
            while not is_over.is_set() and os.sendfile(new.fileno(), file.fileno(), None, _PIECE_BYTES):
                pass
            status, nbytes = os.fstat(file.fileno()), os.fstat(new.fileno()).st_size
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # it has become a link, or a socket
            raise has_changed from None
        raise OSError(error.errno, error.strerror, f"{path} to {copied}") from None
    if _identity(status) != _identity(listed) or nbytes != listed.st_size:
        raise has_changed
    os.chmod(copied, stat.S_IMODE(listed.st_mode) & COPIED_MODE)
    os.utime(copied, ns=(listed.st_mtime_ns, listed.st_mtime_ns))
    return nbytes


def copied_link(source: str, path: str, target: str) -> str:
    """Return the target of the copy of a link at `path` in `source`; a link to outside keeps its target.

    A link into `source`, by its absolute path or on a way through other directories, leads to the same in the copy.
    """
    root, folder = os.path.realpath(source), os.path.dirname(path)
    if not os.path.isabs(target):
        if os.path.normpath(os.path.join("/", folder, target)) == "/" + os.path.normpath(os.path.join(folder, target)):
            return target
        full = os.path.join(root, folder, target)
    else:
        full = target
    parent, name = os.path.split(full.rstrip("/") or "/")
    found = os.path.realpath(full) if name in ("", ".", "..") else os.path.join(os.path.realpath(parent), name)
    if found == root or found.startswith(f"{root}/"):
        return os.path.relpath(found, os.path.join(root, folder))
    return full
