"""How the processes of a job that someone else started find rank 0: by a file in a directory that all hosts share.

Rank 0 writes the values that the others need, readable only for its user; they look for it until the values prove to be
right. A file that an earlier job has left leads to nobody, or to someone who does not know its token, and is read
again; so is one that another user may have written, which is not trusted. `jaxrun attach --check` checks whether a head
can be reached at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.files.own_files import remove_file, write_whole_file
from jaxrun.protocol.addresses import Address, AnyAddress, parse_addresses
from jaxrun.protocol.auth import MAX_FRAME_BYTES, Challenge
from jaxrun.protocol.codec import MessageDecoder, message_types
from jaxrun.protocol.connect import HeadAddress
from jaxrun.spec.engines.rank_info import RankInfo

_TEXTS = ("token", "head")
_CHECK_TIMEOUT_S = 5.0
_MAX_BYTES = 2**16  # enough for a head with hundreds of addresses
# O_NONBLOCK: opening a FIFO would wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RendezvousFile(Struct, frozen=True):
    """The file of one job, the same on all its ranks."""

    path: Path

    def write(self, token: str, head: str) -> None:
        """Write all or nothing. Raises UnavailableError if the directory is not writable."""
        content = json.dumps({"token": token, "head": head})
        try:
            write_whole_file(self.path, content.encode(), 0o600)
        except OSError as error:
            raise UnavailableError(
                f"{self.path} cannot be written ({error.strerror}), but the other ranks look for rank 0 there; "
                "name a directory that all hosts share with --rendezvous"
            ) from None

    def read(self) -> HeadAddress | None:
        """Return the file's current content; None if there is no file.

        Raises UnavailableError if another user may have written it, or if it is not a rendezvous file.
        """
        # On a network file system, only listing the directory makes another host's new file appear.
        with contextlib.suppress(OSError):
            os.listdir(self.path.parent)
        try:
            file = os.open(self.path, _READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            # A link to a link causes ELOOP, too, and is a link as well.
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise self._refusal(str(why)) from None
        try:
            wrong = _describe_danger(os.fstat(file))
            data = b"" if wrong else os.read(file, _MAX_BYTES)
        except OSError as error:  # on a network file system, it was replaced just now
            wrong, data = str(error.strerror), b""
        finally:
            os.close(file)
        if wrong:
            raise self._refusal(wrong)
        try:
            content = _parse(data)
            return HeadAddress(content["token"], parse_addresses(content["head"]))
        except (ValueError, RecursionError, UsageError):
            raise self._refusal("its content is not what rank 0 writes") from None

    def remove(self, addresses: Sequence[AnyAddress]) -> None:
        """Remove the file of the head at these addresses; a file that leads to another head stays."""
        with contextlib.suppress(OSError, UnavailableError):
            content = self.read()
            if content is not None and content.addresses == tuple(addresses):
                remove_file(self.path)

    def _refusal(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{self.path} is not trusted: {why}; remove it, or name a directory in which nobody else can write with "
            "--rendezvous, on all ranks"
        )


def _describe_danger(status: os.stat_result) -> str:
    """Return why another user may have written this file; empty if none can have."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to you ({os.geteuid()})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others than you can write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return f"it has {status.st_size} bytes" if status.st_size > _MAX_BYTES else ""


def _parse(data: bytes) -> dict[str, Any]:
    """Parse the content. Raises ValueError or RecursionError."""
    content = json.loads(data)
    if not isinstance(content, dict) or not all(isinstance(content.get(name), str) for name in _TEXTS):
        raise ValueError("no object of texts")
    return content


def rendezvous_file(place: RankInfo, directory: Path) -> RendezvousFile:
    """Return the file of this job; `directory` must exist. Raises UsageError."""
    if not directory.is_dir():
        raise UsageError(f"--rendezvous {directory} is not a directory on {os.uname().nodename}")
    marks = json.dumps([value for name, value in sorted(asdict(place).items()) if name != "rank"])
    return RendezvousFile(directory / f".jaxrun-attach-{hashlib.sha256(marks.encode()).hexdigest()[:16]}")


def check_reachable(text: str) -> int:
    """Print at which of the addresses a head answers; return 0. Raises UnavailableError if there is none."""
    reached, failed = [], []
    for address in parse_addresses(text):
        try:
            own = _probe(address)
        except (OSError, ProtocolError) as error:
            failed.append(f"{address}: {error}")
        else:
            reached.append(f"a jaxrun head answers at {address}, reached from {own}")
    if not reached:
        raise UnavailableError(f"{os.uname().nodename} cannot reach a head; {'; '.join(failed)}")
    print("\n".join(reached))
    return 0


def answers(address: Address) -> bool:
    try:
        return bool(_probe(address))
    except (OSError, ProtocolError):
        return False


def _probe(address: Address) -> str:
    """Return the IP address of this end, once a head has sent its challenge."""
    with socket.create_connection((address.ip, address.port), timeout=_CHECK_TIMEOUT_S) as connection:
        decoder: MessageDecoder[Challenge] = MessageDecoder(message_types(Challenge), MAX_FRAME_BYTES)
        while data := connection.recv(MAX_FRAME_BYTES):
            if decoder.feed(data):
                return str(connection.getsockname()[0])
        raise ProtocolError("something listens there, but it is not a jaxrun head")
