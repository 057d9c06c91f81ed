"""The last lines of each rank's stderr, kept at hand for its verdict."""

from __future__ import annotations

TAIL = 4096  # bytes


class Tails:
    """By rank."""

    def __init__(self) -> None:
        self._data: dict[int, bytes] = {}

    def keep(self, rank: int, data: bytes) -> None:
        """What it has just written."""
        self._data[rank] = (self._data.get(rank, b"") + data[-TAIL:])[-TAIL:]

    def text(self, rank: int) -> str:
        """The last lines, at most `TAIL` bytes."""
        data = self._data.get(rank, b"")
        if len(data) == TAIL:
            data = data[data.find(b"\n") + 1 :]
        return data.decode(errors="replace")
