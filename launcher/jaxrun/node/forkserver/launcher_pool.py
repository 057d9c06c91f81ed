"""The fork servers of a Python process with gangs, which start launchers: one for each environment that jax would read.

A server has imported jax before the first gang, so that no later one has to. It ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence

from jaxrun.errors import UnavailableError, describe_failed_import
from jaxrun.node.forkserver.client import difference, is_fixed, open_standard_descriptors, reap, start_server
from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import (
    ForkDeclined,
    ForkServerMessageDecoder,
    ImportedName,
    LauncherStarted,
    Preload,
    StartLauncher,
)
from jaxrun.protocol.names import SHUTDOWN_BYTE
from jaxrun.spec.job.environment import interpreter_variables
from jaxrun.spec.job.program_check import working_directory

_RECEIVE_BYTES = 65536
_MAX_REQUEST_BYTES = 2**17
_SLOW_IMPORTS = ("pytest",)  # where this process has them, the ranks will want them
_END_TIMEOUT_S = 1.0  # for a server to end; it may be importing jax for a gang that nobody waits for
_lock = threading.Lock()
_pools: dict[tuple[object, ...], LauncherPool] = {}
_ending_thread: int | None = None


class LauncherPool:
    """A fork server that starts launchers. Threads may use it."""

    def __init__(self, environ: Mapping[str, str], *, with_jax: bool) -> None:
        """Raises OSError if it cannot be started."""
        self._environ = {**environ, **interpreter_variables(environ)}
        self._owner = os.getpid()
        self._lock = threading.Lock()
        role = "launchers" if with_jax else "launchers-without-jax"
        modules = [name for name in _SLOW_IMPORTS if name in sys.modules]
        self.pid, self._channel = start_server(sys.executable, self._environ, role, *modules)
        self._unread_answer = False  # a Ctrl-C has interrupted the wait for it
        self._was_asked = False
        self._preloaded: dict[str, ImportedName] = {}

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that ranks of launchers to come find imported, as far as that is safe."""
        return tuple(dict.fromkeys(name.partition(":")[0] for name in self._preloaded))

    def preload(self, imports: Iterable[ImportedName], folder: str) -> None:
        """Have the server import these before it forks the next launcher; `folder` has the program's own modules.

        Returns at once. A server that has ended is reported by the next start.
        """
        with self._lock:
            new = {line.name: line for line in imports if line.name not in self._preloaded}
            if not new:
                return
            by_rank = WorkerEnv.names_by_rank(torch_env=False)
            with contextlib.suppress(OSError):
                self._channel.send(encode(Preload(tuple(new.values()), folder=folder, by_rank=by_rank)))
                self._preloaded |= new

    @property
    def usable(self) -> bool:
        return self._owner == os.getpid() and self._channel.fileno() >= 0

    def start(self, words: Sequence[str], environ: Mapping[str, str], stderr: int, control: int) -> tuple[int, int]:
        """Start `jaxrun WORDS` in the current directory; returns its process id, and a pidfd, readable at its end.

        Raises UnavailableError if jax, or anything, is missing.
        """
        wanted = {**environ, **interpreter_variables(environ)}
        frame = encode(StartLauncher(tuple(words), working_directory(), *difference(self._environ, wanted)))
        if len(frame) > _MAX_REQUEST_BYTES:
            raise UnavailableError(
                f"the command line and what has changed in the environment take {len(frame)} bytes; "
                f"at most {_MAX_REQUEST_BYTES} are possible"
            )
        reason = ""
        with self._lock:
            self._was_asked = True
            try:
                if self._unread_answer:
                    for descriptor in self._receive()[1]:  # its job has ended, as nobody holds its control socket
                        os.close(descriptor)
                socket.send_fds(self._channel, [frame], [stderr, control])
                self._unread_answer = True
                answer, descriptors = self._receive()
            except OSError as error:
                answer, descriptors, reason = b"", [], f": {error.strerror}"
            except ValueError:  # the end of this process has closed the channel meanwhile: poll refuses descriptor -1
                answer, descriptors = b"", []
        if not answer:
            leave_if_process_ends()
            self.close()
            raise UnavailableError(f"the process that starts gangs has ended{reason}; stderr shows its last output")
        (message,) = ForkServerMessageDecoder().feed(answer)
        if isinstance(message, ForkDeclined):
            self.close()
            raise UnavailableError(describe_failed_import(message.reason, sys.executable))
        assert isinstance(message, LauncherStarted)
        return message.pid, descriptors[0]

    def _receive(self) -> tuple[bytes, list[int]]:
        """The next answer and its descriptors; b"" if the server has ended."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.poll()
        answer, descriptors, _, _ = socket.recv_fds(self._channel, _RECEIVE_BYTES, 1)
        self._unread_answer = False
        return answer, descriptors

    def close(self) -> None:
        """End the server and all launchers that it has started; in a fork of its owner, end nothing. Repeatable."""
        if self.usable:
            with contextlib.suppress(OSError):
                if self._was_asked:
                    self._channel.send(SHUTDOWN_BYTE)
                else:
                    os.kill(self.pid, signal.SIGKILL)  # it may be busy with the import of jax
            self._channel.close()
            reap(self.pid, _END_TIMEOUT_S)
        self._channel.close()


def pool_for(environ: Mapping[str, str], *, with_jax: bool, preloads: bool = True) -> LauncherPool:
    """The pool for this environment, which is started when it is asked for first. Raises OSError if it cannot be.

    preloads:  whether the ranks may find more modules imported than those of jax
    """
    open_standard_descriptors()
    read_by_jax = sorted(pair for pair in environ.items() if is_fixed(pair[0], jax_imported=True))
    key = (with_jax, preloads, sys.executable, *read_by_jax)
    with _lock:
        found = _pools.get(key)
        if found is None or not found.usable:
            if found is not None:
                found.close()
            found = _pools[key] = LauncherPool(environ, with_jax=with_jax)
        return found


def begin_process_end() -> None:
    """From now on waits of other threads end: these are daemons, as Python has waited for all others."""
    global _ending_thread
    _ending_thread = threading.get_ident()


def leave_if_process_ends() -> None:
    """Raise SystemExit, which ends a thread without a word, if another thread has begun to end this process."""
    if _ending_thread not in (None, threading.get_ident()):
        raise SystemExit


def close_all() -> None:
    with _lock:
        while _pools:
            _, found = _pools.popitem()
            found.close()


atexit.register(close_all)
