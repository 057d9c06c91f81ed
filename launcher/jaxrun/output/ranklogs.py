"""One file per rank and stream with its exact bytes. A disk that fails costs logs, never the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def log_path(log_dir: Path, rank: int, stream: str) -> Path:
    """Where the bytes of a rank's "out" or "err" are kept."""
    return log_dir / f"rank-{rank:04d}.{stream}"


class RankLogs:
    """The open files; `report` is told each cause of a failure once, and the file that failed is given up."""

    def __init__(self, log_dir: Path, voices: Iterable[tuple[int, str]], report: Callable[[str], None]) -> None:
        self._dir = log_dir
        self._report = report
        self._reported: set[int | None] = set()
        self._fds: dict[tuple[int, str], int] = {}
        for rank, stream in voices:
            try:
                self._fds[rank, stream] = os.open(log_path(log_dir, rank, stream), _FLAGS, 0o666)
            except OSError as error:
                self._failed(rank, stream, error)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        fd = self._fds.get((rank, stream))
        if fd is None:
            return
        try:
            written = os.write(fd, data)
            while written < len(data):
                written += os.write(fd, memoryview(data)[written:])
        except OSError as error:
            self._give_up(rank, stream)
            self._failed(rank, stream, error)

    def close(self) -> None:
        for rank, stream in list(self._fds):
            self._give_up(rank, stream)

    def _give_up(self, rank: int, stream: str) -> None:
        try:
            os.close(self._fds.pop((rank, stream)))
        except OSError as error:  # NFS says only here that the disk is full
            self._failed(rank, stream, error)

    def _failed(self, rank: int, stream: str, error: OSError) -> None:
        if error.errno not in self._reported:
            self._reported.add(error.errno)
            self._report(
                f"jaxrun: cannot write {log_path(self._dir, rank, stream)}: {error.strerror}; "
                "logs that fail so are given up, the job goes on"
            )
