"""Writes batch scripts and manifests for a scheduler; a mark shows later that jaxrun has written them."""

from __future__ import annotations

import os
from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.files.own_files import write_whole_file
from jaxrun.files.regular_files import open_regular

MARK = "# Written by jaxrun."  # one of the first lines of each file
_HEAD_BYTES = 2**16  # which contain the mark


def write_generated_file(path: Path, text: str, *, option: str, kind: str, mode: int) -> None:
    """Write a file that only its owner can read, because it may hold secrets.

    option:  the option that names the file, for messages
    kind:    what the file is: "batch script"

    Raises UsageError rather than overwrite a file that jaxrun has not written.
    """
    try:
        if path.exists() and MARK.encode() not in _read_head(path):
            raise UsageError(f"{option} {path} exists, and is not a {kind} of jaxrun; give another name")
        write_whole_file(path, text.encode("utf-8", "surrogateescape"), mode)
    except OSError as error:
        raise UsageError(f"the {kind} cannot be written to {path}: {error.strerror}") from None


def _read_head(path: Path) -> bytes:
    """Return the first bytes of a file. Raises OSError, also for a FIFO or a device, which might never end."""
    file = open_regular(path)
    try:
        return os.read(file, _HEAD_BYTES)
    finally:
        os.close(file)
