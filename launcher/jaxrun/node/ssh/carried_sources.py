"""jaxrun itself, as it is sent to hosts that need not have it: an archive of its sources, and the kit that keeps it.

The sources include msgspec, which the agent imports before any environment is there. Its extension module is for this
Python and this kind of processor; bootstrap.py and host_failures.check_python refuse others.

The archive is a copy like those of --stage (node/staging): named by its hash, kept with them, removed with them.
"""

from __future__ import annotations

import functools
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

import jaxrun
from jaxrun.node.staging.archive import Archive, write_files
from jaxrun.protocol.names import RUNTIME
from jaxrun.protocol.worker_command import runtime_directory

# What finds and adds a copy on a host, with all of jaxrun that it imports; nothing but Python's own library is there.
KIT = (
    *("__init__", "errors", "text", "files/__init__", "files/own_files"),
    *("node/__init__", "node/staging/__init__", "node/staging/copies", "node/staging/archive"),
)
_LEVEL = 6  # of compression: 0.1 s for 0.9 of 3.5 MB


class CarriedSources(Struct, frozen=True):
    """What is sent.

    name:     of the copy
    archive:  compressed
    kit:      a zip file
    machine:  the kind of processor for which the carried environment is
    """

    name: str
    archive: bytes
    kit: bytes
    machine: str


@functools.cache
def collect_sources() -> CarriedSources:
    """Read the files of jaxrun and msgspec, 3.5 MB. Raises OSError, or UnavailableError without a runtime."""
    package, runtime = str(Path(jaxrun.__file__).parent), runtime_directory()
    pieces: list[bytes] = []
    archive = Archive(send=[pieces.append])
    needed = str(Path(msgspec.__file__).parent)
    write_files([*_files(package, "jaxrun"), *_files(runtime, RUNTIME), *_files(needed, "msgspec")], archive)
    kit = io.BytesIO()
    with zipfile.ZipFile(kit, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as file:
        for name in KIT:
            file.write(f"{package}/{name}.py", f"jaxrun/{name}.py")
    return CarriedSources(archive.name, zlib.compress(b"".join(pieces), _LEVEL), kit.getvalue(), os.uname().machine)


def _files(directory: str, name: str) -> Iterator[tuple[str, str]]:
    """The files below a directory, each with its path below `name`, without compiled modules of Python."""
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(one for one in folders if one != "__pycache__")
        below = os.path.join(name, os.path.relpath(folder, directory))
        yield from ((os.path.join(folder, file), os.path.normpath(os.path.join(below, file))) for file in sorted(files))
