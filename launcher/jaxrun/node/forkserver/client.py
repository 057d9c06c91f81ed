"""Starts a fork server and asks it for workers.

Most jobs start theirs before most of the launcher is imported, which then happens in the shadow of the server's own,
longer import of jax: so this module imports no more than it must.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxrun.node.early_signals import given_mask
from jaxrun.protocol.worker_command import runtime_directory

if TYPE_CHECKING:
    from jaxrun.protocol.forkserver_messages import ForkDeclined, Preload, Preloaded, WorkerForked

    Answer = Preloaded | WorkerForked | ForkDeclined

_RECEIVE_BYTES = 65536
# Prefixes of what an interpreter, or its C library, reads when it starts, and of what jax and numpy read when they are
# imported. The fork server sets the options of JAX that are excepted itself.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ")
_READ_AT_IMPORT = ("JAX_", "NPY_", "NUMPY_")
_SET_AFTER_IMPORT = frozenset(("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"))


class ForkServer:
    """A running fork server, whose environment is `environ`.

    directory: where the workers are to run, for a server that was `inherited`: another process has made it, with jax
               in it, so its workers do not carry the job's mark
    """

    def __init__(self, pid: int, channel: socket.socket, environ: Mapping[str, str], directory: str = "") -> None:
        self.pid = pid
        self.channel = channel
        self.inherited = bool(directory)
        self._environ = environ
        self._directory = directory

    def configure(self, program: Sequence[str], environ: Mapping[str, str]) -> bool:
        """Name the program of the workers and their environment; False if the server cannot change its own to that.

        To be called once, first of all. Raises OSError if the server has gone or the message is too long.
        """
        from jaxrun.protocol.codec import encode
        from jaxrun.protocol.forkserver_messages import ConfigureForkServer

        values, unset = difference(self._environ, environ)
        if any(is_fixed(name, jax_imported=self.inherited) for name in (*values, *unset)):
            return False
        self.channel.send(encode(ConfigureForkServer(tuple(program), values, unset, self._directory)))
        return True

    def preload(self, order: Preload) -> None:
        """Make the server import these modules before the first worker. Raises OSError if the server has gone."""
        from jaxrun.protocol.codec import encode

        self.channel.send(encode(order))

    def send(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Ask for a worker, which gets copies of the descriptors. Raises ConnectionError if the server has gone."""
        socket.send_fds(self.channel, [message], descriptors)

    def begin_attempt(self, workers: int) -> None:
        """Make the server stay after the next `workers` workers. Raises OSError if it has gone."""
        from jaxrun.protocol.codec import encode
        from jaxrun.protocol.forkserver_messages import BeginAttempt

        self.channel.send(encode(BeginAttempt(workers)))

    @property
    def closed(self) -> bool:
        return self.channel.fileno() < 0

    @property
    def has_gone(self) -> bool:
        """Whether the server has ended while nothing was asked of it."""
        try:
            return not self.channel.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self) -> list[Answer | None]:
        """The answers that have arrived; None, as the last, when the server has gone."""
        from jaxrun.protocol.forkserver_messages import (
            ForkDeclined,
            ForkServerMessageDecoder,
            Preloaded,
            WorkerForked,
        )

        answers: list[Answer | None] = []
        while True:
            try:
                data = self.channel.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return answers
            except ConnectionResetError:
                continue  # it left requests unread; reported once, before the answers that it sent
            if not data:
                return [*answers, None]
            (answer,) = ForkServerMessageDecoder().feed(data)
            assert isinstance(answer, (Preloaded, WorkerForked, ForkDeclined))
            answers.append(answer)

    def close(self) -> None:
        """Close the channel; the server ends, and its workers become children of the nearest subreaper."""
        self.channel.close()


def difference(own: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables to set and those to unset, to make `wanted` of `own`."""
    values = {name: value for name, value in wanted.items() if own.get(name) != value}
    return values, tuple(sorted(own.keys() - wanted.keys()))


def open_standard_descriptors() -> None:
    """Open 0, 1 and 2 if this process has closed one: nothing else may get its number and, say, a worker's output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def is_fixed(name: str, *, jax_imported: bool) -> bool:
    """Whether a variable of a running fork server can no longer be changed."""
    if name.startswith(_READ_AT_START):
        return True
    return jax_imported and name.startswith(_READ_AT_IMPORT) and name not in _SET_AFTER_IMPORT


def start(python: str, environ: Mapping[str, str]) -> ForkServer:
    """Start a server for workers with the interpreter `python`; to be configured. Raises OSError if that fails."""
    return ForkServer(*start_server(python, environ, "workers"), environ)


def start_server(python: str, environ: Mapping[str, str], role: str, *modules: str) -> tuple[int, socket.socket]:
    """Start a fork server in a `role` of its command line; returns its process id and channel. Raises OSError.

    The server inherits stderr; its stdin and stdout are /dev/null. SIGINT is blocked in it.
    """
    ours, theirs = _channel()
    os.set_inheritable(theirs.fileno(), True)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        argv = (python, runtime_directory("forkserver"), str(theirs.fileno()), role, *modules)
        return start_process(argv, environ, (null, null), holds_interrupts=True), ours
    except BaseException:
        ours.close()
        raise
    finally:
        os.close(null)
        theirs.close()


def _channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def reap(pid: int, timeout: float) -> None:
    """Wait for the end of a child that was told to end; kill it after `timeout` seconds, as one that is stopped."""
    with contextlib.suppress(OSError):  # it was reaped already
        child = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(child, select.POLLIN)
            if not poll.poll(timeout * 1000):
                signal.pidfd_send_signal(child, signal.SIGKILL)
        finally:
            os.close(child)
        os.waitpid(pid, 0)


def start_process(
    argv: Sequence[str], environ: Mapping[str, str], streams: tuple[int, ...], *, holds_interrupts: bool = False
) -> int:
    """Start `argv` in its own session, with `streams` as its first descriptors; returns its process id. OSError.

    It gets the signal mask that this process was given.

    holds_interrupts:  SIGINT is blocked, too: the process unblocks it once it handles it
    """
    actions = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(streams)]
    # Python ignores the first two, and no other program does. Whoever ignores SIGCHLD cannot wait for its children.
    default = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
    mask = {*given_mask(), *((signal.SIGINT,) if holds_interrupts else ())}
    return os.posix_spawn(
        argv[0], list(argv), environ, file_actions=actions, setsid=True, setsigdef=default, setsigmask=mask
    )
