"""The link to the Python process that started this launcher: what it wants, in lines of JSON.

    {"fault": "kill", "ranks": [1]}     as --chaos does: kill or pause, now
    {"signal": 12}                      to all workers; SIGINT, SIGUSR1 or SIGUSR2
    {"end": true}                       end the job, at once

End-of-file means the same as the last of them: the parent has died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

from jaxrun.controller.supervisor.dispatcher import Dispatcher
from jaxrun.errors import UsageError
from jaxrun.protocol.names import CONTROL_FD
from jaxrun.records.event_log.actions import Action, PrintLine
from jaxrun.records.event_log.events import FaultRequested, ParentExited, SignalRequested
from jaxrun.spec.job.fault_spec import FAULT_KINDS

_SIGNALS = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_READ_BYTES = 65536
_MAX_SHOWN = 200  # characters of a line that is not understood


class ParentLink:
    """The launcher's end of the link, an inherited descriptor."""

    def __init__(self, fd: int, dispatcher: Dispatcher) -> None:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        self._fd = fd
        self._dispatcher = dispatcher
        self._partial_line = b""

    @classmethod
    def from_env(cls, environ: Mapping[str, str], dispatcher: Dispatcher) -> ParentLink | None:
        """The link that `environ` names, if it does. UsageError where it names no open descriptor."""
        number = environ.get(CONTROL_FD)
        if number is None:
            return None
        try:
            return cls(int(number), dispatcher)
        except (ValueError, OSError):
            raise UsageError(f"{CONTROL_FD}={number!r} names no open descriptor; unset it") from None

    def fileno(self) -> int:
        return self._fd

    def receive(self) -> list[Action]:
        """Hand what has arrived to the head; returns its actions."""
        actions: list[Action] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = os.read(self._fd, _READ_BYTES)
                except ConnectionError:
                    data = b""
                if not data:
                    return [*actions, *self._on_end()]
                *lines, self._partial_line = (self._partial_line + data).split(b"\n")
                for line in filter(None, lines):
                    actions += self._handle_line(line)
        return actions

    def _handle_line(self, line: bytes) -> list[Action]:
        try:
            event = _parse_order(json.loads(line))
        except ValueError:
            event = None
        if event is None:
            text = repr(line.decode(errors="replace")[:_MAX_SHOWN])
            return [PrintLine(f"the process that started jaxrun has sent what is not understood: {text}")]
        return self._dispatcher.handle(event)

    def _on_end(self) -> list[Action]:
        # The number stays taken, by something that is never readable to the event loop.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, self._fd, inheritable=False)
        os.close(null)
        return self._dispatcher.handle(ParentExited("the end of the process that started it"))


def _parse_order(order: Any) -> FaultRequested | SignalRequested | ParentExited | None:
    match order:
        case {"fault": str(kind), "ranks": [*ranks], **rest} if kind in FAULT_KINDS and not rest:
            return FaultRequested(kind, tuple(ranks)) if all(type(rank) is int for rank in ranks) else None
        case {"signal": int(signum), **rest} if signum in _SIGNALS and not rest:
            return SignalRequested(signum)
        case {"end": True, **rest} if not rest:
            return ParentExited("the process that started it")
    return None
