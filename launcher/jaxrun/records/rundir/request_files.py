"""The files by which a running job is asked and answers, in `requests` of its run directory (protocol/requests.py).

A file is there as a whole or not at all. Only files of this user or of root are read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

from jaxrun.errors import ProtocolError
from jaxrun.protocol.codec import MessageDecoder, encode, from_content, message_types, to_content
from jaxrun.protocol.own_files import is_trusted, open_own_directory, write_whole_file
from jaxrun.protocol.requests import REQUESTS_DIR, Answer, Request

_REQUEST, _ANSWER = ".request", ".answer"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_REQUEST_BYTES = 65536
_MODE = 0o600


def write_request(run_dir: int, number: str, request: Request) -> None:
    """Leave a request in the run directory `run_dir`, a descriptor; `number` names it. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(REQUESTS_DIR, 0o700, dir_fd=run_dir)
    with _open_folder(run_dir) as folder:
        write_whole_file(number + _REQUEST, encode(request), _MODE, folder)


def take_requests(run_dir: int) -> list[tuple[str, Request | None]]:
    """Remove all requests and return them by number, the oldest first; None for one that is not understood."""
    found: list[tuple[str, Request | None]] = []
    with contextlib.suppress(OSError), _open_folder(run_dir) as folder:
        for name in sorted(name for name in os.listdir(folder) if name.endswith(_REQUEST)):
            with contextlib.suppress(OSError):  # one that cannot be read keeps no other from being read
                data = _read(folder, name, _MAX_REQUEST_BYTES)
                os.unlink(name, dir_fd=folder)
                if data is not None:
                    found.append((name.removesuffix(_REQUEST), _parse(data)))
    return found


def write_answer(run_dir: int, number: str, answer: Answer) -> None:
    """Write the answer to a request, or replace an earlier one. Raises OSError."""
    data = json.dumps(answer, default=to_content).encode()
    with _open_folder(run_dir) as folder:
        write_whole_file(number + _ANSWER, data, _MODE, folder)


def read_answer(run_dir: int, number: str) -> Answer | None:
    """The answer to a request so far; None where there is none. Raises OSError, ProtocolError and ValueError."""
    with contextlib.suppress(FileNotFoundError), _open_folder(run_dir) as folder:
        data = _read(folder, number + _ANSWER)
        return from_content(Answer, json.loads(data)) if data is not None else None
    return None


def remove_request(run_dir: int, number: str) -> None:
    """Leave nothing of a request; errors are ignored."""
    with contextlib.suppress(OSError), _open_folder(run_dir) as folder:
        for name in (number + _REQUEST, number + _ANSWER):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        os.rmdir(REQUESTS_DIR, dir_fd=run_dir)  # which fails while others ask


@contextlib.contextmanager
def _open_folder(run_dir: int) -> Iterator[int]:
    folder = open_own_directory(REQUESTS_DIR, run_dir)
    try:
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str, limit: int = -1) -> bytes | None:
    """The content of a file, or its first `limit` bytes; None where it is another user's."""
    with open(os.open(name, _READ, dir_fd=folder), "rb") as file:
        return file.read(limit) if is_trusted(os.fstat(file.fileno()).st_uid) else None


def _parse(data: bytes) -> Request | None:
    try:
        return next(iter(MessageDecoder(message_types(Request)).feed(data)), None)
    except ProtocolError:
        return None
