"""What is kept at hand of each rank's output: the last lines of its stderr, for the verdict, and how much it was."""

from __future__ import annotations

TAIL_BYTES = 4096  # bytes


class StderrTails:
    """By rank."""

    def __init__(self) -> None:
        self._data: dict[int, bytes] = {}
        self._count: dict[int, int] = {}

    def add(self, rank: int, stream: str, data: bytes) -> None:
        """What it has just written to its "out" or "err"."""
        self._count[rank] = self._count.get(rank, 0) + len(data)
        if stream == "err":
            self._data[rank] = (self._data.get(rank, b"") + data[-TAIL_BYTES:])[-TAIL_BYTES:]

    def bytes_written(self, rank: int) -> int:
        """Bytes in all."""
        return self._count.get(rank, 0)

    def text(self, rank: int) -> str:
        """The last lines, at most `TAIL` bytes."""
        data = self._data.get(rank, b"")
        if len(data) == TAIL_BYTES:
            data = data[data.find(b"\n") + 1 :]
        return data.decode(errors="replace")
