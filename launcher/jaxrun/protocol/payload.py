"""Any Python value as bytes, including large arrays and exceptions, for the messages of a gang.

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
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from msgspec import Struct

_MIN_SHARED_BYTES = 2**18  # of buffers; below this, a memory file is not worth the effort
_ALIGNMENT = 64
_MMAP_NEEDS_NO_DESCRIPTOR: bool = sys.version_info >= (3, 13)
_MMAP_WITHOUT_DESCRIPTOR: dict[str, Any] = {"trackfd": False}
_CLOUDPICKLE_FILE_NAME = "<dynamic-code>"  # the file name of all code that cloudpickle 3.1.3 pickles
# The main module in a child of multiprocessing's spawn; no other process can import it.
_MAIN_OF_SPAWNED = "__mp_main__"
Reduce = Callable[[Any], Any]


class OwnedDescriptor:
    """A file descriptor that is closed when the last reference to it is gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


class FunctionReference(Struct, frozen=True):
    """A function that the receiver imports before it calls it."""

    module: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)


class Payload(Struct, frozen=True, eq=False):
    """A pickled value.

    body:     the pickle
    buffers:  buffers outside the pickle; with a `file`, only their sizes, 8 bytes each
    file:     the memory file that holds the buffers, None if they travel with the message
    """

    body: bytes | bytearray | memoryview = b""
    buffers: tuple[memoryview, ...] = ()
    file: OwnedDescriptor | None = None

    @property
    def nbytes(self) -> int:
        sizes = (view.nbytes for view in self.buffers) if self.file is None else self._shared_sizes()
        return len(self.body) + sum(sizes)

    def load(self) -> Any:
        buffers = self.buffers if self.file is None else _map_buffers(self.file.fd, self._shared_sizes())
        return pickle.loads(self.body, buffers=buffers)

    def copy_buffers(self) -> Payload:
        """Return a copy with copies of the arrays' memory, which may change before the payload has been sent."""
        return Payload(self.body, tuple(memoryview(bytes(buffer)) for buffer in self.buffers), self.file)

    def _shared_sizes(self) -> tuple[int, ...]:
        return struct.unpack(f"<{len(self.buffers[0]) // 8}Q", self.buffers[0])


def dump(value: Any, *, share: bool, reduce: Reduce | None = None, file: OwnedDescriptor | None = None) -> Payload:
    """Pickle `value`; with `share`, the receiver is on this machine and may be sent a memory file.

    reduce:  called for each object first, like pickle's `reducer_override`
    file:    a memory file whose earlier value is no longer used, to be overwritten; None for a new one

    Raises any exception that pickling raises.
    """
    left_out: list[pickle.PickleBuffer] = []
    written = io.BytesIO()
    pickler = _pickler()(written, protocol=5, buffer_callback=left_out.append)
    pickler.reduce_first = reduce
    pickler.dump(value)
    views = tuple(buffer.raw() for buffer in left_out)
    body = written.getvalue()  # Python would complain about its buffer if it were in a reference cycle
    if not share or sum(view.nbytes for view in views) < _MIN_SHARED_BYTES:
        return Payload(body, views)
    sizes = memoryview(struct.pack(f"<{len(views)}Q", *(view.nbytes for view in views)))
    return Payload(body, (sizes,), _write_memory_file(views, file or make_memory_file()))


@functools.cache
def _pickler() -> Any:
    import cloudpickle  # takes 24 ms, which a rank saves if it never gets a function

    if _MAIN_OF_SPAWNED in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[_MAIN_OF_SPAWNED])

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        reduce_first: Reduce | None = None

        def reducer_override(self, obj: Any) -> Any:
            found = self.reduce_first(obj) if self.reduce_first is not None else NotImplemented
            if found is NotImplemented and isinstance(obj, CodeType) and obj.co_filename != _CLOUDPICKLE_FILE_NAME:
                found = reduce_code(obj, obj.co_filename)
            return super().reducer_override(obj) if found is NotImplemented else found

    return Pickler


def reduce_code(code: CodeType, filename: str) -> tuple[Any, ...]:
    """Return a `Reduce` result that gives code this file name at the receiver, where tracebacks find its lines."""
    return _with_file_name, (code.replace(co_filename=_CLOUDPICKLE_FILE_NAME), filename)


def _with_file_name(code: CodeType, filename: str) -> CodeType:
    return code.replace(co_filename=filename)


def make_memory_file() -> OwnedDescriptor:
    return OwnedDescriptor(os.memfd_create("jaxrun-buffers", os.MFD_CLOEXEC))


def _write_memory_file(views: tuple[memoryview, ...], file: OwnedDescriptor) -> OwnedDescriptor:
    offset = 0
    for view in views:
        done = 0
        while done < view.nbytes:
            done += os.pwrite(file.fd, view[done:], offset + done)
        offset += _aligned(view.nbytes)
    if os.fstat(file.fd).st_size < max(offset, 1):
        os.ftruncate(file.fd, max(offset, 1))
    return file


def _map_buffers(fd: int, sizes: tuple[int, ...]) -> Iterator[memoryview]:
    """Yield the buffers of a memory file, as private memory.

    Before Python 3.13 they are read, because a mapping would keep a descriptor open for the life of an array.
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


def pickle_exception(error: BaseException) -> bytes:
    """Return `error` for pickle.loads, without its traceback, cause and context; empty if it cannot be pickled.

    Raises nothing, even if the methods of its class raise a sys.exit.
    """
    import cloudpickle

    for form in (error, _Rebuilt(error)):
        with contextlib.suppress(BaseException):
            data: bytes = cloudpickle.dumps(form)
            made = pickle.loads(data)
            if type(made).__name__ == type(error).__name__ and str(made) == str(error):
                return data
    return b""


class _Rebuilt:
    """Pickles an exception so that unpickling does not call its __init__."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _rebuild, (type(error), error.args, {k: v for k, v in vars(error).items() if not k.startswith("__")})


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error
