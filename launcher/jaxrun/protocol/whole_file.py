"""Files that are there as a whole or not at all: each is written under the name of a draft, and then renamed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DRAFT_PREFIX, _DRAFT_SUFFIX = ".jaxrun-", ".draft"
_OTHERS = 0o077


def write_whole_file(path: str | Path, content: bytes, mode: int = 0o666, dir_fd: int | None = None) -> None:
    """Write the file, which may replace one; `path` may be relative to `dir_fd`. Raises OSError.

    The umask takes from `mode`, unless the file is for its owner alone: then that is its mode.
    """
    draft = os.path.join(os.path.dirname(path), draft_name())
    try:
        with open(os.open(draft, NEW_FILE, mode, dir_fd=dir_fd), "wb") as file:
            if not mode & _OTHERS:
                os.fchmod(file.fileno(), mode)  # whatever the umask, or an ACL of the directory, has made of it
            file.write(content)
        os.replace(draft, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=dir_fd)
        raise


def is_draft(name: str) -> bool:
    """Whether a file of this name is being written, or never was finished."""
    return name.startswith(_DRAFT_PREFIX) and name.endswith(_DRAFT_SUFFIX)


def draft_name() -> str:
    """A name that nobody else uses, on any host, and no file left by a process that was killed has."""
    return f"{_DRAFT_PREFIX}{os.urandom(8).hex()}{_DRAFT_SUFFIX}"
