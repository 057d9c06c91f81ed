"""The directory of compiled programs on disk (--compile-cache DIR, or ~/.cache/jaxrun/compiled).

What is in it is executed. So nobody else may write to it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from jaxrun.files.own_files import check_way, is_trusted
from jaxrun.protocol.settings import CACHE_AUTO
from jaxrun.text import format_user

_WRITABLE_BY_OTHERS = 0o022


def cache_directory(choice: str, environ: Mapping[str, str]) -> Path:
    """The directory that --compile-cache means; `auto` is this user's own on this host."""
    if choice != CACHE_AUTO:
        return Path(choice)
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "jaxrun" / "compiled"


def make_cache_directory(path: Path) -> None:
    """Make the directory unless it exists. Raises OSError, which says so, if others can put something into it."""
    check_way(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(open_cache_directory(path))


def open_cache_directory(path: Path) -> int:
    """Return a descriptor of the existing directory.

    Raises OSError if others can put something into it, or another directory in its place.
    """
    check_way(path)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(directory)
    why = ""
    if not is_trusted(status.st_uid):
        why = f"it belongs to {format_user(status.st_uid)}, and what is in it is executed"
    elif status.st_mode & _WRITABLE_BY_OTHERS:
        why = "others can write to it, and what is in it is executed; try chmod go-w"
    if why:
        os.close(directory)
        raise OSError(errno.EPERM, why)
    return directory
