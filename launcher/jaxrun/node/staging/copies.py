"""The copies on this host's disk, in a directory of this user's own: each is complete, or does not exist.

    BASE/jaxrun-stage-UID/NAME/copy/…     the files
                              /paths      their paths, as programs may add others
                              /…          for each listing of a directory that was read, its hash

While a copy is being written, it has the name of a draft. Whoever writes or uses one holds a shared lock on its
directory; a locked copy is not removed. A name appears, is locked for use and disappears under a lock on the directory
of all copies, which is held only for moments: so nobody sees a draft before it is locked, or a copy that is being
removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrun.files.own_files import check_way, draft_name, is_draft, open_private_directory, remove_directory

if TYPE_CHECKING:
    from jaxrun.protocol.staging_messages import Stage  # which a host with nothing but a Python cannot import

STAGE_PREFIX = "jaxrun-stage-"  # of the directory of a user's copies, followed by the user's number
_KEPT = 8  # unused copies that are kept
_FREE_BYTES = 2**26  # left free on the disk
_ALONE_TIMEOUT_S = 10.0  # for other processes to let go of the lock on all names
_ALONE_POLL_S = 0.002


class Copies:
    """The copies below one directory of a local disk; copies that were found or added are in use by this process."""

    def __init__(self, base: str = "") -> None:
        """`base` is the value of --stage-dir. Raises OSError, also if others could change or replace the copies."""
        self.path = f"{base or os.environ.get('TMPDIR') or '/tmp'}/{STAGE_PREFIX}{os.geteuid()}"
        self._locks: dict[str, int] = {}
        try:
            check_way(self.path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            self._directory = open_private_directory(self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None

    def find(self, name: str) -> str | None:
        """Return the directory of the copy of this name, if it exists. Raises OSError if that cannot be found out."""
        if name not in self._locks:
            with self._alone():
                try:
                    self._locks[name] = self._lock(name, fcntl.LOCK_SH)
                except FileNotFoundError:
                    return None
                except OSError as error:
                    raise OSError(error.errno, error.strerror, f"{self.path}/{name}") from None
            os.utime(self._locks[name])
        return f"{self.path}/{name}"

    def keep_for_next_program(self, name: str) -> int:
        """Let the program that this process becomes go on using a copy: it inherits the lock, a descriptor."""
        os.set_inheritable(self._locks[name], True)
        return self._locks[name]

    def find_listing(self, listing: str) -> str | None:
        """Return the name of the copy of a directory whose listing has this hash, if it exists."""
        marked = (name for name in self._names() if os.path.exists(f"{self.path}/{name}/{listing}"))
        return next(filter(self.find, marked), None)

    def by_source(self, stage: Stage) -> dict[str, str]:
        """Return the copies of staged directories that this host has, by source."""
        found = [(one, directory) for one in stage.contents if (directory := self.find(one.name))]
        return {source: f"{directory}/copy" for one, directory in found for source in one.sources}

    def add(self, nbytes: int, write: Callable[[str], str], listing: str = "") -> str:
        """Make room for `nbytes` bytes, and let `write` fill a directory and return its name, from then on a copy's.

        Raises OSError, and whatever `write` raises; then nothing is left.
        """
        self._make_room(nbytes)
        draft, lock = self._make_draft()
        try:
            name = write(f"{self.path}/{draft}")
            with self._alone(), contextlib.suppress(OSError):  # another process has made the same copy
                os.rename(draft, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
                self._locks[name], lock = lock, os.dup(lock)
            if self.find(name) is None:
                raise OSError(errno.ENOENT, "the copy was removed as soon as it was there", f"{self.path}/{name}")
            if listing:
                Path(self.path, name, listing).touch()
            return name
        finally:
            os.close(lock)
            self._remove(draft)

    def remove_unused(self) -> tuple[int, int]:
        """Remove all unused copies; returns how many copies there were, and how many are gone."""
        names = self._names()
        return len(names), sum(map(self._remove, names))

    def _make_draft(self) -> tuple[str, int]:
        """The name of a new draft, and the lock on it."""
        draft = draft_name()
        with self._alone():
            os.mkdir(draft, 0o700, dir_fd=self._directory)
            return draft, self._lock(draft, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes and threads from changing or locking names in this block. Raises OSError."""
        own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._directory)
        try:
            deadline = time.monotonic() + _ALONE_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        why = f"another jaxrun holds it for more than {_ALONE_TIMEOUT_S:g} s; is one stopped?"
                        raise OSError(errno.EBUSY, why, self.path) from None
                    time.sleep(_ALONE_POLL_S)
            yield
        finally:
            os.close(own)

    def _lock(self, name: str, how: int) -> int:
        lock = open_private_directory(name, self._directory)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return lock

    def _remove(self, name: str) -> bool:
        """Remove an unused copy, or the rest of one; returns whether it is gone."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            with self._alone():
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
        """Return the existing names: drafts, then copies, the least recently used first."""
        used = dict[str, tuple[bool, int]]()
        with os.scandir(self.path) as there:
            for one in there:
                with contextlib.suppress(FileNotFoundError):  # another process has renamed or removed it
                    used[one.name] = not is_draft(one.name), one.stat(follow_symlinks=False).st_mtime_ns
        return sorted(used, key=used.__getitem__)
