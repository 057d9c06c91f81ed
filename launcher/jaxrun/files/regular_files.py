"""Opens files that are read: a FIFO or a device in the place of one delays nobody."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: str | Path) -> int:
    """Return a descriptor of a file. Raises OSError, also where it is not a regular file."""
    file = os.open(path, _READ)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "it is not a regular file")


def read_end(path: Path, most: int) -> bytes:
    """Return the last bytes of a file, at most `most`. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most)
