"""What a gang's parent and its ranks send each other: any Python value, large arrays without copies through the pickle.

A parcel is a header, a note, a pickle, and the buffers that the pickle has left out (pickle protocol 5). Between
processes of one machine, large buffers travel as a memory file whose descriptor goes with the header: it is written
once, however many ranks get it, and each maps it copy-on-write.

    header = magic, kind, flags, conversation, lengths of note and pickle, number of buffers, number of descriptors
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import io
import mmap
import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxrun.errors import ProtocolError

_MAGIC = b"JXP1"
_HEAD = struct.Struct("<4sBBxxIIQIxxxx")
_SIZE = struct.Struct("<Q")
_SHARED = 1
_MIN_SHARED_BYTES = 2**18  # bytes of buffers from which a memory file is worth its while
_ALIGNED = 64
_MMAP_NEEDS_NO_DESCRIPTOR: bool = sys.version_info >= (3, 13)  # without a descriptor of its own
_ALONE: dict[str, Any] = {"trackfd": False}
_MAX_DESCRIPTORS = 32
_MAX_BUFFERS = 2**20
_ROOM = socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)
Reduce = Callable[[Any], Any]
_open_files = threading.local()  # those of the parcel that this thread packs or opens


class GangMessageKind(enum.IntEnum):
    """What a parcel is for; the first four go to a rank, the others come from it."""

    CALL = 1  # run this function
    VALUE = 2  # for who is in the conversation, both ways
    END_CALL = 3  # the conversation is over
    SHUTDOWN = 4  # the gang is: end
    READY = 5  # a rank has come
    STDOUT = 6  # it has printed, on stdout
    STDERR = 7  # on stderr
    RESULT = 8  # its function has returned this
    EXCEPTION = 9  # or raised that


class OwnedDescriptor:
    """A descriptor that is closed when nobody refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


class SharedBuffer:
    """Memory of `nbytes` bytes that both sides see: sent within a value, it arrives as a Block on the same memory."""

    def __init__(self, nbytes: int, _file: OwnedDescriptor | None = None) -> None:
        if _file is None:
            _file = OwnedDescriptor(os.memfd_create("jaxrun-block", os.MFD_CLOEXEC))
            os.ftruncate(_file.fd, nbytes)
        self.nbytes = nbytes
        self.file = _file
        self._map = mmap.mmap(_file.fd, nbytes)
        self.memory = memoryview(self._map)

    def __reduce__(self) -> tuple[Any, ...]:
        files = getattr(_open_files, "files", None)
        if files is None:
            raise pickle.PicklingError("a Block travels on the machine that it is on, and within a parcel only")
        files.append(self.file)
        return _arrived, (self.nbytes, len(files) - 1)


def _arrived(nbytes: int, number: int) -> SharedBuffer:
    return SharedBuffer(nbytes, _open_files.files[number])


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A function that is imported where it is called."""

    module: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class GangMessage:
    """One message; `conversation` is the number of the one that it belongs to, `note` a word for who sorts parcels."""

    kind: GangMessageKind
    call: int
    body: bytes | bytearray | memoryview = b""
    note: bytes = b""
    buffers: tuple[memoryview, ...] = ()
    files: tuple[OwnedDescriptor, ...] = ()
    shared: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle and of its buffers."""
        sizes = struct.unpack(f"<{len(self.buffers[0]) // 8}Q", self.buffers[0]) if self.shared else ()
        return len(self.body) + (sum(sizes) or sum(buffer.nbytes for buffer in self.buffers))

    def load(self) -> Any:
        """The value within. Whatever its pickle raises."""
        buffers = self.buffers
        files = self.files
        if self.shared:
            sizes = struct.unpack(f"<{len(self.buffers[0]) // 8}Q", self.buffers[0])
            buffers, files = tuple(_mapped(files[0].fd, sizes)), files[1:]
        _open_files.files = files
        try:
            return pickle.loads(self.body, buffers=buffers)
        finally:
            _open_files.files = None

    def with_copied_buffers(self) -> GangMessage:
        """The same with copies of what it took from arrays, which may change before it has left."""
        return replace(self, buffers=tuple(memoryview(bytes(buffer)) for buffer in self.buffers))

    def to_frame(self) -> list[bytes | bytearray | memoryview]:
        """Its bytes, in pieces."""
        flags = _SHARED if self.shared else 0
        counts = (len(self.note), len(self.body), len(self.buffers))
        head = _HEAD.pack(_MAGIC, self.kind, flags | len(self.files) << 1, self.call, *counts)
        sizes = b"".join(_SIZE.pack(buffer.nbytes) for buffer in self.buffers)
        return [head + sizes + self.note, self.body, *self.buffers]


def pack(
    kind: GangMessageKind,
    conversation: int,
    value: Any,
    *,
    share: bool,
    note: bytes = b"",
    reduce: Reduce | None = None,
) -> GangMessage:
    """A parcel of `value`, by cloudpickle; `share`: the other side is on this machine and may be sent descriptors.

    `reduce` is asked about each object first, as pickle's `reducer_override` is. Whatever pickling raises.
    """
    left_out: list[pickle.PickleBuffer] = []
    written = io.BytesIO()
    files: list[OwnedDescriptor] | None = [] if share else None
    _open_files.files = files
    try:
        pickler = _pickler()(written, protocol=5, buffer_callback=left_out.append)
        pickler.reduce_first = reduce
        pickler.dump(value)
    finally:
        _open_files.files = None
    if files is not None and len(files) >= _MAX_DESCRIPTORS:
        raise pickle.PicklingError(
            f"a value with {len(files)} Blocks is too much for one parcel: at most {_MAX_DESCRIPTORS - 1}"
        )
    views = tuple(buffer.raw() for buffer in left_out)
    total = sum(view.nbytes for view in views)
    body = written.getvalue()  # a buffer in a cycle would have Python complain
    if not share or total < _MIN_SHARED_BYTES:
        return GangMessage(kind, conversation, body, note, views, tuple(files or ()))
    sizes = memoryview(struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views)))
    file = _memory_file(views)
    return GangMessage(kind, conversation, body, note, (sizes,), (file, *(files or ())), shared=True)


