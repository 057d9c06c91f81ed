"""Signals as events: while the block runs, those that arrive can be read from a descriptor."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable
from types import FrameType

from jaxrun.diagnosis.stacks import NATIVE_STACKS_SIGNAL
from jaxrun.protocol.env import STACKS_SIGNAL

LAUNCHER_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    STACKS_SIGNAL,
    NATIVE_STACKS_SIGNAL,
)


class SignalPipe:
    """Context manager. Signals that the launcher was told to ignore (nohup, a shell's `&`) stay ignored.

    All but SIGCHLD: a process that ignores it is not told of its children's ends.
    """

    def __init__(self, signums: Iterable[int]) -> None:
        ignored = {number for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}
        self._signums = set(signums) - (ignored - {signal.SIGCHLD})
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)

    def __enter__(self) -> SignalPipe:
        self._wakeup_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in self._signums}
        return self

    def __exit__(self, *args: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reading.close()
        self._writing.close()

    def fileno(self) -> int:
        return self._reading.fileno()

    def receive(self) -> list[int]:
        """The numbers that have arrived since the last call, in order."""
        try:
            arrived = self._reading.recv(4096)
        except BlockingIOError:
            return []
        # Python notes every signal that has a handler, also one that somebody else has installed.
        return [number for number in arrived if number in self._signums]


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Python has written the number to the wakeup descriptor before it gets here."""
