"""The directory in memory in which the ranks of one host share compiled programs during an attempt (--compile).

The first rank that has something to share makes it; whoever has ended the ranks removes it. What is in it is executed,
so it must be this user's own, and nobody else's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

_MEMORY = "/dev/shm"
_PREFIX = "jaxrun-compiled"
_OTHERS = 0o077
_ATTEMPTS = 5  # at removing, while a rank that is still there adds something


def shared_directory(job_id: str, attempt: int, host: str) -> str:
    """Where the ranks of `host` share compiled programs; nobody need have made it."""
    return f"{_of_job(job_id)}-{attempt}-{host.replace('/', '_')}"


def open_shared_directory(path: str) -> int:
    """Make the directory unless another rank has; returns a descriptor, which knows no other one of the same name.

    Raises OSError if it cannot be made, or is not this user's alone.
    """
    is_first = True
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        is_first = False
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        os.close(directory)
        raise PermissionError(errno.EPERM, "it is not this user's alone, and what is in it is executed")
    with contextlib.suppress(OSError):  # as long as a rank has it open, it is in use
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if is_first:
        _remove_unused(os.path.dirname(path))
    return directory


def _remove_unused(parent: str) -> None:
    """Remove what jobs of this user have left that were killed together with their guards."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(f"{_PREFIX}-{os.geteuid()}-") and not _is_in_use(f"{parent}/{name}"):
                remove_shared_directory(f"{parent}/{name}")


def _is_in_use(path: str) -> bool:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(directory)


def remove_shared_directory(path: str) -> None:
    """Remove the directory with all that is in it, if it is there."""
    for _ in range(_ATTEMPTS):
        try:
            for name in os.listdir(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{path}/{name}")
            os.rmdir(path)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            return
        except OSError:  # it is not empty any more
            continue
        return


def remove_all_of_job(job_id: str) -> None:
    """Remove what any attempt of the job has left on this machine."""
    with contextlib.suppress(OSError):
        for name in os.listdir(_MEMORY):
            if f"{_MEMORY}/{name}".startswith(f"{_of_job(job_id)}-"):
                remove_shared_directory(f"{_MEMORY}/{name}")


def _of_job(job_id: str) -> str:
    return f"{_MEMORY}/{_PREFIX}-{os.geteuid()}-{job_id}"
