"""Messages as bytes: a length of four bytes (big-endian), then JSON {"v": version, "type": class name, ...fields}.

A message is a frozen dataclass. Its fields are int, float, bool, str, bytes (as base64), string enums, tuples of these
(as lists), mappings from strings or ranks to these (as objects), and classes that have `to_content` and `from_content`.

No pickle, nothing is evaluated, a frame has a maximal length, and every field is checked against its annotation: bytes
that a stranger sends end in a ProtocolError that says what was wrong with them.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from jaxrun.errors import ProtocolError

if TYPE_CHECKING:
    from .session import Tags  # whose imports a worker's start need not pay for

FRAME_VERSION = 1
MAX_FRAME_BYTES = 4 * 2**20
_LENGTH = struct.Struct("!I")
_RANK = re.compile(r"[0-9]{1,9}")
_TUPLE = re.compile(r"tuple\[(.+), \.\.\.\]")
_MAPPING = re.compile(r"Mapping\[(int|str), (.+)\]")

M = TypeVar("M")
Reader = Callable[[Any], Any]


def message_types(union: Any) -> Mapping[str, type[Any]]:
    """Return the members of a union of messages, by name."""
    return {kind.__name__: kind for kind in (get_args(union) or (union,))}


def encode(message: Any) -> bytes:
    """Return the frame of a message. Raises ProtocolError if it is longer than a frame may be."""
    kind = type(message)
    content = {field.name: getattr(message, field.name) for field in fields(kind)}
    content = {"v": FRAME_VERSION, "type": kind.__name__, **content}
    body = json.dumps(content, default=_to_json, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {kind.__name__} message of {len(body)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class MessageDecoder(Generic[M]):
    """Turns a stream of bytes, in pieces of any size, into messages of the given types, and of no others.

    tags:  those that the frames must have behind them; None for frames without
    """

    def __init__(
        self, types: Mapping[str, type[M]], max_frame_bytes: int = MAX_FRAME_BYTES, tags: Tags | None = None
    ) -> None:
        self._types = types
        self._max_frame_bytes = max_frame_bytes
        self._tags = tags
        self._tag_bytes = tags.nbytes if tags is not None else 0
        self._buffer = bytearray()

    @property
    def missing_bytes(self) -> int:
        """How many more bytes the current frame has at least; never more than it has."""
        have = len(self._buffer)
        return _LENGTH.size - have if have < _LENGTH.size else _LENGTH.size + self._length() - have

    def feed(self, data: bytes) -> list[M]:
        """Return the messages that `data` completes, in order. Raises ProtocolError."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + self._length()
            whole = end + self._tag_bytes
            if len(self._buffer) < whole:
                break
            if self._tags is not None:
                self._tags.verify(self._buffer[end:whole], self._buffer[:end])
            messages.append(_parse(bytes(self._buffer[_LENGTH.size : end]), self._types))
            del self._buffer[:whole]
        return messages

    def _length(self) -> int:
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._max_frame_bytes:
            raise ProtocolError(f"a frame announces {length} bytes; at most {self._max_frame_bytes} are allowed")
        return int(length)


def _to_json(value: Any) -> object:
    """Return what json can write in place of a value that it cannot."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return dict(value) if isinstance(value, Mapping) else value.to_content()


def _parse(body: bytes, types: Mapping[str, type[M]]) -> M:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError(f"a frame is not JSON: {body[:80]!r}") from None
    if not isinstance(content, dict) or content.pop("v", None) != FRAME_VERSION:
        raise ProtocolError(f"a frame is not of version {FRAME_VERSION} of the protocol: {body[:80]!r}")
    name = content.pop("type", None)
    kind = types.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"a frame is of no known type: {body[:80]!r}")
    return read_fields(kind, content)


def read_fields(kind: type[M], content: dict[str, Any]) -> M:
    """Make a message of JSON's values of its fields, as `dataclasses.asdict` has them, too. Raises ProtocolError."""
    name, content, values = kind.__name__, dict(content), {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in content:
            raise ProtocolError(f"{name} lacks its field {field.name}")
        value = content.pop(field.name)
        try:
            values[field.name] = _reader(str(field.type), kind.__module__)(value)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            raise ProtocolError(f"{name}.{field.name} must be of type {field.type}, not {value!r:.80}") from None
    if content:
        raise ProtocolError(f"{name} has no field {sorted(content)[0]!r}")
    return kind(**values)


@functools.cache
def _reader(annotation: str, module: str) -> Reader:
    """Return what turns the JSON of a field into its value, or raises TypeError or ValueError."""
    if annotation in _READERS:
        return _READERS[annotation]
    if match := _TUPLE.fullmatch(annotation):
        return _tuple_reader(_reader(match[1], module))
    if match := _MAPPING.fullmatch(annotation):
        return _mapping_reader(_read_rank if match[1] == "int" else str, _reader(match[2], module))
    kind = getattr(sys.modules[module], annotation)
    return kind if issubclass(kind, enum.Enum) else kind.from_content  # type: ignore[no-any-return]


def _tuple_reader(read: Reader) -> Reader:
    return lambda value: tuple([read(item) for item in _expect(list, value)])


def _mapping_reader(read_key: Reader, read: Reader) -> Reader:
    return lambda value: {read_key(key): read(item) for key, item in _expect(dict, value).items()}


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _read_rank(key: str) -> int:
    """Return the rank of which JSON has made a string."""
    if not _RANK.fullmatch(key):
        raise ValueError
    return int(key)


_READERS: dict[str, Reader] = {
    "int": functools.partial(_expect, int),
    "bool": functools.partial(_expect, bool),
    "str": functools.partial(_expect, str),
    "float": lambda value: float(value if type(value) is float else _expect(int, value)),
    "bytes": lambda value: base64.b64decode(_expect(str, value), validate=True),
}
