"""Where the sockets of running jobs are: in a directory of this user's on a local disk, which no other user may enter.

    /tmp/jaxrun-UID/JOB_ID.sock

A run directory may lie on NFS, which holds no socket, and its path may be too long for one. Where /tmp cannot be used,
the directory is in XDG_RUNTIME_DIR, else in TMPDIR: the last two may go away when the user logs out, or a batch job
ends. A launcher removes its socket, and its guard does if it is killed; the next launcher, or `jaxrun clean`, removes
what both have left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping

from jaxrun.files.own_files import check_way, is_trusted, open_private_directory
from jaxrun.text import format_user

_SUFFIX = ".sock"
_BACKLOG = 64
_MAX_PATH_BYTES = 107  # sockaddr_un.sun_path
_JUST_MADE_S = 10.0  # in which a socket that nobody listens at yet is left alone
_TRIES = 3  # while another launcher, which ends, removes the empty directory
_CREDENTIALS = struct.Struct("3i")


def listen(job_id: str, environ: Mapping[str, str]) -> tuple[socket.socket, str]:
    """Listen at a new socket of this job; returns its path, too. Raises OSError, with a path, where that fails."""
    first: OSError | None = None
    for directory in _candidates(environ):
        for _ in range(_TRIES):
            try:
                return _listen_in(directory, job_id)
            except OSError as error:
                error.filename = directory
                first = first or error
                if error.errno != errno.ENOENT:
                    break
    assert first is not None
    raise first


def socket_name(job_id: str) -> str:
    """The file name of the socket of a job."""
    return f"{job_id}{_SUFFIX}"


def _candidates(environ: Mapping[str, str]) -> list[str]:
    own = f"jaxrun-{os.geteuid()}"
    others = [os.path.join(root, own) for name in ("XDG_RUNTIME_DIR", "TMPDIR") if (root := environ.get(name))]
    return list(dict.fromkeys([f"/tmp/{own}", *others]))


def _listen_in(directory: str, job_id: str) -> tuple[socket.socket, str]:
    path = os.path.join(directory, socket_name(job_id))
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    check_way(directory)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    own = open_private_directory(directory)
    try:
        _remove_stale(own)
        with contextlib.suppress(FileNotFoundError):  # of a launcher that was killed, whose job this one continues
            os.unlink(os.path.basename(path), dir_fd=own)
    finally:
        os.close(own)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener, path


def remove(path: str) -> None:
    """Remove the socket at which this process listens, and its directory, if no other job has one there."""
    _remove(*os.path.split(path), lambda own, name: True)


def remove_abandoned(job_id: str, environ: Mapping[str, str]) -> None:
    """Remove the socket of this job, if its launcher is gone."""
    for directory in _candidates(environ):
        _remove(directory, socket_name(job_id), _is_abandoned)


def _remove(directory: str, name: str, may_go: Callable[[int, str], bool]) -> None:
    with contextlib.suppress(OSError):
        own = open_private_directory(directory)
        try:
            if not may_go(own, name):
                return
            os.unlink(name, dir_fd=own)
        finally:
            os.close(own)
        above = os.open(os.path.dirname(directory), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.rmdir(os.path.basename(directory), dir_fd=above)
        finally:
            os.close(above)


def remove_stale(environ: Mapping[str, str]) -> None:
    """Remove what launchers have left that were killed."""
    for directory in _candidates(environ):
        with contextlib.suppress(OSError):
            own = open_private_directory(directory)
            try:
                _remove_stale(own)
            finally:
                os.close(own)


def _remove_stale(own: int) -> None:
    for name in os.listdir(own):
        with contextlib.suppress(OSError):
            made = os.stat(name, dir_fd=own, follow_symlinks=False).st_mtime
            if name.endswith(_SUFFIX) and time.time() - made > _JUST_MADE_S and _is_abandoned(own, name):
                os.unlink(name, dir_fd=own)


def _is_abandoned(own: int, name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(f"/proc/self/fd/{own}/{name}") == errno.ECONNREFUSED


def connect(path: str, pid: int, timeout: float) -> socket.socket:
    """Connect to the launcher `pid`, which listens at `path`. Raises OSError, also where it is another user's.

    A launcher in a batch job may have a /tmp of its own: then its socket is found through its process.
    """
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(timeout)
    try:
        try:
            link.connect(path)
        except (FileNotFoundError, NotADirectoryError):
            link.connect(f"/proc/{pid}/root{path}")
        _, owner, _ = peer_of(link)
        if not is_trusted(owner):
            raise PermissionError(errno.EPERM, f"{format_user(owner)} listens there")
    except BaseException:
        link.close()
        raise
    return link


def peer_of(link: socket.socket) -> tuple[int, int, int]:
    """The process, user and group at the other end of a connection, as the kernel knows them."""
    pid, uid, gid = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
