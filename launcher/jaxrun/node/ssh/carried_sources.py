"""jaxrun itself, as it is sent to hosts that need not have it: an archive of its sources, and the kit that keeps it.

The archive is a copy like those of --stage (node/staging): named by its hash, kept with them, removed with them.
"""

from __future__ import annotations

import functools
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jaxrun
from jaxrun.node.staging.archive import Archive, write_files
from jaxrun.protocol.names import RUNTIME
from jaxrun.protocol.worker_command import runtime_directory

# What finds and adds a copy on a host, with all of jaxrun that it imports.
KIT = (
    *("__init__", "errors", "text", "files/__init__", "files/own_files"),
    *("node/__init__", "node/staging/__init__", "node/staging/copies", "node/staging/archive"),
    *("protocol/__init__", "protocol/staging_messages", "protocol/agent_id", "protocol/worker_command"),
    "protocol/names",
)
_LEVEL = 6  # of compression: 0.1 s for 0.7 of 3 MB


@dataclass(frozen=True, slots=True)
class CarriedSources:
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
    """Read jaxrun's files, 3 MB. Raises OSError, or UnavailableError if the runtime is not installed."""
    package, runtime = str(Path(jaxrun.__file__).parent), runtime_directory()
    pieces: list[bytes] = []
    archive = Archive(send=[pieces.append])
    write_files([*_files(package, "jaxrun"), *_files(runtime, RUNTIME)], archive)
    kit = io.BytesIO()
    with zipfile.ZipFile(kit, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as file:
        for name in KIT:
            file.write(f"{package}/{name}.py", f"jaxrun/{name}.py")
    return CarriedSources(archive.name, zlib.compress(b"".join(pieces), _LEVEL), kit.getvalue(), os.uname().machine)


def _files(directory: str, name: str) -> Iterator[tuple[str, str]]:
    """The files below a directory, each with its path below `name`, without compiled modules."""
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(one for one in folders if one != "__pycache__")
        below = os.path.join(name, os.path.relpath(folder, directory))
        yield from ((os.path.join(folder, file), os.path.normpath(os.path.join(below, file))) for file in sorted(files))
