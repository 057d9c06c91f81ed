"""Messages as bytes: a length of four bytes, then JSON {"v": version, "type": name, …fields}.

No pickle, nothing is evaluated, a frame has a maximal length, and every field is checked against its type: bytes that a
stranger sends end in a ProtocolError that says what was wrong with them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Generic, TypeVar, get_args

from jaxrun.errors import ProtocolError
from jaxrun.protocol.worker_messages import Message

FRAME_VERSION = 1
MAX_FRAME_BYTES = 4 * 2**20
_LENGTH = struct.Struct("!I")
_RANK = re.compile(r"[0-9]{1,9}")
_WORKER_MESSAGES = {kind.__name__: kind for kind in get_args(Message)}

M = TypeVar("M")


def encode(message: Any) -> bytes:
    """One frame of a message, a dataclass. ProtocolError if it is longer than a frame may be."""
    kind = type(message)
    content = {field.name: _plain(getattr(message, field.name)) for field in fields(kind)}
    body = json.dumps({"v": FRAME_VERSION, "type": kind.__name__, **content}).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {kind.__name__} message of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class MessageDecoder(Generic[M]):
    """Turns a stream of bytes, in pieces of any size, into messages of the given kinds, and of no others."""

    def __init__(self, kinds: Mapping[str, type[M]], max_frame: int = MAX_FRAME_BYTES) -> None:
        self._kinds = kinds
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_frame:
                raise ProtocolError(f"a frame announces {length} bytes; at most {self._max_frame} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(_parse(bytes(self._buffer[_LENGTH.size : end]), self._kinds))
            del self._buffer[:end]
        return messages


class WorkerMessageDecoder(MessageDecoder[Message]):
    """The same for what worker and agent say to each other."""

    def __init__(self) -> None:
        super().__init__(_WORKER_MESSAGES)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return dict(value) if isinstance(value, Mapping) else value


def _parse(body: bytes, kinds: Mapping[str, type[M]]) -> M:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError(f"a frame is not JSON: {body[:80]!r}") from None
    if not isinstance(content, dict) or content.pop("v", None) != FRAME_VERSION:
        raise ProtocolError(f"a frame is not of version {FRAME_VERSION} of the contract: {body[:80]!r}")
    name = content.pop("type", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"a frame is of no known type: {body[:80]!r}")
    checked = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in content:
            raise ProtocolError(f"{name} lacks its field {field.name}")
        checked[field.name] = _CHECKS[str(field.type)](name, field.name, content.pop(field.name))
    if content:
        raise ProtocolError(f"{name} has no field {sorted(content)[0]!r}")
    return kind(**checked)


def _integer(name: str, field: str, value: object) -> int:
    if type(value) is not int:
        raise ProtocolError(f"{name}.{field} must be an integer, not {value!r}")
    return value


def _number(name: str, field: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise ProtocolError(f"{name}.{field} must be a number, not {value!r:.80}")


def _text(name: str, field: str, value: object) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{name}.{field} must be a string, not {value!r}")
    return value


def _texts(name: str, field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ProtocolError(f"{name}.{field} must be a list of strings, not {value!r}")
    return tuple(_text(name, field, item) for item in value)


def _table(name: str, field: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ProtocolError(f"{name}.{field} must be a table of strings, not {value!r}")
    return {key: _text(name, field, item) for key, item in value.items()}


def _integers(name: str, field: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ProtocolError(f"{name}.{field} must be a list of integers, not {value!r}")
    return tuple(_integer(name, field, item) for item in value)


def _by_rank(check: Callable[[str, str, object], Any]) -> Callable[[str, str, object], dict[int, Any]]:
    """A table by rank; JSON has made strings of the ranks."""

    def table(name: str, field: str, value: object) -> dict[int, Any]:
        if not isinstance(value, dict) or not all(_RANK.fullmatch(key) for key in value):
            raise ProtocolError(f"{name}.{field} must be a table by rank, not {value!r:.80}")
        return {int(key): check(name, field, item) for key, item in value.items()}

    return table


def _bytes(name: str, field: str, value: object) -> bytes:
    with contextlib.suppress(binascii.Error, ValueError):
        return base64.b64decode(_text(name, field, value), validate=True)
    raise ProtocolError(f"{name}.{field} must be bytes in base64, not {value!r:.80}")


def _boolean(name: str, field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"{name}.{field} must be true or false, not {value!r:.80}")
    return value


_CHECKS: dict[str, Any] = {
    "int": _integer,
    "bool": _boolean,
    "bytes": _bytes,
    "tuple[int, ...]": _integers,
    "Mapping[int, str]": _by_rank(_text),
    "Mapping[int, float]": _by_rank(_number),
    "Mapping[int, int]": _by_rank(_integer),
    "float": _number,
    "str": _text,
    "tuple[str, ...]": _texts,
    "Mapping[str, str]": _table,
}
