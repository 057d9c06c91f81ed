"""Compiled programs that the ranks of one host share in memory: files in a directory, without any server.

| name          | content                                                                                  |
|---------------|------------------------------------------------------------------------------------------|
| KEY           | a program; empty if it cannot be shared, so that each rank compiles it                    |
| KEY.claim     | a link to the process id of the rank that compiles the program, or has compiled it        |
| a draft       | a program that is being written (jaxrun.files.own_files)                              |
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxrun.files import procfs
from jaxrun.files.own_files import write_whole_file
from jaxrun.files.shared_memory import open_shared_directory

_NOT_SHARED = b""
NOBODY = -1
IDLE_S = 0.25
IDLE_SHARE = 0.25
_LOOK_EVERY_S = 0.1  # between two looks at the rank that compiles; a look costs about half a millisecond
_LOOK_SHARE = 0.1  # of the time waited so far, if that is longer than _LOOK_EVERY_S
_MAX_BYTES = 512 * 2**20
_MODE = 0o600
_CLAIM = ".claim"
_FILE_SYSTEM_SHARE = 8  # use at most 1/8 of /dev/shm, which may be small, and others need it
_LOOKS_PER_BOUND = 16  # the sizes of all files are read this many times while `max_bytes` are written
_FIRST_PAUSE_S, _PAUSE_GROWTH, _MAX_PAUSE_S = 0.001, 1.15, 0.02


class SharedPrograms:
    """The programs in the shared directory `name`, to which all `ranks` of this host write; used by one rank.

    They take at most `max_bytes`, and at most an eighth of the file system. The first use makes the directory. No
    method raises OSError: a file that cannot be read counts as missing, and a program that cannot be written is not
    shared.
    """

    def __init__(self, name: str, ranks: int, max_bytes: int = _MAX_BYTES) -> None:
        self._name = name
        self._look_every = 1.0 / (_LOOKS_PER_BOUND * ranks)
        self._max_bytes = max_bytes
        self._unseen_bytes = 0
        self._opened: int | None = None

    @property
    def _directory(self) -> int:
        """A descriptor of the directory; -1, which every system call refuses, if it cannot be used."""
        if self._opened is None:
            self._opened = -1
            with contextlib.suppress(OSError):
                self._opened = open_shared_directory(self._name)
                found = os.fstatvfs(self._opened)
                self._max_bytes = min(self._max_bytes, found.f_frsize * found.f_blocks // _FILE_SYSTEM_SHARE)
        return self._opened

    def read(self, key: str) -> bytes | None:
        """Return the program: empty if it cannot be shared, None if no rank has written it yet."""
        try:
            with open(os.open(key, os.O_RDONLY, dir_fd=self._directory), "rb") as file:
                return file.read()
        except OSError:
            return None

    def claim(self, key: str) -> int:
        """Claim the program: this rank compiles it for all.

        Returns 0, or the process id of the rank that has claimed it before; NOBODY if that cannot be known.
        """
        try:
            os.symlink(str(os.getpid()), key + _CLAIM, dir_fd=self._directory)
            return 0
        except FileExistsError:
            return self._claimant(key)
        except OSError:
            return NOBODY

    def wait_for(self, key: str, pid: int) -> bytes | None:
        """Wait until the rank `pid` has written the program, and return it; None if waiting is not worth it."""
        compiling, pause = CompilingRank(pid), _FIRST_PAUSE_S
        while (content := self.read(key)) is None and compiling.is_worth_waiting_for():
            if pause == _MAX_PAUSE_S and self._claimant(key) != pid:  # the claim was deleted
                break
            time.sleep(pause)
            pause = min(pause * _PAUSE_GROWTH, _MAX_PAUSE_S)
        return self.read(key) if content is None else content  # the rank may have exited right after writing

    def write(self, key: str, content: bytes) -> None:
        if len(content) * 4 <= self._max_bytes:
            self._make_room(len(content))
            with contextlib.suppress(OSError):
                write_whole_file(key, content, _MODE, self._directory)
                return
        self.refuse(key)

    def refuse(self, key: str) -> None:
        """Mark the program as one that each rank must compile itself."""
        try:
            write_whole_file(key, _NOT_SHARED, _MODE, self._directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(key + _CLAIM, dir_fd=self._directory)

    def _claimant(self, key: str) -> int:
        try:
            return int(os.readlink(key + _CLAIM, dir_fd=self._directory))
        except (OSError, ValueError):
            return NOBODY

    def _make_room(self, size: int) -> None:
        """Delete the oldest programs if there are too many, with their claims, so that no rank waits for them."""
        self._unseen_bytes += size
        if self._unseen_bytes < self._max_bytes * self._look_every:
            return
        self._unseen_bytes, directory = 0, self._directory
        with contextlib.suppress(OSError):
            files = list_stored(directory)
            programs = [file for file in files if file.size and "." not in file.name]
            for name in choose_oldest(programs, size + sum(file.size for file in files), self._max_bytes):
                for file in (name, name + _CLAIM):
                    with contextlib.suppress(FileNotFoundError):  # another rank makes room, too
                        os.unlink(file, dir_fd=directory)


# ---- how long a rank waits for another rank that compiles the same program


class CompilingRank:
    """The rank with process id `pid`, while another rank waits for the program that it compiles.

    Waiting is worth it while the rank works: it runs, or waits for a core, which the waiting rank would not get either.
    Waiting ends if the rank has ended, or has stood still (stopped, swapped out, blocked) for longer than `IDLE_S` plus
    `IDLE_SHARE` of the time that it has worked. A working rank needs no longer than the waiting rank would need itself,
    so waiting in vain costs at most `IDLE_S` plus 1 + `IDLE_SHARE` times that.

    worked:  returns how many seconds all its threads have run or waited for a core; None if it has ended
    clock:   returns seconds
    """

    def __init__(
        self,
        pid: int,
        worked: Callable[[int], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._worked = worked or seconds_worked
        self._clock = clock
        self._looked_at = clock()
        self._before: float | None = None
        self._busy_s = self._idle_s = 0.0

    def is_worth_waiting_for(self) -> bool:
        passed = self._clock() - self._looked_at
        if passed < max(_LOOK_EVERY_S, _LOOK_SHARE * (self._busy_s + self._idle_s)):
            return True
        now = self._worked(self._pid)
        if now is None:
            return False
        # Several threads count as no more than the time that has passed. Work before the first look is unknown.
        busy = 0.0 if self._before is None else min(passed, max(0.0, now - self._before))
        self._busy_s += busy
        self._idle_s += passed - busy
        self._looked_at += passed
        self._before = now
        return self._idle_s <= IDLE_S + IDLE_SHARE * self._busy_s


def seconds_worked(pid: int) -> float | None:
    """Return how many seconds all threads of the process together have run or waited for a core; None if it ended."""
    scheduled = procfs.scheduled_seconds(pid)
    return None if scheduled is None else sum(scheduled)


# ---- which files are deleted when a directory of compiled programs has too many


class StoredFile(NamedTuple):
    """A file of the directory; `written` in seconds since the epoch, `size` in bytes."""

    written: float
    size: int
    name: str


def list_stored(directory: int) -> list[StoredFile]:
    """Return all files of the directory, without following links. Raises OSError."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has just renamed or deleted it
                status = entry.stat(follow_symlinks=False)
                found.append(StoredFile(status.st_mtime, status.st_size, entry.name))
    return found


def choose_oldest(files: Sequence[StoredFile], total_bytes: int, max_bytes: int) -> list[str]:
    """Return the names of files to delete: the oldest, until a quarter of `max_bytes` is free; none if there is room.

    total_bytes:  bytes in use, by these files and all others
    """
    chosen: list[str] = []
    to_delete = total_bytes - max_bytes + max_bytes // 4 if total_bytes > max_bytes else 0
    for file in sorted(files):
        if to_delete <= 0:
            break
        chosen.append(file.name)
        to_delete -= file.size
    return chosen
