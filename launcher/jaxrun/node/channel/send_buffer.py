"""Bytes that the other end has not taken yet. All that is sent without blocking goes through such a buffer:

    framed_connection   between agents and head, and clients of a running job's socket
    http_server         answers to browsers and to Prometheus
    ssh/session         input of an ssh
    nccl_service        a question to NCCL

A gang's messages do not: they travel as pieces of memory with file descriptors (gang_connection.py of the protocol).
"""

from __future__ import annotations

from collections.abc import Callable


class SendBuffer:
    """Bytes in the order in which they are sent, as far as that has not happened; sending never blocks."""

    def __init__(self, write: Callable[[bytearray], int]) -> None:
        """`write` sends as much as fits, and returns how much that was; it raises BlockingIOError, or OSError."""
        self._write = write
        self._unsent = bytearray()
        self.sent_bytes = 0  # in total

    def __len__(self) -> int:
        return len(self._unsent)

    def add(self, data: bytes) -> None:
        self._unsent += data

    def flush(self) -> bool:
        """Send what fits now; returns whether nothing is left. Raises OSError if the other end is gone."""
        while self._unsent:
            try:
                count = self._write(self._unsent)
            except BlockingIOError:
                return False
            self.sent_bytes += count
            del self._unsent[:count]
        return True

    def clear(self) -> None:
        self._unsent.clear()
