"""Signals as events: within a `with SignalPipe(…)`, those that arrive are read from a descriptor."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterable, Iterator
from types import FrameType

LAUNCHER_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGALRM,  # of a timer that a program has set before it became jaxrun: timers outlive exec
    signal.SIGXCPU,
)
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGXCPU)


class SignalPipe:
    """Context manager that makes these signals readable.

    Signals that the launcher was started to ignore (nohup, a shell's `&`) stay ignored; all but SIGCHLD, as a process
    that ignores it does not learn how its children end.
    """

    def __init__(self, signums: Iterable[int]) -> None:
        ignored = {number for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}
        self._signums = set(signums) - (ignored - {signal.SIGCHLD})
        self._is_over = False
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)

    def __enter__(self) -> SignalPipe:
        with self._held_back():
            self._wakeup_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _ignore) for number in self._signums}
        return self

    def __exit__(self, *args: object) -> None:
        """Restore the handlers, and hand over stop signals that nobody has received; not after `ignore_rest`."""
        with self._held_back():
            for number, handler in self._before.items():
                if not (self._is_over and number in STOPPING):
                    signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            unread = [] if self._is_over else self.receive()
        self._reading.close()
        self._writing.close()
        for number in unread:
            if number in STOPPING:
                signal.raise_signal(number)

    @contextlib.contextmanager
    def _held_back(self) -> Iterator[None]:
        """Block the signals while they change their owner: otherwise both would learn of one, or neither."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signums)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ignore_rest(self) -> None:
        """Have stop signals do nothing from now on, also after the block: it is decided how this process ends."""
        self._is_over = True

    def fileno(self) -> int:
        return self._reading.fileno()

    def asks_to_stop(self, signum: int) -> bool:
        """Whether this signal asks the process to end."""
        return signum in STOPPING

    def receive(self) -> list[int]:
        """Return the signals that have arrived since the last call, in order."""
        try:
            arrived = self._reading.recv(4096)
        except BlockingIOError:
            return []
        # Python writes every signal that has a handler, including handlers that others have installed.
        return [number for number in arrived if number in self._signums]

    def put_back(self, signums: Iterable[int]) -> None:
        """Make `receive` return these again, after any that have arrived meanwhile."""
        with contextlib.suppress(BlockingIOError):  # thousands have arrived meanwhile
            self._writing.send(bytes(signums))


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the number to the wakeup descriptor already."""
