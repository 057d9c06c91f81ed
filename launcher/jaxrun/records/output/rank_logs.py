"""Keeps each rank's output: log files with the exact bytes, and the end of its stderr in memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxrun.analysis.diagnosis.stacks import FATAL_ERROR
from jaxrun.files.own_files import open_own_directory
from jaxrun.files.regular_files import read_end
from jaxrun.terminal import without_colours

STREAMS = ("out", "err")
TAIL_BYTES = 4096
_KEPT_BYTES = 2**15  # of stderr: a fault handler's dump of many threads, with its list of extension modules
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def log_path(log_dir: Path, rank: int, stream: str) -> Path:
    """Return the path of the log file for a rank's "out" or "err"."""
    return log_dir / f"rank-{rank:04d}.{stream}"


class RankLogs:
    """One file per rank and stream, and the end of each rank's stderr. A failing disk costs logs, never the job."""

    def __init__(self, log_dir: Path | None, ranks: Iterable[int], report: Callable[[str], None]) -> None:
        """Open the files of `ranks`, and others when they are written to; with `log_dir` None, keep no files.

        `report` gets one line about each cause of a failure; a file that failed is abandoned.
        """
        self._dir = log_dir
        self._dir_fd = -1
        self._report = report
        self._reported: set[int | None] = set()
        self._fds: dict[tuple[int, str], int] = {}
        self._given_up: set[tuple[int, str]] = set()
        self._stderr: dict[int, bytes] = {}
        self._written: defaultdict[int, int] = defaultdict(int)
        if log_dir is not None:
            for rank in ranks:
                for stream in STREAMS:
                    self._open(log_dir, rank, stream)

    @property
    def has_files(self) -> bool:
        return self._dir is not None

    def read_stderr(self, rank: int) -> str:
        """Return the end of the rank's stderr from its file, which its agent may have written; empty without one."""
        if self._dir is None:
            return ""
        try:
            return read_end(log_path(self._dir, rank, "err"), TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def write(self, rank: int, stream: str, data: bytes) -> None:
        self.write_file(rank, stream, data)
        self._written[rank] += len(data)
        if stream == "err":
            self._stderr[rank] = (self._stderr.get(rank, b"") + data[-_KEPT_BYTES:])[-_KEPT_BYTES:]

    def write_file(self, rank: int, stream: str, data: bytes) -> None:
        """Write to the rank's file only."""
        if self._dir is None:
            return
        fd = self._fds.get((rank, stream)) or self._open(self._dir, rank, stream)
        if fd is None:
            return
        try:
            written = os.write(fd, data)
            while written < len(data):
                written += os.write(fd, memoryview(data)[written:])
        except OSError as error:
            self._give_up(rank, stream)
            self._report_failure(log_path(self._dir, rank, stream), error)

    def bytes_written(self, rank: int) -> int:
        """Return the number of bytes that the worker has written so far."""
        return self._written[rank]

    def stderr_tail(self, rank: int) -> str:
        """Return the last lines of the worker's stderr without colours, at most TAIL_BYTES."""
        data = self._stderr.get(rank, b"")
        if len(data) >= TAIL_BYTES:
            data = data[-TAIL_BYTES:]
            data = data[data.find(b"\n") + 1 :]
        return without_colours(data.decode(errors="replace"))

    def forget_stderr(self, rank: int) -> None:
        """Forget the end of the rank's stderr: another process of the rank writes from now on."""
        self._stderr.pop(rank, None)

    def crash_dump(self, rank: int) -> str:
        """Return the fault handler's dump on the worker's stderr, if the program has redirected it there."""
        data = self._stderr.get(rank, b"")
        start = data.rfind(FATAL_ERROR.encode())
        return data[start:].decode(errors="replace") if start >= 0 else ""

    def close(self) -> None:
        for rank, stream in list(self._fds):
            self._give_up(rank, stream)
        if self._dir_fd >= 0:
            os.close(self._dir_fd)
            self._dir_fd = -1

    def _open(self, log_dir: Path, rank: int, stream: str) -> int | None:
        if (rank, stream) in self._given_up:
            return None
        path = log_path(log_dir, rank, stream)
        try:
            if self._dir_fd < 0:
                self._dir_fd = open_own_directory(log_dir)
            fd = os.open(path.name, _FLAGS, 0o666, dir_fd=self._dir_fd)
        except OSError as error:
            self._given_up.add((rank, stream))
            self._report_failure(path, error)
            return None
        self._fds[rank, stream] = fd
        return fd

    def _give_up(self, rank: int, stream: str) -> None:
        self._given_up.add((rank, stream))
        try:
            os.close(self._fds.pop((rank, stream)))
        except OSError as error:  # on NFS, a full disk shows only here
            assert self._dir is not None
            self._report_failure(log_path(self._dir, rank, stream), error)

    def _report_failure(self, path: Path, error: OSError) -> None:
        if error.errno not in self._reported:
            self._reported.add(error.errno)
            self._report(f"jaxrun: cannot write {path}: {error.strerror}; such logs are abandoned, the job continues")