@functools.cache
def _pickler() -> Any:
    import cloudpickle  # 24 ms, which a rank that is never sent a function need not pay

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        reduce_first: Reduce | None = None

        def reducer_override(self, obj: Any) -> Any:
            found = self.reduce_first(obj) if self.reduce_first is not None else NotImplemented
            return super().reducer_override(obj) if found is NotImplemented else found

    return Pickler


def _memory_file(views: tuple[memoryview, ...]) -> OwnedDescriptor:
    file = OwnedDescriptor(os.memfd_create("jaxrun-parcel", os.MFD_CLOEXEC))
    at = 0
    for view in views:
        done = 0
        while done < view.nbytes:
            done += os.pwrite(file.fd, view[done:], at + done)
        at += _aligned(view.nbytes)
    os.ftruncate(file.fd, max(at, 1))
    return file


def _mapped(fd: int, sizes: tuple[int, ...]) -> Iterator[memoryview]:
    whole = _memory(fd, max(1, sum(map(_aligned, sizes))))
    at = 0
    for size in sizes:
        yield whole[at : at + size]
        at += _aligned(size)


def _memory(fd: int, size: int) -> memoryview:
    """The file's bytes, of our own. Before Python 3.13 a map keeps a descriptor for each array that somebody keeps."""
    if _MMAP_NEEDS_NO_DESCRIPTOR:
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY, **_ALONE))
    data = memoryview(bytearray(size))
    done = 0
    while done < size:
        done += os.preadv(fd, [data[done:]], done)
    return data


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class GangMessageReader:
    """Takes parcels from a socket as they arrive; blocking or not, as the socket is."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._files: list[OwnedDescriptor] = []
        self._parser = self._parse()
        self._wanted = next(self._parser)
        self._parcel: GangMessage | None = None

    def receive(self) -> GangMessage:
        """The next parcel. BlockingIOError if it has not come whole, EOFError if none can; ProtocolError, OSError."""
        while True:
            count = self._fill()
            self._wanted = self._wanted[count:]
            if not self._wanted.nbytes:
                self._wanted = next(self._parser)
            if self._parcel is not None:
                parcel, self._parcel = self._parcel, None
                return parcel

    def _fill(self) -> int:
        count, extra, flags, _ = self._socket.recvmsg_into([self._wanted], _ROOM, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._files += [OwnedDescriptor(fd) for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])]
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("descriptors were lost on their way: too many files are open")
        if not count:
            raise EOFError
        return count

    def _parse(self) -> Iterator[memoryview]:
        """Yields the memory that is to be filled next; a parcel that is whole is left in `_parcel`."""
        while True:
            yield from self._parse_one()  # whose variables hold the parcel no longer than it lasts

    def _parse_one(self) -> Iterator[memoryview]:
        head = bytearray(_HEAD.size)
        yield memoryview(head)
        magic, kind, flags, conversation, note, body, buffers = _HEAD.unpack(head)
        if magic != _MAGIC or buffers > _MAX_BUFFERS or kind not in GangMessageKind.__members__.values():
            raise ProtocolError("what arrived is no parcel of this version of jaxrun")
        rest = bytearray(buffers * _SIZE.size + note)
        if rest:
            yield memoryview(rest)
        sizes = [size for (size,) in _SIZE.iter_unpack(rest[: buffers * _SIZE.size])]
        content = [bytearray(size) for size in (body, *sizes)]
        for piece in content:
            if piece:
                yield memoryview(piece)
        files = tuple(self._files[: flags >> 1])
        del self._files[: flags >> 1]
        views = tuple(memoryview(piece) for piece in content[1:])
        word = bytes(rest[buffers * _SIZE.size :])
        self._parcel = GangMessage(
            GangMessageKind(kind), conversation, content[0], word, views, files, bool(flags & _SHARED)
        )


class GangMessageWriter:
    """Hands parcels to a socket, in order; what does not fit yet is kept."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pieces: list[memoryview] = []
        self._files: dict[int, tuple[OwnedDescriptor, ...]] = {}

    def add(self, parcel: GangMessage) -> None:
        pieces = [memoryview(piece).cast("B") for piece in parcel.to_frame() if len(piece)]
        if parcel.files:
            self._files[id(pieces[0])] = parcel.files
        self._pieces += pieces

    def flush(self) -> bool:
        """Send what is there; whether nothing is left. OSError."""
        while self._pieces:
            first = self._pieces[0]
            files = self._files.get(id(first), ())
            try:
                count = self._send(files)
            except BlockingIOError:
                return False
            self._files.pop(id(first), None)
            self._advance(count)
        return True

    def _send(self, files: tuple[OwnedDescriptor, ...]) -> int:
        # What bears descriptors begins a message of its own, and the next that does is not sent with it.
        pieces = self._pieces[:1]
        for piece in self._pieces[1:64]:
            if id(piece) in self._files:
                break
            pieces.append(piece)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(files)}i", *(f.fd for f in files)))]
        return self._socket.sendmsg(pieces, rights if files else [])

    def _advance(self, count: int) -> None:
        while count:
            first = self._pieces[0]
            if count < first.nbytes:
                self._pieces[0] = first[count:]
                return
            count -= first.nbytes
            del self._pieces[0]
