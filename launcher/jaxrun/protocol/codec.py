"""Messages as bytes: a length of four bytes (big-endian), then JSON {"v": version, "type": class name, ...fields}.

Fields of type bytes follow the JSON unchanged, in order and after a zero byte, which JSON never contains. In the JSON,
{"\\u0000": size} stands for each of them.

A message is a frozen dataclass. Its fields are int, float, bool, str, bytes, string enums, dataclasses of these (as
objects), tuples of these (as lists), and mappings from strings, ranks or agents to these (as objects). Each of them may
be optional (as null). Classes with their own `to_content` and `from_content` are allowed, too. A field of type Any is
any JSON value. A field with the metadata ANY_MESSAGE holds a message of any type of a union, with its own "type".

Nothing is unpickled or evaluated, a frame has a maximum length, and every field is checked against its annotation:
bytes from a stranger end in a ProtocolError that says what was wrong with them. JSON files are written and read in the
same way, except that bytes are base64 there: `json.dumps(value, default=to_content)` and `from_content`.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import re
import struct
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from jaxrun.errors import ProtocolError

if TYPE_CHECKING:
    from .message_tags import Tags  # a worker's start need not pay for its imports

FRAME_VERSION = 2
MAX_FRAME_BYTES = 4 * 2**20
_LENGTH = struct.Struct("!I")
_SEPARATOR = b"\0"
_ATTACHED = "\0"
_RANK = re.compile(r"[0-9]{1,9}")
ANY_MESSAGE = {"any message": True}

M = TypeVar("M")
Handler = TypeVar("Handler")
Reader = Callable[[Any], Any]


def message_types(union: Any) -> Mapping[str, type[Any]]:
    return {kind.__name__: kind for kind in (get_args(union) or (union,))}


def list_handlers(table: Mapping[Any, Handler]) -> dict[type, Handler]:
    """Return the handler of each kind of message; the keys of `table` are kinds, or unions of several kinds.

    Raises ValueError if a kind is in two keys: the order of the keys would decide which handler applies.
    """
    handlers: dict[type, Handler] = {}
    for kinds, handle in table.items():
        for kind in message_types(kinds).values():
            if kind in handlers:
                raise ValueError(f"{kind.__name__} has two handlers")
            handlers[kind] = handle
    return handlers


def encode(message: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of a message. Raises ProtocolError if it would be longer than the maximum."""
    kind = type(message).__name__
    content = {"v": FRAME_VERSION, "type": kind, **field_values(message)}
    try:
        body = _ENCODER.encode(content).encode()
    except _BytesFound:
        body = _encode_with_bytes(content)
    if len(body) > max_frame_bytes:
        raise ProtocolError(f"a {kind} message of {len(body)} bytes is longer than {max_frame_bytes}")
    return _LENGTH.pack(len(body)) + body


class _BytesFound(Exception):
    """Raised when a message contains bytes, which must follow its JSON."""


def _encode_with_bytes(content: dict[str, Any]) -> bytes:
    attached: list[bytes] = []

    def attach(value: Any) -> Any:
        if not isinstance(value, bytes):
            return to_content(value)
        attached.append(value)
        return {_ATTACHED: len(value)}

    text = json.JSONEncoder(default=attach, separators=(",", ":")).encode(content)
    return b"".join((text.encode(), _SEPARATOR, *attached))


def field_values(value: Any) -> dict[str, Any]:
    names, messages = _field_names(type(value))  # type: ignore[arg-type]
    values = {name: getattr(value, name) for name in names}
    for name in messages:
        values[name] = _typed_content(values[name])
    return values


