"""Linux calls for which Python has no function, through ctypes, and facts about descriptors."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46  # among the fields of /proc/self/stat behind the command's name
_CLONE_NEWNS = 0x0002_0000
_CLONE_NEWUTS = 0x0400_0000
_CLONE_NEWUSER = 0x1000_0000
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_BOOT_ID = b"/proc/sys/kernel/random/boot_id"

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even while it is busy in C++ or stopped.

    The parent is the thread that forked this process. The caller must check that the parent has not died before.
    """
    _raise_on_error(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def die_with_maker(channel: socket.socket) -> None:
    """The same where the parent has made `channel`, a socket pair; ends this process if the parent has died already."""
    maker = peer_pid(channel)
    if maker:
        die_with_parent()
        if os.getppid() != maker:
            os._exit(0)


def set_process_title(name: str, title: str) -> None:
    """Show `name` as this process's name, and `title` as its command line, as ps, top and nvidia-smi do.

    The kernel cuts the name to 15 bytes. The title overwrites the arguments and is cut to their length. The environment
    behind them stays, because jaxrun finds the processes of a job by it. (setproctitle would move the environment, and
    takes 10 to 50 ms to import.)
    """
    _raise_on_error(_libc.prctl(_PR_SET_NAME, os.fsencode(name), 0, 0, 0), "prctl(PR_SET_NAME)")
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if start:  # 0 where the kernel hides it
        shown = os.fsencode(title)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, shown, len(shown))


def become_simulated_host(name: str, boot_id: str) -> None:
    """Give this process its own host name and boot id, which JAX uses to distinguish hosts.

    Works without root if user namespaces are allowed. Must be called while there is only one thread. Raises OSError if
    the machine forbids it; the process may then be in some new namespaces, which does no harm.
    """
    uid, gid = os.getuid(), os.getgid()
    _raise_on_error(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | (_CLONE_NEWUSER if uid else 0)), "unshare")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    socket.sethostname(name)
    _raise_on_error(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make / private")
    # The bind mount keeps the deleted file alive. (A memfd cannot be mounted.)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{uuid.UUID(boot_id)}\n")
        file.flush()
        _raise_on_error(_libc.mount(os.fsencode(file.name), _BOOT_ID, None, _MS_BIND, None), "mount over boot_id")


def tcp_connections() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process. The caller closes it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


def peer_pid(channel: socket.socket) -> int:
    """Return the id of the process that made a socket pair; 0 if that process is outside our process namespace."""
    return int.from_bytes(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)


def file_identity(fd: int) -> tuple[int, int]:
    """Return the file's device and inode. They change if the program closes a descriptor and its number is reused."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def flush_c_output() -> None:
    """Flush C's stdout. os._exit would lose its buffer."""
    # Not fflush(NULL), which blocks while a thread reads from another stream.
    _libc.fflush(ctypes.c_void_p.in_dll(_libc, "stdout"))


def _raise_on_error(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
