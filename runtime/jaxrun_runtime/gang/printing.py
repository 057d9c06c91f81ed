"""Sends the output of Python code to the caller of a function, in addition to printing it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxrun.protocol.gang_messages import GangMessageKind

Send = Callable[[GangMessageKind, str], None]


class PrintForwarding:
    """A context manager that passes everything printed to `send` as well."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def __enter__(self) -> None:
        self._before = sys.stdout, sys.stderr
        sys.stdout = _ForwardingStream(sys.stdout, self._send, GangMessageKind.STDOUT)
        sys.stderr = _ForwardingStream(sys.stderr, self._send, GangMessageKind.STDERR)

    def __exit__(self, *about: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        sys.stdout, sys.stderr = self._before


class _ForwardingStream(io.TextIOBase):
    """A text stream whose lines are also sent to the caller."""

    def __init__(self, stream: Any, send: Send, kind: GangMessageKind) -> None:
        self._stream = stream
        self._send = send
        self._kind = kind
        self._line = ""
        self._owner = os.getpid()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def write(self, text: str) -> int:
        self._stream.write(text)
        self._line += text
        if "\n" in text or "\r" in text:
            self._forward()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
        if self._line:
            self._forward()

    def _forward(self) -> None:
        text, self._line = self._line, ""
        if os.getpid() == self._owner:  # not in a process that the function has forked
            self._send(self._kind, text)
