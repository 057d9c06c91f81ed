"""The process that starts the launchers of this process's gangs: one for each environment that jax would read.

It has imported jax before the first gang, so that no later one has to. It ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrun import RUNTIME
from jaxrun.errors import UnavailableError
from jaxrun.forkserver.client import start_process
from jaxrun.forkserver.early import APPLIED_AFTER_IMPORT, READ_AT_IMPORT, READ_AT_START
from jaxrun.job import interpreter
from jaxrun.protocol import ForkDeclined, LauncherStarted, StartLauncher, WorkerMessageDecoder, encode
from jaxrun.protocol.names import SHUTDOWN_BYTE

_PIECE = 65536
_SLOW_IMPORTS = ("pytest",)  # slow to import; where this process has them, the ranks will want them
_MAX_REQUEST_BYTES = 2**17  # bytes that may go to it in one message
_lock = threading.Lock()
_pools: dict[tuple[object, ...], LauncherPool] = {}


@dataclass(frozen=True, slots=True)
class StartedLauncher:
    """A launcher: its process id, and a descriptor of the process, which is readable once it has ended."""

    pid: int
    pidfd: int


class LauncherPool:
    """This process's handle on one. Threads may use it."""

    def __init__(self, environ: Mapping[str, str], *, bare: bool) -> None:
        """`bare`: without jax. OSError if it cannot be started."""
        self._environ = {**environ, **interpreter.interpreter_settings(environ)}
        self._owner = os.getpid()
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(theirs.fileno(), True)
        more = ("bare",) if bare else tuple(name for name in _SLOW_IMPORTS if name in sys.modules)
        argv = (sys.executable, "-P", "-m", f"{RUNTIME}.nursery", str(theirs.fileno()), *more)
        try:
            self.pid = start_process(argv, self._environ, (null, null))
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(null)
            theirs.close()
        self._channel = ours
        self._owes = False

    @property
    def usable(self) -> bool:
        return self._owner == os.getpid() and self._channel.fileno() >= 0

    def start(self, words: Sequence[str], environ: Mapping[str, str], stderr: int, control: int) -> StartedLauncher:
        """Start `jaxrun WORDS` in the current directory. UnavailableError if jax, or anything, is missing."""
        wanted = {**environ, **interpreter.interpreter_settings(environ)}
        values = {name: value for name, value in wanted.items() if self._environ.get(name) != value}
        unset = tuple(sorted(self._environ.keys() - wanted.keys()))
        frame = encode(StartLauncher(tuple(words), os.getcwd(), values, unset))
        if len(frame) > _MAX_REQUEST_BYTES:
            raise UnavailableError(
                f"the command line and what has changed in the environment take {len(frame)} bytes; "
                f"at most {_MAX_REQUEST_BYTES} can be handed over"
            )
        with self._lock:
            try:
                if self._owes:
                    for descriptor in self._answer()[1]:  # its job has ended, as nobody holds its control line
                        os.close(descriptor)
                socket.send_fds(self._channel, [frame], [stderr, control])
                self._owes = True
                answer, descriptors = self._answer()
            except OSError as error:
                answer, descriptors = b"", []
                reason = f": {error.strerror}"
            else:
                reason = ""
        if not answer:
            self.close()
            raise UnavailableError(f"the process that starts gangs has ended{reason}; its last words are on stderr")
        (said,) = WorkerMessageDecoder().feed(answer)
        if isinstance(said, ForkDeclined):
            self.close()
            raise UnavailableError(f"jax could not be imported: {said.reason}\nis it installed for {sys.executable}?")
        assert isinstance(said, LauncherStarted)
        return StartedLauncher(said.pid, descriptors[0])

    def _answer(self) -> tuple[bytes, list[int]]:
        """Its answer; one that is not waited for, because of a Ctrl-C, it owes to the next who asks."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.poll()
        answer, descriptors, _, _ = socket.recv_fds(self._channel, _PIECE, 1)
        self._owes = False
        return answer, descriptors

    def close(self) -> None:
        """It ends, and all launchers that it has started; in a fork of its owner, nothing does. May be called again."""
        if self.usable:
            with contextlib.suppress(OSError):
                self._channel.send(SHUTDOWN_BYTE)
            self._channel.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self._channel.close()


def pool_for(environ: Mapping[str, str], *, bare: bool) -> LauncherPool:
    """The one for this environment, which is started when it is asked for first."""
    key = (bare, sys.executable, *sorted(pair for pair in environ.items() if _matters(pair[0])))
    with _lock:
        found = _pools.get(key)
        if found is None or not found.usable:
            if found is not None:
                found.close()
            found = _pools[key] = LauncherPool(environ, bare=bare)
        return found


def close_all() -> None:
    """End all nurseries of this process."""
    with _lock:
        while _pools:
            _, found = _pools.popitem()
            if found.usable:
                found.close()


def _matters(name: str) -> bool:
    return name.startswith((*READ_AT_START, *READ_AT_IMPORT)) and name not in APPLIED_AFTER_IMPORT


atexit.register(close_all)
