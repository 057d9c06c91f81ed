"""Copies go along a tree of hosts: each takes what it lacks from its giver, and gives it to its takers as it comes.

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxrun.errors import ProtocolError
from jaxrun.node.channel.connection import enable_keepalive
from jaxrun.node.channel.listener import Peer
from jaxrun.node.staging.copies import Copies
from jaxrun.protocol.connect import HeadConnection
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, GangMessageReader, GangMessageWriter
from jaxrun.protocol.payload import Payload
from jaxrun.protocol.stage_messages import StagedContent

_PIECE_BYTES = 2**17  # tarfile copies as much for each small file
POLL_S = 0.1  # between two looks whether this process is to stop
T = TypeVar("T")


class PieceStream:
    """Pieces of bytes, each a message of a gang's. Raises ProtocolError for any failure, and once `is_stopped`."""

    def __init__(self, peer: Peer | HeadConnection, is_stopped: Callable[[], bool] = lambda: False) -> None:
        assert peer.tags is not None
        enable_keepalive(peer.connection)
        peer.connection.settimeout(POLL_S)
        self._peer = peer.connection.getpeername()[0]
        self._is_stopped = is_stopped
        self._reader = GangMessageReader(peer.connection, peer.tags.received)
        self._writer = GangMessageWriter(peer.connection, peer.tags.sent)

    def send(self, piece: bytes) -> None:
        self._writer.add(GangMessage(GangMessageKind.VALUE, 0, Payload(piece)))
        self._repeat(self._writer.flush)

    def receive(self) -> bytes:
        return bytes(self._repeat(self._reader.receive).payload.body)

    def _repeat(self, do: Callable[[], T]) -> T:
        """Do it until it is done, however long the peer takes: the head notices one that is gone."""
        while not self._is_stopped():
            try:
                return do()
            except TimeoutError:
                pass
            except (OSError, EOFError) as error:
                raise ProtocolError(f"{self._peer} is lost: {str(error) or 'it has closed the connection'}") from None
        raise ProtocolError("stopped")


class _Archive(io.RawIOBase):
    """An archive as a file: what is read comes from `giver`; that, or what is written, goes to `takers`."""

    def __init__(self, giver: PieceStream | None = None, takers: Sequence[PieceStream] = ()) -> None:
        super().__init__()
        self._giver, self._takers = giver, takers
        self._hash = hashlib.blake2b(digest_size=16)
        self._is_over = False

    @property
    def name(self) -> str:
        """Of the copy, once the archive is complete."""
        return self._hash.hexdigest()

    def write(self, piece: Any, /) -> int:
        self._hash.update(piece)
        for taker in self._takers:
            taker.send(piece)
        return len(piece)

    def read(self, size: int = 0, /) -> bytes:
        assert self._giver is not None
        piece = b"" if self._is_over else self._giver.receive()
        self._is_over = not piece
        return piece and piece[: self.write(piece)]


def pass_on(
    contents: Iterable[StagedContent], copies: Copies, giver: PieceStream | None, takers: Sequence[PieceStream]
) -> int:
    """Have all contents on this host, from `giver` if there is one, and give the takers what they lack.

    Returns how many bytes have come. Raises OSError about a file of this host, or ProtocolError.
    """
    if giver is not None:
        giver.send(json.dumps([one.name for one in contents if copies.find(one.name) is None]).encode())
    wanted = [(taker, json.loads(taker.receive())) for taker in takers]
    nbytes = 0
    for content in contents:
        lacking = [taker for taker, names in wanted if content.name in names]
        if (copy := copies.find(content.name)) is not None:
            if lacking:
                _write_archive(copy, _Archive(takers=lacking))
        else:
            archive, nbytes = _Archive(giver, lacking), nbytes + content.nbytes
            copies.add(content.nbytes, lambda draft: _extract(archive, draft, content.name))  # noqa: B023
        for taker in lacking:
            taker.send(b"")
    return nbytes


def name_copy(directory: str, paths: Sequence[str]) -> str:
    """The name of a copy that was written below a directory, whose files are these."""
    Path(directory, "paths").write_text(json.dumps(paths))
    _write_archive(directory, archive := _Archive())
    return archive.name


def _write_archive(directory: str, file: _Archive) -> None:
    paths = json.loads(Path(directory, "paths").read_text())
    with tarfile.open(mode="w|", fileobj=file, bufsize=_PIECE_BYTES, format=tarfile.GNU_FORMAT) as archive:
        for path in paths:
            archive.add(f"{directory}/copy/{path}", path, recursive=False, filter=_without_owner)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= 0o755
    entry.mtime = int(entry.mtime) if entry.isreg() else 0  # by seconds Python knows its compiled modules
    return entry


def _extract(file: _Archive, directory: str, name: str) -> str:
    """Raises OSError, or ProtocolError if what comes is not the copy of this name."""
    try:
        with tarfile.open(mode="r|", fileobj=file, bufsize=_PIECE_BYTES) as archive:
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # lets no path lead out
            archive.extractall(f"{directory}/copy")
            Path(directory, "paths").write_text(json.dumps(archive.getnames()))
        while file.read():
            pass
    except tarfile.TarError as error:
        raise ProtocolError(f"an archive came that cannot be read: {error}") from None
    except OSError as error:  # of a disk that is full, without a name
        raise OSError(error.errno, error.strerror, error.filename or directory) from None
    if file.name != name:
        raise ProtocolError("what came is not what was read: a copy was changed; jaxrun clean --staged removes it")
    return name
