"""The copies on this host's disk, in a directory of this user's own: each is there as a whole, or not at all.

    BASE/jaxrun-stage-UID/NAME/manifest         what is in the copy
                              /source           what a file system has said of the directory that was read
                              /copy/…
                          …-unfinished/         the same while it is written

Whoever uses or writes one holds a shared lock on its directory; what somebody has locked is not removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxrun.node.staging.content import Entry, list_directory, read_manifest
from jaxrun.protocol.own_files import draft_name, open_private_directory, remove_directory, write_whole_file

_MANIFEST, _SOURCE, _UNFINISHED = "manifest", "source", "-unfinished"
_KEPT = 8  # copies that nobody need use
_FREE_BYTES = 2**26  # that are left on the disk


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy, in use as long as `lock`, a descriptor of its `directory`, is open."""

    directory: str
    entries: list[Entry]
    lock: int

    @property
    def path(self) -> str:
        """Where the copied directory is."""
        return f"{self.directory}/copy"

    def note_source(self, source: str) -> None:
        write_whole_file(_SOURCE, source.encode(), 0o600, dir_fd=self.lock)


class Copies:
    """The copies below one directory of a local disk."""

    def __init__(self, base: str = "") -> None:
        """`base` is that of --stage-dir. Raises OSError, also where others could change the copies."""
        self.path = f"{base or os.environ.get('TMPDIR') or '/tmp'}/jaxrun-stage-{os.geteuid()}"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            self._directory = open_private_directory(self.path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None

    def close(self) -> None:
        """Let go of the directory; copies in use stay so."""
        os.close(self._directory)

    def find(self, name: str, *, check: bool = True) -> Copy | None:
        """The copy of this name, in use from now on, if it is there; `check`: as it was written."""
        with contextlib.suppress(OSError, ValueError, TypeError), contextlib.ExitStack() as stack:
            lock = open_private_directory(name, self._directory)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with open(os.open(_MANIFEST, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=lock), "rb") as file:
                copy = Copy(f"{self.path}/{name}", read_manifest(file.read()), lock)
            if not check or {one._replace(digest="") for one in copy.entries} <= {*list_directory(copy.path)[0]}:
                os.utime(lock)
                stack.pop_all()
                return copy
        self.remove(name)  # if it is there: something that cleans /tmp has taken a part of it
        return None

    def find_source(self, source: str) -> tuple[str, Copy] | None:
        """The name and the copy of what a file system has said this of."""
        for name in self._names():
            with contextlib.suppress(OSError):
                if Path(self.path, name, _SOURCE).read_text() == source and (copy := self.find(name)):
                    return name, copy
        return None

    @contextlib.contextmanager
    def begin(self, entries: list[Entry]) -> Iterator[Copy]:
        """Make room for a copy, and its folders and links; at the end it is removed unless it was finished. OSError."""
        self._make_room(sum(entry.size for entry in entries))
        name = f"{draft_name()}{_UNFINISHED}"
        os.mkdir(name, 0o700, dir_fd=self._directory)
        with contextlib.ExitStack() as stack:
            lock = open_private_directory(name, self._directory)
            stack.callback(os.close, lock)
            stack.callback(self._remove, name)
            fcntl.flock(lock, fcntl.LOCK_SH)
            draft = Copy(f"{self.path}/{name}", entries, lock)
            for path in (draft.path, *(f"{draft.path}/{one.path}" for one in entries if stat.S_ISDIR(one.mode))):
                os.mkdir(path, 0o755)
            for entry in entries:
                if stat.S_ISLNK(entry.mode):
                    os.symlink(entry.target, f"{draft.path}/{entry.path}")
            yield draft

    def finish(self, draft: Copy, name: str, entries: list[Entry]) -> Copy:
        """Make a copy of a draft that is complete, unless another process has. Raises OSError."""
        write_whole_file(_MANIFEST, json.dumps(entries).encode(), 0o600, dir_fd=draft.lock)
        with contextlib.suppress(OSError):
            os.rename(os.path.basename(draft.directory), name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        copy = self.find(name)
        if copy is None:
            why = "another job uses it, but it is no longer as it was written"
            raise OSError(errno.EBUSY, why, f"{self.path}/{name}")
        return copy

    def remove(self, name: str, *, dry_run: bool = False) -> bool:
        """Remove a copy that nobody uses, or what is left of one; returns whether it is gone, or would be."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            lock = open_private_directory(name, self._directory)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not dry_run:
                doomed = f"{draft_name()}{_UNFINISHED}"  # so that nobody begins to use it
                os.rename(name, doomed, src_dir_fd=self._directory, dst_dir_fd=self._directory)
                self._remove(doomed)
            return True
        return False

    def remove_unused(self, *, dry_run: bool) -> tuple[int, int]:
        """Remove all that nobody uses; returns how many copies there were, and how many are gone, or would be."""
        names = [*self._names(), *self._names(unfinished=True)]
        return len(names), sum(self.remove(name, dry_run=dry_run) for name in names)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            remove_directory(name, self._directory)

    def _make_room(self, nbytes: int) -> None:
        """Remove what was left unfinished, and the oldest copies while there are many or too little space is free."""
        for name in self._names(unfinished=True):
            self.remove(name)
        names = self._names()
        left = len(names)
        for name in names:
            space = os.statvfs(self._directory)
            if left > _KEPT or space.f_bavail * space.f_frsize < nbytes + _FREE_BYTES:
                left -= self.remove(name)

    def _names(self, *, unfinished: bool = False) -> list[str]:
        """The names that are there, those first that were not used for longest."""
        used = {}
        for name in os.listdir(self._directory):
            with contextlib.suppress(OSError):
                if name.endswith(_UNFINISHED) == unfinished:
                    used[name] = os.stat(name, dir_fd=self._directory).st_mtime_ns
        return sorted(used, key=used.__getitem__)
