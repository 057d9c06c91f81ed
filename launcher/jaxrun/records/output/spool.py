"""Delivers bytes to a screen that may be slow, stuck or gone: writing to a spool never blocks and loses nothing.

Each spool has a thread that writes. Unwritten bytes wait in memory and, beyond `memory` bytes, in unlinked temporary
files. The spool is `full` only if the disk accepts no more. The descriptor's flags are left alone, because the process
that started jaxrun shares them.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from pathlib import Path
from typing import IO

MEMORY_BYTES = 8 * 2**20
SEGMENT_BYTES = 64 * 2**20  # of a temporary file, which is closed once it was read
READ_BACK_BYTES = 2**20
GATHER_BYTES = 2**16  # small pieces are joined up to this size; larger ones are written as they are, without a copy
GATHER_S = 0.001  # how long the first small piece waits for others


class _Segment:
    """A temporary file without a name: written at its end, read from its start."""

    def __init__(self, directory: Path | None) -> None:
        import tempfile  # takes 5 ms, and is needed only where output is slow

        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self.written = 0
        self._read = 0

    def append(self, data: bytes) -> None:
        """Append `data`. Raises OSError if the disk does not accept all of it; then the file contains none of it."""
        end, view = self.written, memoryview(data)
        while view:
            count = os.pwrite(self._file.fileno(), view, end)
            end, view = end + count, view[count:]
        self.written = end

    def read(self) -> bytes:
        data = os.pread(self._file.fileno(), min(READ_BACK_BYTES, self.written - self._read), self._read)
        self._read += len(data)
        return data

    @property
    def drained(self) -> bool:
        return self._read == self.written

    def close(self) -> None:
        self._file.close()


class Spool:
    """Delivers bytes to `fd`, in order, from a thread that starts with the first byte.

    `error` is None until the descriptor refuses to take more (its reader has gone, its disk is full); from
    then on everything is dropped.
    """

    def __init__(self, fd: int, *, memory: int = MEMORY_BYTES, directory: Path | None = None) -> None:
        self._fd = fd
        self._memory = memory
        self._directory = directory
        self._changed = threading.Condition()
        self._head: deque[bytes] = deque()  # the oldest bytes, in memory
        self._head_size = 0
        self._segments: deque[_Segment] = deque()  # then what was spilled
        self._tail: deque[bytes] = deque()  # newest: could not be spilled
        self._undelivered = 0
        self._idle = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None

    @property
    def full(self) -> bool:
        """Whether neither memory nor disk accepts more; later bytes are kept all the same, beyond the limit."""
        return bool(self._tail)

    def write(self, data: bytes) -> None:
        with self._changed:
            if self.error is not None:
                return
            if self._thread is None:  # first: without a thread, nothing would ever be delivered
                thread = threading.Thread(target=self._deliver, name=f"spool-{self._fd}", daemon=True)
                thread.start()
                self._thread = thread
            self._undelivered += len(data)
            self._tail.append(data)
            self._store_newest()
            self._closing = False
            if self._idle:
                self._idle = False
                self._changed.notify_all()

    def close(self, timeout: float | None = None) -> bool:
        """Wait until everything is delivered or refused; returns False if `timeout` seconds were too few.

        May be called again; bytes that are written later are delivered, too.
        """
        # Not Thread.join: if a signal handler raises during it, Python 3.11 considers the thread to have ended.
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._undelivered == 0, timeout)

    def _store_newest(self) -> None:
        """Move the newest bytes to memory or disk, in order, as far as there is room."""
        while self._tail:
            data = self._tail[0]
            room = not self._head or self._head_size + len(data) <= self._memory
            if room and not self._segments:
                self._head.append(data)
                self._head_size += len(data)
            elif not self._spill(data):
                return
            self._tail.popleft()

    def _spill(self, data: bytes) -> bool:
        try:
            if not self._segments or self._segments[-1].written >= SEGMENT_BYTES:
                self._segments.append(_Segment(self._directory))
            self._segments[-1].append(data)
        except OSError:
            while self._segments and self._segments[-1].drained:
                self._segments.pop().close()
            return False
        return True

    def _deliver(self) -> None:
        try:
            data = b""
            while data := self._next_data(delivered=len(data)):
                _write(self._fd, data)
        except OSError as error:
            with self._changed:
                self.error = error
                self._head.clear()
                self._tail.clear()
                while self._segments:
                    self._segments.pop().close()
                self._undelivered = 0
                self._changed.notify_all()

    def _next_data(self, delivered: int) -> bytes:
        """Wait for the next bytes to write; empty at the end."""
        with self._changed:
            self._undelivered -= delivered
            while not self._head and not self._segments:
                if self._closing:
                    self._thread = None
                    self._changed.notify_all()
                    return b""
                self._idle = True
                self._changed.wait()
                if self._head_size < GATHER_BYTES and not self._closing:
                    self._changed.wait(GATHER_S)
            data = self._gather() if self._head else self._read_back()
            self._store_newest()
            return data

    def _gather(self) -> bytes:
        parts = [self._head.popleft()]
        size = len(parts[0])
        while self._head and size + len(self._head[0]) <= GATHER_BYTES:
            parts.append(self._head.popleft())
            size += len(parts[-1])
        self._head_size -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_back(self) -> bytes:
        data = self._segments[0].read()
        if self._segments[0].drained:
            self._segments.popleft().close()
        return data


def _write(fd: int, data: bytes) -> None:
    """Write all of `data`, even if another process has made the descriptor non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
