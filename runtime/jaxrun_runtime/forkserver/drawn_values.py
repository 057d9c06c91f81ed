"""Notices values that a module draws while it is imported: random numbers, the process id, a temporary directory.

Each rank would draw its own; imported once before the fork, the module would have the same in all ranks. What it does
to sys.argv, the garbage collector and timers would be lost. Packages of the table in preload_table.py were checked by
people, so this is for other modules, which the user names. What C code asks the kernel for is not noticed.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import io
import os
import random
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_RANDOM = "it draws random numbers, which would be the same in all ranks"
_PID = "it reads the process id, which differs by rank"
_TEMPORARY = "it makes a temporary file or directory, which all ranks would share"
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_PACKAGES = ("site-packages", "dist-packages")
_OWN_KEY = os.path.join(_STANDARD_LIBRARY, "multiprocessing", "process.py")  # its key is drawn again after a fork
_MODULE: Any = random  # has os.urandom under a private name, which secrets, uuid and numpy use
_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (os, "urandom", _RANDOM),
    (os, "getrandom", _RANDOM),
    (_MODULE, "_urandom", _RANDOM),
    (uuid, "uuid1", _RANDOM),  # without os.urandom, by a C library
    (os, "getpid", _PID),
    (tempfile, "mkdtemp", _TEMPORARY),
    (tempfile, "mkstemp", _TEMPORARY),
)
_OPENERS: tuple[tuple[Any, str], ...] = ((builtins, "open"), (io, "open"), (os, "open"))
_RANDOM_FILES = ("/dev/urandom", "/dev/random", "/dev/hwrng")


class DrawWatch:
    """Notes what an import draws, in `reasons`: each completes a sentence about the module, the first one first."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._originals: dict[int, Any] = {}  # by the id of what replaces it
        self._replacements: list[Any] = []  # keeps the ids from being reused
        self._collects = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        argv, state = list(sys.argv), random.getstate()
        with contextlib.ExitStack() as stack:
            for owner, name, reason in _FUNCTIONS:
                if hasattr(owner, name):
                    self._replace(stack, owner, name, self._noting(getattr(owner, name), reason))
            for owner, name in _OPENERS:
                self._replace(stack, owner, name, self._noting_random_files(getattr(owner, name)))
            self._replace(stack, random.Random, "seed", self._noting_unseeded(random.Random.seed))
            for name, collects in (("disable", False), ("enable", True)):
                self._replace(stack, gc, name, self._collecting(collects))
            yield
        if random.getstate() != state:
            self.reasons.append(_RANDOM)
        if sys.argv != argv:
            self.reasons.append("it changes sys.argv")
        if not self._collects:
            self.reasons.append("it disables the garbage collector")
        if any(any(signal.getitimer(timer)) for timer in _TIMERS):
            self.reasons.append("it starts a timer")

    def release(self, modules: Iterable[str]) -> None:
        """Give these modules the functions themselves, which they have imported by name while they were replaced."""
        for module in modules:
            values = getattr(sys.modules.get(module), "__dict__", {})
            for key, value in list(values.items()):
                if id(value) in self._originals:
                    values[key] = self._originals[id(value)]

    def _replace(self, stack: contextlib.ExitStack, owner: Any, name: str, replacement: Any) -> None:
        original = getattr(owner, name)
        self._originals[id(replacement)] = original
        self._replacements.append(replacement)
        stack.callback(setattr, owner, name, original)
        setattr(owner, name, replacement)

    def _noting(self, original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if caller != _OWN_KEY and not (reason is _PID and _is_standard(caller)):  # logging notes it in each record
                self.reasons.append(reason)
            return original(*args, **kwargs)

        return noted

    def _noting_random_files(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noted(file: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(file, int) and os.fsdecode(file) in _RANDOM_FILES:
                self.reasons.append(_RANDOM)
            return original(file, *args, **kwargs)

        return noted

    def _noting_unseeded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noted(generator: random.Random, a: Any = None, *args: Any, **kwargs: Any) -> Any:
            if a is None:
                self.reasons.append(_RANDOM)
            return original(generator, a, *args, **kwargs)

        return noted

    def _collecting(self, collects: bool) -> Callable[[], None]:
        """Return what replaces gc.disable or gc.enable: imports here run without the collector, and it stays off."""

        def note() -> None:
            self._collects = collects

        return note


def stop_timers() -> None:
    """Stop the timers of this process, which an exec would not."""
    for timer in _TIMERS:
        with contextlib.suppress(OSError, ValueError):
            signal.setitimer(timer, 0)


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) and not any(part in file for part in _PACKAGES)
