"""Any Python value as bytes, large arrays and shared memory included: what the messages of a gang carry.

A value is pickled with protocol 5 by cloudpickle; the buffers of its arrays are left out of the pickle. Between
processes of one machine, large buffers travel as a memory file whose descriptor goes with the message: it is written
once, however many ranks get it, and each maps it copy-on-write.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import mmap
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

MAX_DESCRIPTORS = 32  # that one message may carry
_MIN_SHARED_BYTES = 2**18  # of buffers, from which a memory file is worth its while
_ALIGNMENT = 64
_MMAP_NEEDS_NO_DESCRIPTOR: bool = sys.version_info >= (3, 13)
_MMAP_WITHOUT_DESCRIPTOR: dict[str, Any] = {"trackfd": False}
_CLOUDPICKLE_FILE_NAME = "<dynamic-code>"  # of all code that cloudpickle 3.1.3 pickles
Reduce = Callable[[Any], Any]
_current = threading.local()  # .descriptors: those of the value that this thread pickles or unpickles


class OwnedDescriptor:
    """A file descriptor that is closed when nobody refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


class SharedBuffer:
    """Memory of `nbytes` bytes that both sides see.

    Sent within a value, it arrives as a SharedBuffer on the same memory.
    """

    def __init__(self, nbytes: int, _file: OwnedDescriptor | None = None) -> None:
        if _file is None:
            _file = OwnedDescriptor(os.memfd_create("jaxrun-shared", os.MFD_CLOEXEC))
            os.ftruncate(_file.fd, nbytes)
        self.nbytes = nbytes
        self.file = _file
        self._map = mmap.mmap(_file.fd, nbytes)
        self.memory = memoryview(self._map)

    def __reduce__(self) -> tuple[Any, ...]:
        descriptors = getattr(_current, "descriptors", None)
        if descriptors is None:
            raise pickle.PicklingError("a SharedBuffer cannot leave its machine, and travels in a gang's messages only")
        descriptors.append(self.file)
        return _received_buffer, (self.nbytes, len(descriptors) - 1)


def _received_buffer(nbytes: int, index: int) -> SharedBuffer:
    return SharedBuffer(nbytes, _current.descriptors[index])


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A function that is imported where it is called."""

    module: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A pickled value.

    body:         the pickle
    buffers:      those that the pickle has left out; if `is_shared`, only their sizes, 8 bytes each
    descriptors:  the memory file with the buffers, if `is_shared`, and the files of SharedBuffers
    """

    body: bytes | bytearray | memoryview = b""
    buffers: tuple[memoryview, ...] = ()
    descriptors: tuple[OwnedDescriptor, ...] = ()
    is_shared: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle and of its buffers."""
        return len(self.body) + sum(self._shared_sizes() if self.is_shared else (view.nbytes for view in self.buffers))

    def load(self) -> Any:
        """Return the value. Raises whatever its pickle raises."""
        buffers, descriptors = self.buffers, self.descriptors
        if self.is_shared:
            buffers = tuple(_map_buffers(descriptors[0].fd, self._shared_sizes()))
            descriptors = descriptors[1:]
        _current.descriptors = descriptors
        try:
            return pickle.loads(self.body, buffers=buffers)
        finally:
            _current.descriptors = None

    def copy_buffers(self) -> Payload:
        """Return the same with copies of the arrays' memory, which may change before the payload has been sent."""
        buffers = tuple(memoryview(bytes(buffer)) for buffer in self.buffers)
        return Payload(self.body, buffers, self.descriptors, self.is_shared)

    def _shared_sizes(self) -> tuple[int, ...]:
        return struct.unpack(f"<{len(self.buffers[0]) // 8}Q", self.buffers[0])


def dump(value: Any, *, share: bool, reduce: Reduce | None = None) -> Payload:
    """Pickle `value`; with `share`, the receiver is on this machine and may be sent descriptors.

    `reduce` is asked about each object first, as pickle's `reducer_override` is. Raises whatever pickling raises.
    """
    left_out: list[pickle.PickleBuffer] = []
    written = io.BytesIO()
    descriptors: list[OwnedDescriptor] | None = [] if share else None
    _current.descriptors = descriptors
    try:
        pickler = _pickler()(written, protocol=5, buffer_callback=left_out.append)
        pickler.reduce_first = reduce
        pickler.dump(value)
    finally:
        _current.descriptors = None
    if descriptors is not None and len(descriptors) >= MAX_DESCRIPTORS:
        raise pickle.PicklingError(
            f"a value with {len(descriptors)} SharedBuffers is too much for one message: at most {MAX_DESCRIPTORS - 1}"
        )
    views = tuple(buffer.raw() for buffer in left_out)
    body = written.getvalue()  # its buffer, in a cycle, would have Python complain
    if not share or sum(view.nbytes for view in views) < _MIN_SHARED_BYTES:
        return Payload(body, views, tuple(descriptors or ()))
    sizes = memoryview(struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views)))
    return Payload(body, (sizes,), (_write_memory_file(views), *(descriptors or ())), is_shared=True)


@functools.cache
def _pickler() -> Any:
    import cloudpickle  # 24 ms, which a rank that is never sent a function need not pay

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        reduce_first: Reduce | None = None

        def reducer_override(self, obj: Any) -> Any:
            found = self.reduce_first(obj) if self.reduce_first is not None else NotImplemented
            if found is NotImplemented and isinstance(obj, CodeType) and obj.co_filename != _CLOUDPICKLE_FILE_NAME:
                found = reduce_code(obj, obj.co_filename)
            return super().reducer_override(obj) if found is NotImplemented else found

    return Pickler


def reduce_code(code: CodeType, filename: str) -> tuple[Any, ...]:
    """How a `Reduce` has code arrive under this file name, by which tracebacks find its lines."""
    return _with_file_name, (code.replace(co_filename=_CLOUDPICKLE_FILE_NAME), filename)


def _with_file_name(code: CodeType, filename: str) -> CodeType:
    return code.replace(co_filename=filename)


def _write_memory_file(views: tuple[memoryview, ...]) -> OwnedDescriptor:
    file = OwnedDescriptor(os.memfd_create("jaxrun-buffers", os.MFD_CLOEXEC))
    offset = 0
    for view in views:
        done = 0
        while done < view.nbytes:
            done += os.pwrite(file.fd, view[done:], offset + done)
        offset += _aligned(view.nbytes)
    os.ftruncate(file.fd, max(offset, 1))
    return file


def _map_buffers(fd: int, sizes: tuple[int, ...]) -> Iterator[memoryview]:
    """The buffers of a memory file, as private memory.

    Before Python 3.13 they are read, as a map would keep a descriptor for as long as somebody keeps an array.
    """
    total = max(1, sum(map(_aligned, sizes)))
    if _MMAP_NEEDS_NO_DESCRIPTOR:
        whole = memoryview(mmap.mmap(fd, total, access=mmap.ACCESS_COPY, **_MMAP_WITHOUT_DESCRIPTOR))
    else:
        whole = memoryview(bytearray(total))
        done = 0
        while done < total:
            done += os.preadv(fd, [whole[done:]], done)
    offset = 0
    for size in sizes:
        yield whole[offset : offset + size]
        offset += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
