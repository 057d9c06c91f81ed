"""The archive of a copy: a tar file without owners, alike on all hosts that have the copy; its hash is the name."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxrun.errors import ProtocolError

COPIED_MODE = 0o755  # the only file mode in a copy: nobody else writes to it, and it grants no special rights
_PIECE_BYTES = 2**17  # the copy buffer of tarfile, for each small file, too


class Archive(io.RawIOBase):
    """An archive as a file, in pieces, the last of which is empty.

    `receive` returns the next piece that is read; each piece that is read or written goes to all of `send`.
    """

    def __init__(
        self, receive: Callable[[], bytes] | None = None, send: Sequence[Callable[[bytes], object]] = ()
    ) -> None:
        self._receive, self._send = receive, send
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def name(self) -> str:
        """The name of the copy, once the archive is complete."""
        return self._hash.hexdigest()

    def write(self, piece: Any, /) -> int:
        self._hash.update(piece)
        for send in self._send:
            send(piece)
        return len(piece)

    def read(self, size: int = 0, /) -> bytes:
        assert self._receive is not None
        piece = self._receive()
        self.write(piece)
        return piece


def name_copy(directory: str, paths: Sequence[str]) -> str:
    """Return the name of a copy that was written below a directory and consists of these files."""
    Path(directory, "paths").write_text(json.dumps(paths))
    write_copy(directory, archive := Archive())
    return archive.name


def write_copy(directory: str, file: Archive) -> None:
    """Write the archive of a copy."""
    paths = json.loads(Path(directory, "paths").read_text())
    write_files(((f"{directory}/copy/{path}", path) for path in paths), file)


def write_files(files: Iterable[tuple[str, str]], file: Archive) -> None:
    """Write an archive of files, each with the path that it has in a copy."""
    with tarfile.open(mode="w|", fileobj=file, bufsize=_PIECE_BYTES, format=tarfile.GNU_FORMAT) as archive:
        for source, path in files:
            archive.add(source, path, recursive=False, filter=_without_owner)
    file.write(b"")


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= COPIED_MODE
    # Whole seconds, by which Python recognizes its compiled modules.
    entry.mtime = int(entry.mtime) if entry.isreg() else 0
    return entry


def extract_copy(file: Archive, directory: str, name: str) -> str:
    """Extract an archive; return `name`. Raises OSError, or ProtocolError if it is not the copy of this name."""
    try:
        with tarfile.open(mode="r|", fileobj=file, bufsize=_PIECE_BYTES) as archive:
            # No path leads outside, with Python 3.11.4 and newer.
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)
            archive.extractall(f"{directory}/copy")
            Path(directory, "paths").write_text(json.dumps(archive.getnames()))
        while file.read():
            pass
    except tarfile.TarError as error:
        raise ProtocolError(f"an archive came that cannot be read: {error}") from None
    except OSError as error:
        if error.errno and not error.filename:  # a full disk
            error.filename = directory
        raise
    if file.name != name:
        raise ProtocolError("the received copy is not what was read: it was changed; jaxrun clean --staged removes it")
    return name
