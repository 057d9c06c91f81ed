"""Directories in shared memory, of what the ranks of a host leave for each other. It is executed, or gone on with.

    /dev/shm/jaxrun-UID/JOB-ATTEMPT-HOST/      compiled programs, for the other ranks during an attempt (--compile)
    /dev/shm/jaxrun-UID/JOB-snapshots-HOST/    snapshots, for the next attempt (runtime/jaxrun_runtime/state_snapshots)

They are made by the first rank that has something to share. The first kind is removed by whoever has ended the ranks,
the second by whoever knows that the job is over. The upper one must be this user's own, and nobody else may enter it:
below it no name is anybody else's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from jaxrun.files.own_files import open_private_directory, remove_directory

_MEMORY = "/dev/shm"
_SNAPSHOTS = "-snapshots-"
_ABANDONED_S = 600.0  # after which snapshots that no process holds are of no job any more
_LOOK_S = 0.5
_TRIES = 5  # while another process removes the directory, or a rank that is still there adds something


def shared_directory(job_id: str, attempt: int, host: str) -> str:
    """The name of the directory in which the ranks of `host` share compiled programs; nobody need have made it."""
    return f"{job_id}-{attempt}-{host.replace('/', '_')}"


def snapshot_directory(job_id: str, host: str) -> str:
    """The name of the directory of the snapshots that are on `host`; nobody need have made it."""
    return f"{job_id}{_SNAPSHOTS}{host.replace('/', '_')}"


_held: dict[str, int] = {}


def hold_directory(name: str) -> None:
    """Keep the directory, if it exists, from being taken for an abandoned one, for as long as this process lives."""
    if name not in _held:
        with contextlib.suppress(OSError), _own() as own:
            directory = open_private_directory(name, own)
            os.utime(directory)  # so that it is kept for a while longer, too
            _share(directory)
            _held[name] = directory


def open_shared_directory(name: str) -> int:
    """Make the directory unless another rank has; returns a descriptor, which knows no other one of the same name.

    Raises OSError, which has the path, if it cannot be made or is not this user's alone.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            os.mkdir(_own_directory(), 0o700)
        with contextlib.suppress(FileNotFoundError, BlockingIOError), _own() as own:
            return _open_below(own, name)
    raise FileNotFoundError(errno.ENOENT, "it is removed by another process", f"{_own_directory()}/{name}")


def _open_below(own: int, name: str) -> int:
    """Lock the directory. Raises FileNotFoundError or BlockingIOError if another process removes the directory."""
    is_first = True
    try:
        os.mkdir(name, 0o700, dir_fd=own)
    except FileExistsError:
        is_first = False
    directory = open_private_directory(name, own)
    try:
        _share(directory)
        if not os.fstat(directory).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it has been removed")
    except OSError:
        os.close(directory)
        raise
    if is_first:
        _remove_unused(own, name.partition("-")[0])
    return directory


def _share(directory: int) -> None:
    """Mark it as in use for as long as this rank has it open. Raises BlockingIOError if it is being removed."""
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # without locks it may be removed early: then each rank compiles
        pass


def _remove_unused(own: int, job_id: str) -> None:
    """Remove what jobs other than this one have left that were killed together with their guards."""
    for name in os.listdir(own):
        if _SNAPSHOTS in name and (name.startswith(f"{job_id}-") or _is_recent(name, own)):
            continue
        with contextlib.suppress(OSError), _unused(name, own):
            remove_directory(name, own)


@contextlib.contextmanager
def _unused(name: str, own: int) -> Iterator[None]:
    """Keep others from using it meanwhile. Raises BlockingIOError if a process does, FileNotFoundError without it."""
    directory = open_private_directory(name, own)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(directory)


def _is_recent(name: str, own: int) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - os.stat(name, dir_fd=own, follow_symlinks=False).st_mtime < _ABANDONED_S
    return False


def remove_shared_directory(name: str) -> None:
    """Remove the directory with all its content, if it exists, and its parent if no other job uses that."""
    with contextlib.suppress(OSError), _own() as own:
        _remove(name, own)


def remove_all_of_job(job_id: str, *, snapshots: bool = True) -> None:
    """Remove what any attempt of the job has left on this machine; its snapshots, too, unless they are to stay."""
    with contextlib.suppress(OSError), _own() as own:
        for name in os.listdir(own):
            if name.startswith(f"{job_id}-") and (snapshots or _SNAPSHOTS not in name):
                _remove(name, own)


def remove_unless_held(name: str, seconds: float) -> None:
    """Remove the directory, if it exists, unless a process holds it now, or begins to within `seconds`."""
    until = time.monotonic() + seconds
    with contextlib.suppress(BlockingIOError, FileNotFoundError), _own() as own:
        while time.monotonic() < until:
            with _unused(name, own):
                pass
            time.sleep(_LOOK_S)
        with _unused(name, own):
            _remove(name, own)


def _remove(name: str, own: int) -> None:
    for _ in range(_TRIES):
        try:
            remove_directory(name, own)
        except FileNotFoundError:
            break
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                break
    with contextlib.suppress(OSError):  # as it is not empty
        os.rmdir(_own_directory())


def _own_directory() -> str:
    return f"{_MEMORY}/jaxrun-{os.geteuid()}"


@contextlib.contextmanager
def _own() -> Iterator[int]:
    """A descriptor of this user's own directory. Raises OSError if it is not there, or not this user's alone."""
    try:
        own = open_private_directory(_own_directory())
    except OSError as error:
        error.filename = _own_directory()
        raise
    try:
        yield own
    finally:
        os.close(own)
