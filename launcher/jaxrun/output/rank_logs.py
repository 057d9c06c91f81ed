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
    """The files, those of `voices` open from the start.

    `report` is told each cause of a failure once, and the file that failed is given up.
    """

    def __init__(self, log_dir: Path, voices: Iterable[tuple[int, str]], report: Callable[[str], None]) -> None:
        self._dir = log_dir
        self._report = report
        self._reported: set[int | None] = set()
        self._fds: dict[tuple[int, str], int] = {}
        self._given_up: set[tuple[int, str]] = set()
        for rank, stream in voices:
            self._open(rank, stream)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Into the rank's file, which is opened now if it has not been."""
        fd = self._fds.get((rank, stream)) or self._open(rank, stream)
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

    def _open(self, rank: int, stream: str) -> int | None:
        if (rank, stream) in self._given_up:
            return None
        try:
            fd = os.open(log_path(self._dir, rank, stream), _FLAGS, 0o666)
        except OSError as error:
            self._given_up.add((rank, stream))
            self._failed(rank, stream, error)
            return None
        self._fds[rank, stream] = fd
        return fd

    def _give_up(self, rank: int, stream: str) -> None:
        self._given_up.add((rank, stream))
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
