"""Files and directories of this user's own: nothing that anybody else has put in their place is opened or deleted.

A directory is this user's own if no other user owns it, and no link of theirs leads to it. What lies in it is opened by
its descriptor, so that it is in it whatever happens to its path. All that jaxrun deletes it deletes here, or by the
descriptor of such a directory: owner and mode are checked on the descriptor of what was opened. Files that are there as
a whole or not at all are written under the name of a draft, and then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxrun.text import format_user

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DRAFT_PREFIX, _DRAFT_SUFFIX = ".jaxrun-", ".draft"
_OTHERS = 0o077
_ROOT = 0
_SQUASHED = (2**16 - 2, 2**32 - 2)  # nobody
_MAX_LINKS = 40  # as many as the kernel follows


def open_own_directory(path: str | Path, dir_fd: int | None = None) -> int:
    """Return a descriptor of the directory `path`, of this user or of root; `path` may be relative to `dir_fd`.

    Raises OSError, whose text says so, where it is a link or belongs to someone else.
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
    raise OSError(errno.EPERM, f"it belongs to {format_user(owner)}, who could change what is in it{_squashed(owner)}")


def open_private_directory(path: str | Path, dir_fd: int | None = None) -> int:
    """Do the same for a directory of this user's, not of root's, that nobody else may enter (mode 0700)."""
    directory = open_own_directory(path, dir_fd)
    status = os.fstat(directory)
    if status.st_uid == os.geteuid() and not status.st_mode & _OTHERS:
        return directory
    os.close(directory)
    raise OSError(
        errno.EPERM, f"it is not this user's alone: {format_user(status.st_uid)}, {status.st_mode & 0o777:04o}"
    )


def open_own_or_linked_directory(path: Path) -> int:
    """Do the same, but `path` may be a link of this user's own that leads to a directory of this user's own.

    Raises OSError, whose text says what is wrong.
    """
    if not _is_link(path, None):
        return open_own_directory(path)
    with contextlib.ExitStack() as stack:
        parent = _open_path(stack, path.parent)
        mode = os.fstat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OSError(errno.EPERM, "it is a symbolic link that everybody can replace")
        target = _follow(stack, parent, path.name)
        owner = os.fstat(target).st_uid
        if owner != os.geteuid():
            raise OSError(errno.EPERM, f"it leads to a directory of {format_user(owner)}{_squashed(owner)}")
        return os.open(".", _DIRECTORY, dir_fd=target)


def check_way(path: str | Path) -> None:
    """Raise OSError, which names it, where everybody can replace a directory or link on the way to `path`.

    That is so where a directory above is writable for others, and not sticky as /tmp is, or where a link is another
    user's. `path` itself, and what is above it, need not be there yet.
    """
    with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
        _follow(stack, _open_path(stack, "/"), os.path.abspath(path), is_checked=True)


def _follow(stack: contextlib.ExitStack, at: int, path: str, *, is_checked: bool = False) -> int:
    """Return a descriptor of what `path` below the directory `at` leads to, through links of this user or of root only.

    is_checked:  every directory on the way is refused that everybody can write to
    """
    parts, links = [part for part in reversed(path.split("/")) if part], 0
    while parts:
        if is_checked:
            _refuse_writable(at)
        here = _open_path(stack, parts.pop(), at)
        status = os.fstat(here)
        if not stat.S_ISLNK(status.st_mode):
            at = here
            continue
        links += 1
        if not is_trusted(status.st_uid):
            raise OSError(errno.EPERM, f"it leads through a symbolic link of {format_user(status.st_uid)}")
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, "it leads through too many symbolic links")
        leads_to = os.readlink("", dir_fd=here)
        parts += reversed([part for part in leads_to.split("/") if part])
        if leads_to.startswith("/"):
            at = _open_path(stack, "/")
    return at


def _refuse_writable(directory: int) -> None:
    """Raise OSError if everybody can replace what is in this directory."""
    mode = os.fstat(directory).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        name = os.readlink(f"/proc/self/fd/{directory}")
        why = f"everybody can write to {name} (mode {stat.S_IMODE(mode):04o}), and so replace what is in it"
        raise OSError(errno.EPERM, f"{why}; try chmod o-w {name}, or another directory")


