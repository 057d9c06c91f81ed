"""The number of each job of a collection of run directories, by which commands find it: 1 for the first job there.

    jaxrun-runs/.numbers/12 -> ../1120-2142-train

A number stays with its job, and no later job gets it again: the link of the highest one is kept even when its run
directory is deleted. Making a link is atomic on all file systems, so two jobs that begin at once get two numbers. A
file system without links has no numbers; its jobs are named by their run directories.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

NUMBERS_DIR = ".numbers"
_MAX_DIGITS = 9


def assign(collection: int, name: str) -> None:
    """Give the new run directory `name` the next number; `collection` is the descriptor of its directory."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(NUMBERS_DIR, dir_fd=collection)
        numbers = _open(collection)
        try:
            number = max(_listed(numbers), default=0) + 1
            while not _link(name, number, numbers):
                number += 1
        finally:
            os.close(numbers)


def _link(name: str, number: int, numbers: int) -> bool:
    """Return False if another job has the number. Raises OSError."""
    try:
        os.symlink(f"../{name}", str(number), dir_fd=numbers)
    except FileExistsError:
        return False
    return True


def read_numbers(collection: Path) -> Mapping[str, int]:
    """Return the number of each run directory of the collection, by the directory's name."""
    found = dict[str, int]()
    with contextlib.suppress(OSError):
        numbers = os.open(collection / NUMBERS_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for number in _listed(numbers):
                with contextlib.suppress(OSError):
                    found[os.path.basename(os.readlink(str(number), dir_fd=numbers))] = number
        finally:
            os.close(numbers)
    return found


def remove_unused(collection: int) -> None:
    """Remove the numbers whose run directories are gone, except the highest number."""
    with contextlib.suppress(OSError):
        numbers = _open(collection)
        try:
            for number in sorted(_listed(numbers))[:-1]:
                with contextlib.suppress(OSError):
                    _remove_if_unused(str(number), numbers)
        finally:
            os.close(numbers)


def _remove_if_unused(link: str, numbers: int) -> None:
    try:
        os.stat(link, dir_fd=numbers)
    except FileNotFoundError:
        os.unlink(link, dir_fd=numbers)


def _open(collection: int) -> int:
    return os.open(NUMBERS_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=collection)


def _listed(numbers: int) -> list[int]:
    names = os.listdir(numbers)
    return [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) <= _MAX_DIGITS]
