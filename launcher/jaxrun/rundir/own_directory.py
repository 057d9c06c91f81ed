"""Directories that no other user can put in the way: opened through no link, and not where somebody else owns them.

What lies in them is then opened by their descriptor, so that it is in them whatever happens to their path.
"""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ROOT = 0


def open_own_directory(path: str | Path, dir_fd: int | None = None) -> int:
    """Return a descriptor of the directory `path`, of this user or of root; `path` may be relative to `dir_fd`.

    Raises OSError, whose text says so, where it is a link or belongs to somebody else.
    """
    try:
        directory = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(path, dir_fd):
            raise OSError(errno.ELOOP, "it is a symbolic link, which may lead anywhere") from None
        raise
    owner = os.fstat(directory).st_uid
    if is_trusted(owner):
        return directory
    os.close(directory)
    raise OSError(errno.EPERM, f"it belongs to {name_of_user(owner)}, who could change what is in it")


def is_trusted(uid: int) -> bool:
    """Whether what belongs to this user can be no trap: it is this process's own, or root's."""
    return uid in (os.geteuid(), _ROOT)


def name_of_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _is_link(path: str | Path, dir_fd: int | None) -> bool:
    try:
        os.readlink(path, dir_fd=dir_fd)
    except OSError:
        return False
    return True
