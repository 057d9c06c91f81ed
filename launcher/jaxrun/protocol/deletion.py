"""Deletes files and directories that are this user's own, and nothing that anybody else has put in their place.

All that jaxrun deletes it deletes here, or by the descriptor of a directory that was opened as its own. No link is
followed, owner and mode are checked on the descriptor of what was opened, and a directory is emptied through it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from jaxrun.protocol.own_directory import open_own_directory, open_private_directory

_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_directory(path: str | Path, dir_fd: int | None = None, *, private: bool = True) -> None:
    """Remove a directory with all that is in it; `path` may be relative to `dir_fd`.

    private:  whether only one that nobody else may enter is removed

    Raises FileNotFoundError where it is not there, and another OSError if it is not this user's own or some of it
    cannot be removed; then the rest of it is.
    """
    with _open_parent(path, dir_fd) as (parent, name):
        directory = open_private_directory(name, parent) if private else open_own_directory(name, parent)
        try:
            _empty(directory)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=parent)


def remove_file(path: str | Path) -> None:
    """Remove a file of this user's. Raises OSError if it is another user's or cannot be removed."""
    with _open_parent(path, None) as (parent, name):
        file = os.open(name, _FILE, dir_fd=parent)
        try:
            if os.fstat(file).st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it belongs to another user")
        finally:
            os.close(file)
        os.unlink(name, dir_fd=parent)


@contextlib.contextmanager
def _open_parent(path: str | Path, dir_fd: int | None) -> Iterator[tuple[int, str]]:
    folder, name = os.path.split(path)
    parent = os.open(folder or ".", _PARENT, dir_fd=dir_fd)
    try:
        yield parent, name
    finally:
        os.close(parent)


def _empty(directory: int) -> None:
    """Remove what is in the directory, each entry whatever becomes of the others; raises the last error."""
    failed: OSError | None = None
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        try:
            if is_directory:
                remove_directory(name, directory, private=False)
            else:
                os.unlink(name, dir_fd=directory)
        except FileNotFoundError:  # somebody else of this user was faster
            pass
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