@functools.cache
def _field_names(kind: type[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of all fields, and of those that hold a message of any type."""
    found = fields(kind)
    return tuple(each.name for each in found), tuple(each.name for each in found if _holds_any_message(each))


def _holds_any_message(field: Field[Any]) -> bool:
    return field.metadata.items() >= ANY_MESSAGE.items()


def _typed_content(message: Any) -> dict[str, Any]:
    return {"type": type(message).__name__, **field_values(message)}


def to_content(value: Any) -> Any:
    """Return a value that json can write, in place of one that it cannot; its contents may need the same."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    return value.to_content() if hasattr(value, "to_content") else field_values(value)


def _to_content_without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        raise _BytesFound
    return to_content(value)


_ENCODER = json.JSONEncoder(default=_to_content_without_bytes, separators=(",", ":"))


class MessageDecoder(Generic[M]):
    """Turns a stream of bytes, in pieces of any size, into messages of the given types; other types are refused.

    tags:  the tags that must follow the frames; None for frames without tags
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
        """The number of bytes known to be missing from the current frame; never more than are really missing."""
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


def _parse(body: bytes, kinds: Mapping[str, type[M]]) -> M:
    text, separator, attached = body.partition(_SEPARATOR)
    end = 0

    def detach(value: dict[str, Any]) -> Any:
        nonlocal end
        if value.keys() != {_ATTACHED}:
            return value
        size = value[_ATTACHED]
        if type(size) is not int or not 0 <= size <= len(attached) - end:
            raise ProtocolError(f"a frame has {len(attached)} bytes after its JSON, which says {size!r:.80}")
        end += size
        return attached[end - size : end]

    try:
        content = json.loads(text, object_hook=detach if separator else None)
    except (ValueError, RecursionError):
        raise ProtocolError(f"a frame is not JSON: {body[:80]!r}") from None
    if not isinstance(content, dict) or content.pop("v", None) != FRAME_VERSION:
        raise ProtocolError(f"a frame is not of version {FRAME_VERSION} of the protocol: {body[:80]!r}")
    name = content.pop("type", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"a frame is of no known type: {body[:80]!r}")
    return from_content(kind, content)


def from_content(kind: type[M], content: Any, *, lenient: bool = False) -> M:
    """Make a dataclass from the JSON values of its fields. Raises ProtocolError that names the wrong field.

    lenient:  also read what another version wrote: a missing field gets its default, unknown fields are ignored
    """
    if type(content) is not dict:
        raise ProtocolError(f"{kind.__name__} must be an object, not {content!r:.80}")
    values = {}
    for name, read, declared in _field_readers(kind, lenient):  # type: ignore[arg-type]
        if name in content:
            try:
                values[name] = read(content[name])
            except ProtocolError as error:
                raise ProtocolError(f"{kind.__name__}.{name}: {error}") from None
            except (ArithmeticError, LookupError, TypeError, ValueError):
                wrong = f"{kind.__name__}.{name} must be of type {declared.type}"
                raise ProtocolError(f"{wrong}, not {content[name]!r:.80}") from None
        elif not lenient or (declared.default is MISSING and declared.default_factory is MISSING):
            raise ProtocolError(f"{kind.__name__} lacks its field {name}")
    if not lenient and len(content) > len(values):
        raise ProtocolError(f"{kind.__name__} has no field {min(content.keys() - values.keys())!r}")
    return kind(**values)


@functools.cache
def _field_readers(kind: type[Any], lenient: bool) -> tuple[tuple[str, Reader, Field[Any]], ...]:
    hints = get_type_hints(kind)
    found = []
    for each in fields(kind):
        make_reader = _message_reader if _holds_any_message(each) else _reader
        found.append((each.name, make_reader(hints[each.name], lenient), each))
    return tuple(found)


def _message_reader(union: Any, lenient: bool) -> Reader:
    kinds = message_types(union)

    def read(content: Any) -> Any:
        values = dict(_expect(dict, content))
        return from_content(kinds[values.pop("type")], values, lenient=lenient)

    return read


def _reader(annotation: Any, lenient: bool) -> Reader:
    """Return the function that turns a field's JSON into its value, or raises TypeError or ValueError."""
    annotation = getattr(annotation, "__supertype__", annotation)  # of a NewType
    if annotation in _READERS:
        return _READERS[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is types.UnionType:
        (kind,) = set(inner) - {types.NoneType}
        some = _reader(kind, lenient)
        return lambda value: None if value is None else some(value)
    if origin is tuple and inner[-1] is Ellipsis:
        item = _reader(inner[0], lenient)
        return lambda value: tuple([item(one) for one in _expect(list, value)])
    if origin is tuple:
        items = [_reader(kind, lenient) for kind in inner]
        return lambda value: tuple([read(one) for read, one in zip(items, _expect(list, value), strict=True)])
    if origin is Mapping:
        key, item = str if inner[0] is str else _read_rank, _reader(inner[1], lenient)
        return lambda value: {key(name): item(one) for name, one in _expect(dict, value).items()}
    if hasattr(annotation, "from_content"):
        return annotation.from_content  # type: ignore[no-any-return]
    if isinstance(annotation, type) and is_dataclass(annotation):
        return functools.partial(from_content, annotation, lenient=lenient)
    assert issubclass(annotation, enum.Enum)
    return annotation  # type: ignore[no-any-return]


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _read_rank(key: str) -> int:
    if not _RANK.fullmatch(key):
        raise ValueError
    return int(key)


_READERS: dict[Any, Reader] = {
    int: functools.partial(_expect, int),
    bool: functools.partial(_expect, bool),
    str: functools.partial(_expect, str),
    float: lambda value: float(value if type(value) is float else _expect(int, value)),
    bytes: lambda value: value if type(value) is bytes else base64.b64decode(_expect(str, value), validate=True),
    Any: lambda value: value,
}
