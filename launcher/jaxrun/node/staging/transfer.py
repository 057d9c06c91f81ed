"""Sends copies along a tree of hosts: each host gets what it lacks from its giver, and passes it on as it arrives.

    taker                                     giver
    names that it lacks   ──────────▶                           (after the handshake, see protocol/auth.py)
                          ◀──────────    an archive for each, in pieces, the last of which is empty

An archive is a tar file without owners. It is the same on each host that has the copy, and its hash is the copy's name.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxrun.errors import ProtocolError
from jaxrun.node.staging.copies import Copies
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.staging_messages import StagedContent

COPIED_MODE = 0o755  # the only file mode in a copy: nobody else writes to it, and it grants no special rights
_PIECE_BYTES = 2**17  # the copy buffer of tarfile, for each small file, too


class _Archive(io.RawIOBase):
    """An archive as a file: data that is read comes from `giver`; data that is read or written goes to `takers`."""

    def __init__(self, giver: BlockingConnection | None = None, takers: Sequence[BlockingConnection] = ()) -> None:
        self._giver, self._takers = giver, takers
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def name(self) -> str:
        """Of the copy, once the archive is complete."""
        return self._hash.hexdigest()

    def write(self, piece: Any, /) -> int:
        self._hash.update(piece)
        for taker in self._takers:
            taker.send_bytes(piece)
        return len(piece)

    def read(self, size: int = 0, /) -> bytes:
        assert self._giver is not None
        piece = bytes(self._giver.receive().payload.body)
        self.write(piece)
        return piece


def pass_on(
    contents: Iterable[StagedContent],
    copies: Copies,
    giver: BlockingConnection | None,
    takers: Sequence[BlockingConnection],
) -> int:
    """Get all contents to this host, from `giver` if there is one, and send the takers what they lack.

    Returns how many bytes came. Raises ConnectionError or ProtocolError about another host, OSError about this one.
    """
    if giver is not None:
        giver.send_bytes(json.dumps([one.name for one in contents if copies.find(one.name) is None]).encode())
    wanted = [(taker, json.loads(bytes(taker.receive().payload.body))) for taker in takers]
    nbytes = 0
    for content in contents:
        lacking = [taker for taker, names in wanted if content.name in names]
        if (copy := copies.find(content.name)) is not None:
            if lacking:
                _write_archive(copy, _Archive(takers=lacking))
        else:
            archive, nbytes = _Archive(giver, lacking), nbytes + content.nbytes
            copies.add(content.nbytes, lambda draft: _extract(archive, draft, content.name))  # noqa: B023
    return nbytes


def name_copy(directory: str, paths: Sequence[str]) -> str:
    """Return the name of a copy that was written below a directory and consists of these files."""
    Path(directory, "paths").write_text(json.dumps(paths))
    _write_archive(directory, archive := _Archive())
    return archive.name


def _write_archive(directory: str, file: _Archive) -> None:
    paths = json.loads(Path(directory, "paths").read_text())
    with tarfile.open(mode="w|", fileobj=file, bufsize=_PIECE_BYTES, format=tarfile.GNU_FORMAT) as archive:
        for path in paths:
            archive.add(f"{directory}/copy/{path}", path, recursive=False, filter=_without_owner)
    file.write(b"")


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= COPIED_MODE
    # Whole seconds, by which Python recognizes its compiled modules.
    entry.mtime = int(entry.mtime) if entry.isreg() else 0
    return entry


def _extract(file: _Archive, directory: str, name: str) -> str:
    """Extract an archive. Raises OSError, or ProtocolError if it is not the copy of this name."""
    try:
        with tarfile.open(mode="r|", fileobj=file, bufsize=_PIECE_BYTES) as archive:
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # no path leads outside
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
