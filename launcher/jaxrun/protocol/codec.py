"""Messages as bytes: frames, each a length of four bytes (big-endian) and a body of so many bytes.

Between jaxrun's own processes a body is MessagePack, after two bytes: the version, and whether texts are escaped. On
the socket of a job, which other tools use, it is JSON. Both are an object with the message's fields and its "type",
the name of its class; bytes are base64 in JSON.

A message is a Message: a frozen Struct, checked against its annotations. Nothing is unpickled or evaluated, a frame has
a maximum length, which is checked before it is decoded, and unknown fields are refused: bytes from a stranger end in a
ProtocolError that says what was wrong with them. A field that has a default may be missing.
"""

from __future__ import annotations

import enum
import functools
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct

from jaxrun.errors import ProtocolError

if TYPE_CHECKING:
    from .message_tags import Tags  # a worker's start need not pay for its imports

FRAME_VERSION = 3
MAX_FRAME_BYTES = 4 * 2**20
_LENGTH = struct.Struct("!I")
_PLAIN = bytes((FRAME_VERSION, 0))
_ESCAPED = bytes((FRAME_VERSION, 1))
# UTF-8 has no surrogates, which stand in Python for bytes that are no text, such as of a file's name.
_NOT_UTF8 = re.compile("[\0\ud800-\udfff]")
_ESCAPED_SURROGATE = b"\\ud"
_ESCAPE = re.compile("\0([0-9a-f]{4})")
_PATH = re.compile(r" - at .*?`\$\.(\w+(?:\.\w+)*)")
_MISSING = re.compile(r"missing required field `(\w+)`$")
_UNKNOWN = re.compile(r"contains unknown field `(.*?)`(?: - at `\$((?:\.\w+)*).*)?$", re.DOTALL)
_BOUND = re.compile(r"Expected `\w+` (>=|<=|of length <=|matching regex) ('.*'|\S+)", re.DOTALL)
_BOUNDS = {">=": "at least", "<=": "at most", "of length <=": "of a length of at most", "matching regex": "of the form"}
_WRONG = (ValueError, ArithmeticError, RecursionError)  # what msgspec raises; its own errors are ValueErrors

M = TypeVar("M")
Handler = TypeVar("Handler")


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base of all messages, events that are logged, and other values that tell their "type".

    The Structs in its fields must have `forbid_unknown_fields` as well.
    """


class Form(enum.Enum):
    """How the body of a frame is written."""

    MESSAGE_PACK = "MessagePack"
    JSON = "JSON"


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


# ---- writing


def encode(message: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of a message. Raises ProtocolError if it would be longer than the maximum."""
    try:
        return _frame(message, encode_message_pack(message), max_frame_bytes)
    except OverflowError as error:
        raise ProtocolError(f"a {type(message).__name__} message cannot be sent: {error}") from None


