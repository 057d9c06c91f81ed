"""Shows the program to a module that is imported before the fork, and records the module's output and reads."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

from jaxrun.protocol.forkserver_messages import ImportedName
from jaxrun_runtime.forkserver.fork_state import names_in


def import_as_line(line: ImportedName) -> None:
    """Import a module as if from a line of the program, so that warnings name the line. Raises the import's error."""
    module, _, names = line.name.partition(":")
    statement = f"from {module} import {names}" if names else f"import {module}"
    code = compile("\n" * (line.line - 1) + statement, line.file or "<--preload>", "exec", dont_inherit=True)
    exec(code, {"__name__": line.within, "__file__": line.file})


class OwnModuleWatch(MetaPathFinder):
    """Notes which of the program's own modules, in `folder`, an import looks for. They are never found here.

    wanted:  the names of these modules so far, even if the import works without them
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._names = names_in(folder) if folder else set()
        self.wanted: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> None:
        if path is None and (name in self._names or self._is_folder_of_its_own(name)):
            self.wanted.add(name)

    def _is_folder_of_its_own(self, name: str) -> bool:
        """Whether the program would find a directory without `__init__.py`, which gives way to any other module."""
        folder = os.path.join(self._folder, name)
        return bool(self._folder) and os.path.isdir(folder) and PathFinder.find_spec(name) is None


@contextlib.contextmanager
def as_the_program(main: str, argv: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `__main__` as in the program. `main`: its file; `argv`: the command line of its worker."""
    argv_before, main_before = list(sys.argv), sys.modules["__main__"]
    sys.argv[:] = [main, *argv[2:]] if argv[0] == "-m" else list(argv)
    module = types.ModuleType("__main__")
    if main:
        module.__file__ = main
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.argv[:], sys.modules["__main__"] = argv_before, main_before


@contextlib.contextmanager
def recorded_output() -> Iterator[dict[int, bytes]]:
    """Yield a table that is filled at the end of the block with the output to stdout and stderr, by descriptor."""
    output: dict[int, bytes] = {}
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as in a rank
    with contextlib.ExitStack() as stack:
        files = {descriptor: os.memfd_create("preload") for descriptor in (1, 2)}
        for descriptor, file in files.items():
            stack.callback(os.close, file)
            kept = os.dup(descriptor)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, descriptor)
            os.dup2(file, descriptor)
        try:
            yield output
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            for descriptor, file in files.items():
                output[descriptor] = os.pread(file, os.fstat(file).st_size, 0)


@contextlib.contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Yield a set of the variables that are read from os.environ meanwhile, except by reading all variables."""
    kind: Any = type(os.environ)
    reads: set[str] = set()
    passed: set[str] = set()  # variables that `dict(os.environ)` and the like read next
    get, iterate = kind.__getitem__, kind.__iter__

    def get_noted(environ: Any, name: Any) -> Any:
        if isinstance(name, str):
            if name in passed:
                passed.discard(name)
            else:
                reads.add(name)
        return get(environ, name)

    def iterate_noted(environ: Any) -> Iterator[str]:
        names = list(iterate(environ))
        passed.update(names)
        return iter(names)

    kind.__getitem__, kind.__iter__ = get_noted, iterate_noted
    try:
        yield reads
    finally:
        kind.__getitem__, kind.__iter__ = get, iterate
