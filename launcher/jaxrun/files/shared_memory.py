"""Directories in shared memory, of what the ranks of a host leave for each other. It is executed, or gone on with.

    /dev/shm/jaxrun-UID/JOB-ATTEMPT-HOST/      compiled programs, for the other ranks during an attempt (--compile)
    /dev/shm/jaxrun-UID/JOB-snapshots-HOST/    snapshots, for the next attempt (runtime/jaxrun_runtime/state_snapshots)

They are made by the first rank that has something to share. The first kind is removed by whoever has ended the ranks,
the second by whoever knows that the job is over. An owner locks the directory: ranks and, from the first snapshot on,
their agent, or the guard of a killed agent. What no process holds, because all were killed, is removed by each job that
starts later, and by `jaxrun clean`. The upper one must be this user's own, and nobody else may enter it: below it no
name is anybody else's. Where another user has made it first, the job has one of its own, /dev/shm/jaxrun-UID-JOB.
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
_ABANDONED_S = 60.0  # since they were written, for another agent of the job to come, and hold them
_LOOK_S = 0.5
_IS_ANOTHERS = (errno.EPERM, errno.EACCES, errno.ELOOP, errno.ENOTDIR)  # what has the name is not ours
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
        for path in _own_directories(name):
            with contextlib.suppress(OSError), _opened(path) as own:
                directory = open_private_directory(name, own)
                _share(directory)
                _held[name] = directory
                return


def open_shared_directory(name: str) -> int:
    """Make the directory unless another rank has; returns a descriptor, which knows no other one of the same name.

    Raises OSError, which has the path, if it cannot be made or is not this user's alone.
    """
    for path in _own_directories(name):
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            try:
                with _opened(path) as own:
                    return _open_below(own, name)
            except (FileNotFoundError, BlockingIOError):
                continue
            except OSError as error:
                if error.filename != path or error.errno not in _IS_ANOTHERS:
                    raise
                failure = error
                break
        else:
            raise FileNotFoundError(errno.ENOENT, "it is removed by another process", f"{path}/{name}")
    raise failure


def _open_below(own: int, name: str) -> int:
    """Lock the directory. Raises FileNotFoundError or BlockingIOError if another process removes the directory."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=own)
    directory = open_private_directory(name, own)
    try:
        _share(directory)
        if not os.fstat(directory).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it has been removed")
    except OSError:
        os.close(directory)
        raise
    return directory


def _share(directory: int) -> None:
    """Mark it as in use for as long as this rank has it open. Raises BlockingIOError if it is being removed."""
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # without locks it may be removed early: then each rank compiles
        pass


def remove_abandoned(job_id: str = "", *, snapshots_after: float = _ABANDONED_S) -> None:
    """Remove what jobs other than this one have left that were killed together with their agents and guards.

    That is what no process holds. Where a host's agent and guard are killed, and not the job, no process holds its
    snapshots until the next agent comes: they stay for some seconds after the last one was written.
    """
    first = os.path.basename(_usual_directory())
    with contextlib.suppress(OSError):
        for found in os.listdir(_MEMORY):
            if found == first or found.startswith(f"{first}-"):
                with contextlib.suppress(OSError), _opened(f"{_MEMORY}/{found}") as own:
                    _remove_unused(own, job_id, snapshots_after)
                    _remove_empty(f"{_MEMORY}/{found}")


def _remove_unused(own: int, job_id: str, snapshots_after: float) -> None:
    for name in os.listdir(own):
        if job_id and name.startswith(f"{job_id}-"):
            continue
        with contextlib.suppress(OSError), _unused(name, own) as directory:
            if _SNAPSHOTS not in name or time.time() - _written_at(directory) >= snapshots_after:
                remove_directory(name, own)


@contextlib.contextmanager
def _unused(name: str, own: int) -> Iterator[int]:
    """Yield the directory, and keep others from using it meanwhile.

    Raises BlockingIOError if a process does, FileNotFoundError without it.
    """
    directory = open_private_directory(name, own)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory
    finally:
        os.close(directory)


def _written_at(directory: int) -> float:
    """The time of the last change in the directory, or of one of its files. Snapshots overwrite their files."""
    times = [os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime for name in os.listdir(directory)]
    return max((os.fstat(directory).st_mtime, *times))


def remove_shared_directory(name: str) -> None:
    """Remove the directory with all its content, if it exists, and its parent if no other job uses that."""
    for path in _own_directories(name):
        with contextlib.suppress(OSError), _opened(path) as own:
            _remove(name, own, path)


def remove_all_of_job(job_id: str, *, snapshots: bool = True) -> None:
    """Remove what any attempt of the job has left on this machine; its snapshots, too, unless they are to stay."""
    for path in _own_directories(job_id):
        with contextlib.suppress(OSError), _opened(path) as own:
            for name in os.listdir(own):
                if name.startswith(f"{job_id}-") and (snapshots or _SNAPSHOTS not in name):
                    _remove(name, own, path)


def remove_unless_held(name: str, seconds: float) -> None:
    """Remove the directory, if it exists, unless a process holds it now, or begins to within `seconds`."""
    for path in _own_directories(name):
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError), _opened(path) as own, _unused(name, own) as directory:
            while time.monotonic() < until:
                fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)  # another job must not take it for abandoned
                time.sleep(_LOOK_S)
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(name, own, path)


def _remove(name: str, own: int, path: str) -> None:
    """Remove the directory below `own`, which is the directory `path`, and that one if nothing else is in it."""
    for _ in range(_TRIES):
        try:
            remove_directory(name, own)
        except FileNotFoundError:
            break
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                break
    _remove_empty(path)


def _remove_empty(path: str) -> None:
    with contextlib.suppress(OSError):  # as it is not empty
        os.rmdir(path)


def _usual_directory() -> str:
    return f"{_MEMORY}/jaxrun-{os.geteuid()}"


def _own_directories(name: str) -> tuple[str, str]:
    """Where a directory of this name, or of the job of this id, may be: the usual place, and where that is another's.

    Nobody else knows a job's id before it starts, and so could have made the second one.
    """
    return _usual_directory(), f"{_usual_directory()}-{name.partition('-')[0]}"


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of a directory of this user's own. Raises OSError if it is not there, or not this user's alone."""
    try:
        own = open_private_directory(path)
    except OSError as error:
        error.filename = path
        raise
    try:
        yield own
    finally:
        os.close(own)