def encode_json_frame(message: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of a message for the socket of a job. Raises ProtocolError if it would be too long."""
    return _frame(message, encode_json(message), max_frame_bytes)


def _frame(message: Any, body: bytes, max_frame_bytes: int) -> bytes:
    if len(body) > max_frame_bytes:
        raise ProtocolError(f"a {type(message).__name__} message of {len(body)} bytes is longer than {max_frame_bytes}")
    return _LENGTH.pack(len(body)) + body


_TO_MESSAGE_PACK = msgspec.msgpack.Encoder()
_TO_JSON = msgspec.json.Encoder()


def encode_message_pack(message: Any) -> bytes:
    """Return the body of a frame between processes of jaxrun."""
    try:
        return _PLAIN + _TO_MESSAGE_PACK.encode(message)
    except UnicodeEncodeError:
        content = msgspec.to_builtins(message, builtin_types=(bytes,))
        return _ESCAPED + _TO_MESSAGE_PACK.encode(_map_texts(_escape, content))


def encode_json(value: Any) -> bytes:
    r"""Return a value as JSON. A surrogate, which UTF-8 does not have, is written as its escape, "\udcff"."""
    try:
        return _TO_JSON.encode(value)
    except UnicodeEncodeError:
        return _encode_surrogates(value, separators=(",", ":"))


def format_json(value: Any) -> str:
    """Return a value as JSON for people, in several lines."""
    try:
        return msgspec.json.format(_TO_JSON.encode(value), indent=2).decode()
    except UnicodeEncodeError:
        return _encode_surrogates(value, indent=2).decode()


def _encode_surrogates(value: Any, **form: Any) -> bytes:
    content = msgspec.to_builtins(value, str_keys=True)
    return json.dumps(content, ensure_ascii=False, **form).encode("utf-8", "backslashreplace")


def _map_texts(change: Any, content: Any) -> Any:
    if isinstance(content, str):
        return change(content)
    if isinstance(content, dict):
        return {_map_texts(change, name): _map_texts(change, value) for name, value in content.items()}
    return [_map_texts(change, one) for one in content] if isinstance(content, list | tuple) else content


def _escape(text: str) -> str:
    return _NOT_UTF8.sub(lambda found: f"\0{ord(found[0]):04x}", text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)


# ---- reading


class MessageDecoder(Generic[M]):
    """Turns a stream of bytes, in pieces of any size, into messages of the given types; other types are refused.

    tags:  the tags that must follow the frames; None for frames without tags
    """

    def __init__(
        self,
        types: Mapping[str, type[M]],
        max_frame_bytes: int = MAX_FRAME_BYTES,
        tags: Tags | None = None,
        form: Form = Form.MESSAGE_PACK,
    ) -> None:
        self._types = types
        self._max_frame_bytes = max_frame_bytes
        self._tags = tags
        self._tag_bytes = tags.nbytes if tags is not None else 0
        self._parse = _parse_json if form is Form.JSON else _parse_message_pack
        self._buffer = bytearray()

    @property
    def missing_bytes(self) -> int:
        """The number of bytes known to be missing from the current frame; never more than are really missing."""
        have = len(self._buffer)
        return _LENGTH.size - have if have < _LENGTH.size else _LENGTH.size + self._length() - have

    def feed(self, data: bytes) -> list[M]:
        """Return the messages that `data` completes, in order. Raises ProtocolError."""
        return list(self.decode_each(data))

    def decode_each(self, data: bytes) -> Iterator[M]:
        """Yield the messages that `data` completes; those before one that cannot be read come before ProtocolError."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + self._length()
            whole = end + self._tag_bytes
            if len(self._buffer) < whole:
                break
            if self._tags is not None:
                self._tags.verify(self._buffer[end:whole], self._buffer[:end])
            message = self._parse(bytes(self._buffer[_LENGTH.size : end]), self._types)
            del self._buffer[:whole]
            yield message

    def _length(self) -> int:
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._max_frame_bytes:
            raise ProtocolError(f"a frame announces {length} bytes; at most {self._max_frame_bytes} are allowed")
        return int(length)


class _Typed(Struct):
    type: str = ""


_TYPE_OF_MESSAGE_PACK = msgspec.msgpack.Decoder(_Typed)
_TYPE_OF_JSON = msgspec.json.Decoder(_Typed)


def _parse_message_pack(body: bytes, kinds: Mapping[str, type[M]]) -> M:
    head, content = body[:2], memoryview(body)[2:]
    if head == _PLAIN:
        kind = _find_kind(_TYPE_OF_MESSAGE_PACK, content, body, kinds, Form.MESSAGE_PACK)
        try:
            message: M = _message_pack_decoder(kind).decode(content)  # type: ignore[arg-type]
            return message
        except _WRONG as error:
            raise _refuse(kind, error, content, msgspec.msgpack.decode) from None
    if head != _ESCAPED:
        raise ProtocolError(f"a frame is not of version {FRAME_VERSION} of the protocol: {body[:80]!r}")
    try:
        values = _map_texts(_unescape, msgspec.msgpack.decode(content))
    except (*_WRONG, TypeError):
        raise ProtocolError(f"a frame is not MessagePack: {body[:80]!r}") from None
    return _from_plain_values(values, body, kinds, Form.MESSAGE_PACK)


def _parse_json(body: bytes, kinds: Mapping[str, type[M]]) -> M:
    if _ESCAPED_SURROGATE in body:
        return _parse_json_with_surrogates(body, kinds)
    kind = _find_kind(_TYPE_OF_JSON, body, body, kinds, Form.JSON)
    try:
        message: M = _json_decoder(kind).decode(body)  # type: ignore[arg-type]
        return message
    except _WRONG as error:
        raise _refuse(kind, error, body, msgspec.json.decode) from None


def _parse_json_with_surrogates(body: bytes, kinds: Mapping[str, type[M]]) -> M:
    """Parse what msgspec refuses: a text with a surrogate that is not one half of a character."""
    try:
        values = json.loads(body)
    except _WRONG:
        raise ProtocolError(f"a frame is not JSON: {body[:80]!r}") from None
    return _from_plain_values(values, body, kinds, Form.JSON)


def _from_plain_values(values: Any, body: bytes, kinds: Mapping[str, type[M]], form: Form) -> M:
    name = values.get("type") if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise ProtocolError(f"a frame is of no known type: {body[:80]!r}")
    return from_content(kinds[name], values, form=form)


def _find_kind(decoder: Any, content: Any, body: bytes, kinds: Mapping[str, type[M]], form: Form) -> type[M]:
    try:
        kind = kinds.get(decoder.decode(content).type)
    except msgspec.ValidationError:  # no object, or its type no text
        kind = None
    except _WRONG:
        raise ProtocolError(f"a frame is not {form.value}: {body[:80]!r}") from None
    if kind is None:
        raise ProtocolError(f"a frame is of no known type: {body[:80]!r}")
    return kind


# The decoder of a type is made when the first message comes: it evaluates all annotations.
@functools.cache
def _message_pack_decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@functools.cache
def _json_decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def from_content(kind: type[M], content: Any, *, form: Form = Form.JSON) -> M:
    """Make a Struct from the plain values of its fields. Raises ProtocolError that names the wrong field."""
    is_json = form is Form.JSON
    try:
        return msgspec.convert(content, kind, builtin_types=() if is_json else (bytes,), str_keys=is_json)
    except (*_WRONG, TypeError) as error:
        raise _refuse(kind, error, content, lambda values: values) from None


def _refuse(kind: type[Any], error: Exception, content: Any, read: Any) -> ProtocolError:
    """Return the error for a message of this kind that could not be decoded, in words of our own."""
    name, text = kind.__name__, str(error)
    if missing := _MISSING.search(text):
        return ProtocolError(f"{name} lacks its field {missing[1]}")
    if unknown := _UNKNOWN.search(text):
        return ProtocolError(f"{name}{unknown[2] or ''} has no field {unknown[1]!r}")
    if not (found := _PATH.search(text)):
        return ProtocolError(f"{name} cannot be read: {text:.200}")
    names = found[1].split(".")
    label, value = _locate(name, names, content, read)
    if bound := _BOUND.search(text):
        limit = f"{float(bound[2]):g}" if "." in bound[2] and bound[1] in (">=", "<=") else bound[2]
        return ProtocolError(f"{label}: {value} is not {_BOUNDS[bound[1]]} {limit}")
    if len(names) > 1:
        return ProtocolError(f"{label}: {text.partition(' - at ')[0]}")
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return ProtocolError(f"{label} must be of type {_type_name(types[names[0]])}, not {value}")


def _locate(name: str, path: Sequence[str], content: Any, read: Any) -> tuple[str, str]:
    """Return the name of a field within a message for people, and its value, shortened."""
    label = f"{name}.{path[0]}"
    try:
        value = read(content)[path[0]]
        for below in path[1:]:
            label = f"{label}: {value['type']}.{below}" if "type" in value else f"{label}.{below}"
            value = value[below]
    except (*_WRONG, LookupError, TypeError):
        return label, "what came"
    return label, f"{value!r:.80}"


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
