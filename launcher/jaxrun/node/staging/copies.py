"""The copies on this host's disk, in a directory of this user's own: each is there as a whole, or not at all.

    BASE/jaxrun-stage-UID/NAME/copy/…     the files
                              /paths      their paths, as programs may add others
                              /…          for each listing of a directory that was read, its hash

While a copy is written, it has the name of a draft. Whoever writes or uses one holds a shared lock on its directory;
what somebody has locked is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from jaxrun.protocol.own_files import draft_name, is_draft, open_private_directory, remove_directory
from jaxrun.protocol.staging import Stage

_KEPT = 8  # copies that nobody need use
_FREE_BYTES = 2**26  # that are left on the disk


class Copies:
    """The copies below one directory of a local disk; those that were found or added are in use by this process."""

    def __init__(self, base: str = "") -> None:
        """`base` is that of --stage-dir. Raises OSError, also where others could change the copies."""
        self.path = f"{base or os.environ.get('TMPDIR') or '/tmp'}/jaxrun-stage-{os.geteuid()}"
        self._locks: dict[str, int] = {}
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            self._directory = open_private_directory(self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None

    def find(self, name: str) -> str | None:
        """The directory of the copy of this name, if it is there."""
        with contextlib.suppress(OSError):
            if name not in self._locks:
                self._locks[name] = self._lock(name, fcntl.LOCK_SH)
                os.utime(self._locks[name])
            return f"{self.path}/{name}"
        return None

    def find_listing(self, listing: str) -> str | None:
        """The name of the copy of a directory whose listing has this hash, if it is there."""
        return next(filter(self.find, (mark.parent.name for mark in Path(self.path).glob(f"*/{listing}"))), None)

    def by_source(self, stage: Stage) -> dict[str, str]:
        """Where the copies of what is staged are that this host has."""
        found = [(one, directory) for one in stage.contents if (directory := self.find(one.name))]
        return {source: f"{directory}/copy" for one, directory in found for source in one.sources}

    def add(self, nbytes: int, write: Callable[[str], str], listing: str = "") -> str:
        """Make room for so many bytes, and have `write` fill a directory and return its name, that of a copy from then.

        Raises OSError, and whatever `write` raises; then nothing is left.
        """
        self._make_room(nbytes)
        draft = draft_name()
        os.mkdir(draft, 0o700, dir_fd=self._directory)
        lock = self._lock(draft, fcntl.LOCK_SH)
        try:
            name = write(f"{self.path}/{draft}")
            with contextlib.suppress(OSError):  # another process has made the same
                os.rename(draft, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            if self.find(name) and listing:
                Path(self.path, name, listing).touch()
            return name
        finally:
            os.close(lock)
            self._remove(draft)

    def remove_unused(self) -> tuple[int, int]:
        """Remove all that nobody uses; returns how many copies there were, and how many are gone."""
        names = self._names()
        return len(names), sum(map(self._remove, names))

    def _lock(self, name: str, how: int) -> int:
        lock = open_private_directory(name, self._directory)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            os.stat(name, dir_fd=self._directory)  # it may have been removed meanwhile
        except OSError:
            os.close(lock)
            raise
        return lock

    def _remove(self, name: str) -> bool:
        """Remove a copy that nobody uses, or what is left of one; returns whether it is gone."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(os.close, self._lock(name, fcntl.LOCK_EX))
            os.rename(name, doomed := draft_name(), src_dir_fd=self._directory, dst_dir_fd=self._directory)
            remove_directory(doomed, self._directory)
            return True
        return False

    def _make_room(self, nbytes: int) -> None:
        """Remove drafts of processes that are gone, and the oldest copies while there are many or little is free."""
        left = len(names := self._names())
        for name in names:
            space = os.statvfs(self._directory)
            if is_draft(name) or left > _KEPT or space.f_bavail * space.f_frsize < nbytes + _FREE_BYTES:
                left -= self._remove(name)

    def _names(self) -> list[str]:
        """The names that are there: drafts, then copies, those first that were not used for longest."""
        with os.scandir(self.path) as there:
            used = {one.name: (not is_draft(one.name), one.stat().st_mtime_ns) for one in there}
        return sorted(used, key=used.__getitem__)
