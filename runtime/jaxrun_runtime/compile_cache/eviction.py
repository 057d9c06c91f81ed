"""Which files a directory of compiled programs goes without when there are too many of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple


class StoredFile(NamedTuple):
    """A file of the directory; `written` in seconds since 1970, `size` in bytes."""

    written: float
    size: int
    name: str


def list_stored(directory: int) -> list[StoredFile]:
    """All files of the directory, of which links are not followed. Raises OSError."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has just renamed or deleted it
                status = entry.stat(follow_symlinks=False)
                found.append(StoredFile(status.st_mtime, status.st_size, entry.name))
    return found


def choose_oldest(files: Sequence[StoredFile], total_bytes: int, max_bytes: int) -> list[str]:
    """The names of those to delete: the oldest, until a quarter of `max_bytes` is free; none while there is room.

    `total_bytes` is what is used, by these files and by whatever else.
    """
    chosen: list[str] = []
    to_delete = total_bytes - max_bytes + max_bytes // 4 if total_bytes > max_bytes else 0
    for file in sorted(files):
        if to_delete <= 0:
            break
        chosen.append(file.name)
        to_delete -= file.size
    return chosen