def _open_path(stack: contextlib.ExitStack, path: str | Path, at: int | None = None) -> int:
    """Return a descriptor of a file of any kind, which `stack` closes; below `at`, of a link itself."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if at is not None else 0), dir_fd=at)
    stack.callback(os.close, found)
    return found


def _squashed(owner: int) -> str:
    """Return what explains this owner of something that root has made."""
    if os.geteuid() != _ROOT or owner not in _SQUASHED:
        return ""
    return " (a file server that trusts no root, root_squash, gives all that root makes to that user)"


def is_trusted(uid: int) -> bool:
    """Whether what belongs to this user can be no trap: it is this process's own, or root's."""
    return uid in (os.geteuid(), _ROOT)


def _is_link(path: str | Path, dir_fd: int | None) -> bool:
    try:
        os.readlink(path, dir_fd=dir_fd)
    except OSError:
        return False
    return True


# ---- deleting


def remove_directory(path: str | Path, dir_fd: int | None = None, *, private: bool = True) -> None:
    """Remove a directory with all that is in it; `path` may be relative to `dir_fd`.

    private:  whether only one that nobody else may enter is removed

    Raises FileNotFoundError if it is not there, and another OSError if it is not this user's own or some of it
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


class _Level:
    """A directory on the way down: its name in the one above, and the directories in it that are left to remove."""

    def __init__(self, name: str, identity: tuple[int, int], folders: list[str]) -> None:
        self.name, self.identity, self.folders = name, identity, folders


def _empty(top: int) -> None:
    """Remove what is in the directory, each entry whatever becomes of the others; raises the last error.

    One descriptor goes down and up, so neither Python's stack nor the limit of open files matters to how deep
    directories are nested.
    """
    failures: list[OSError] = []
    at = os.dup(top)
    levels = [_Level("", _identity(at), _unlink_files(at, failures))]
    try:
        while levels[-1].folders or len(levels) > 1:
            if levels[-1].folders:
                with _noted(failures):
                    name = levels[-1].folders.pop()
                    at = _replace(at, open_own_directory(name, at))
                    levels.append(_Level(name, _identity(at), []))
                    levels[-1].folders = _unlink_files(at, failures)
                continue
            at = _replace(at, os.open("..", _PARENT, dir_fd=at))
            done = levels.pop()
            if _identity(at) != levels[-1].identity:
                raise OSError(errno.EBUSY, "somebody moves its directories at the same time")
            with _noted(failures):
                os.rmdir(done.name, dir_fd=at)
    finally:
        os.close(at)
    if failures:
        raise failures[-1]


def _unlink_files(directory: int, failures: list[OSError]) -> list[str]:
    """Remove all that is no directory; returns the names of the directories."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name in (name for name, is_directory in found if not is_directory):
        with _noted(failures):
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in found if is_directory]


@contextlib.contextmanager
def _noted(failures: list[OSError]) -> Iterator[None]:
    """Note an error for the end, and continue; if something is gone already, that is not an error."""
    try:
        yield
    except FileNotFoundError:  # someone else of this user was faster
        pass
    except OSError as error:
        failures.append(error)


def _replace(descriptor: int, by: int) -> int:
    os.close(descriptor)
    return by


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


# ---- writing whole files


def write_whole_file(path: str | Path, content: bytes, mode: int = 0o666, dir_fd: int | None = None) -> None:
    """Write the file, which may replace one; `path` may be relative to `dir_fd`. Raises OSError.

    The umask takes from `mode`, unless the file is for its owner alone: then that is its mode.
    """
    draft = os.path.join(os.path.dirname(path), draft_name())
    try:
        with open(os.open(draft, NEW_FILE, mode, dir_fd=dir_fd), "wb") as file:
            if not mode & _OTHERS:
                os.fchmod(file.fileno(), mode)  # whatever the umask, or an ACL of the directory, has made of it
            file.write(content)
        os.replace(draft, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=dir_fd)
        raise


def is_draft(name: str) -> bool:
    """Whether a file of this name is being written, or never was finished."""
    return name.startswith(_DRAFT_PREFIX) and name.endswith(_DRAFT_SUFFIX)


def draft_name() -> str:
    """A name that nobody else uses, on any host, and no file left by a process that was killed has."""
    return f"{_DRAFT_PREFIX}{os.urandom(8).hex()}{_DRAFT_SUFFIX}"
