"""Finds what a program imports before it does anything else, by reading it: nothing is imported or executed.

The leading block of a file is its docstring and imports, up to the first other statement. Imports of the program's own
modules, which are beside it, are followed in the order in which Python would execute them. Only modules that are
certain to be imported are found, whatever the program does. The search ends after a module of the program whose body
may do more than define things, because it might set a variable that a later import reads.
"""

from __future__ import annotations

import ast
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from jaxrun.errors import UsageError
from jaxrun.protocol.forkserver_messages import ImportedName, Preload
from jaxrun.spec.job.option_checks import PRELOAD_AUTO, PRELOAD_NONE
from jaxrun.spec.job.preload_table import preloadable
from jaxrun.spec.job.program_check import find_module, find_script

_MAX_FILES = 64
_MAX_BYTES = 256 * 1024  # of all files together; Python parses that in about 0.1 s
_MAX_DEPTH = 12  # imports within imports
_SETS_VARIABLES = (b"environ", b"putenv")
_MAIN = "__main__"
_IMPORTED_ANYWAY = ("jax", "jax.numpy")
_NOTHING = Preload(())
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


class _Unknown(Exception):
    """A file that cannot be read or parsed, or files that are too large together."""


def preload_order(choice: str, program: Sequence[str], directory: str, by_rank: Sequence[str]) -> Preload | None:
    """Return what a fork server imports for `program` with --preload `choice`; None if it imports nothing.

    directory:  where the program starts
    by_rank:    variables that differ by rank
    """
    if choice == PRELOAD_NONE:
        return None
    found = find_leading_imports(program, directory, preloadable if choice == PRELOAD_AUTO else lambda module: False)
    if choice != PRELOAD_AUTO:
        names = dict.fromkeys(choice.split(","))
        imports = (ImportedName(name, in_table=preloadable(name.partition(":")[0])) for name in names)
        found = replace(found, imports=tuple(imports))
    return replace(found, by_rank=tuple(by_rank)) if found.imports else None


def preloaded_modules(choice: str, program: Sequence[str], directory: str) -> list[str]:
    """Return the modules besides jax that a fork server imports with --preload `choice`, for people."""
    order = preload_order(choice, program, directory, ())
    titles = [line.title for line in order.imports] if order is not None else []
    return [title for title in titles if title not in _IMPORTED_ANYWAY]


def find_leading_imports(program: Sequence[str], directory: str, wanted: Callable[[str], bool]) -> Preload:
    """Return the `wanted` modules that `program`, named as in a worker's command, imports first.

    directory:  where the program starts
    """
    try:
        if program[0] == "-m":
            return _of_module(program[1], directory, wanted)
        path = os.path.join(directory, program[0])
        source = find_script(Path(path))
    except (UsageError, OSError, IndexError):  # the program's start reports them
        return _NOTHING
    if source is None:
        return _NOTHING
    is_folder = os.path.isdir(path)
    main = str(source) if is_folder else path
    folder = path if is_folder else os.path.dirname(os.path.realpath(path))
    return Preload(_Search([folder], wanted).run([_File(source, shown=main)]), main, folder)


def imports_of_file(source: Path, folders: Sequence[str], wanted: Callable[[str], bool]) -> tuple[ImportedName, ...]:
    """Return the leading imports of a module that is no program; the modules in `folders` belong to it."""
    return _Search(folders, wanted).run([_File(source, source.stem)])


class _File(NamedTuple):
    """A file of the program, the `__name__` of its module, and the package at which relative imports start."""

    path: Path
    name: str = _MAIN
    package: str = ""
    shown: str = ""  # if its `__file__` is spelled differently


def _of_module(name: str, directory: str, wanted: Callable[[str], bool]) -> Preload:
    source = find_module(name, directory)
    if source is None:
        return _NOTHING
    package = name if source.name == "__main__.py" else name.rpartition(".")[0]
    top, root = name.partition(".")[0], source.parents[len(package.split(".")) if package else 0]
    search = _Search([directory], wanted, {top: root})
    files = [_File(file, parent, parent) for parent in _with_parents(package) if (file := search.find(parent))]
    return Preload(search.run([*files, _File(source, _MAIN, package)]), str(source), directory)


def _with_parents(module: str) -> list[str]:
    """Write "a.b" as "a", "a.b"; nothing for an empty name."""
    parts = module.split(".") if module else []
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


class _Search:
    """One search through a program's files.

    folders:   directories with the program's own modules
    packages:  directories of the program's packages that are elsewhere, by name, among others
    """

    def __init__(
        self, folders: Sequence[str], wanted: Callable[[str], bool], packages: Mapping[str, Path] | None = None
    ) -> None:
        self._packages = packages or {}
        self._folders = [Path(folder) for folder in dict.fromkeys(folders)]
        self._wanted = wanted
        self._seen: set[Path] = set()
        self._bytes_left = _MAX_BYTES
        self._is_over = False
        self._found: dict[str, ImportedName] = {}

    def run(self, files: Iterable[_File]) -> tuple[ImportedName, ...]:
        """Return what these files import, one after the other; nothing if a file cannot be read or parsed."""
        try:
            for file in files:
                self._visit(file)
        except _Unknown:
            return ()
        return tuple(self._found.values())

    def find(self, module: str) -> Path | None:
        """Return the file of one of the program's modules; None for other modules, and for a package without a file."""
        parts = module.split(".")
        if parts[0] in sys.stdlib_module_names:
            return None
        elsewhere = [self._packages[parts[0]]] if parts[0] in self._packages else []
        for folder in (*self._folders, *elsewhere):
            base = folder.joinpath(*parts)
            for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
                if file.is_file():
                    return file
        return None

    def _is_own(self, module: str) -> bool:
        """Whether the module's package is the program's; a package without an `__init__.py` gives way to any other."""
        top = module.partition(".")[0]
        is_folder = any((folder / top).is_dir() for folder in self._folders)
        return self.find(top) is not None or (is_folder and self.find(module) is not None and not self._wanted(module))

    def _has_ended(self) -> bool:
        return self._is_over

    def _visit(self, file: _File, depth: int = 0) -> None:
        if self._has_ended() or file.path in self._seen:
            return
        self._seen.add(file.path)
        if depth > _MAX_DEPTH or len(self._seen) > _MAX_FILES:
            self._is_over = True
            return
        text = self._read(file.path)
        body = _parse(text)
        for index, statement in enumerate(body):
            if not _is_leading(statement, index):
                self._is_over |= not _only_defines(body[index:], text)
                return
            for module, names in _imported(statement, file.package):
                self._add(module, names, file, statement.lineno, depth)
            if self._has_ended():
                return

    def _add(self, module: str, names: Sequence[str], file: _File, line: int, depth: int) -> None:
        if self._is_own(module):
            for own in (*_with_parents(module), *(f"{module}.{name}" for name in names)):
                if (path := self.find(own)) is not None:
                    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
                    self._visit(_File(path, own, package), depth + 1)
            return
        chosen = [name for name in names if self._wanted(f"{module}.{name}")]
        if self._wanted(module):
            found = [f"{module}:{','.join(chosen)}" if chosen else module]
        else:
            found = [f"{module}.{name}" for name in chosen]
        for name in found:
            self._found.setdefault(
                name, ImportedName(name, file.shown or str(file.path), line, file.name, in_table=True)
            )

    def _read(self, file: Path) -> bytes:
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > self._bytes_left:
                raise _Unknown
            self._bytes_left -= status.st_size
            return file.read_bytes()
        except OSError:
            raise _Unknown from None


def _parse(text: bytes) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program's own run will show them
            return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _Unknown from None


def _is_leading(statement: ast.stmt, index: int) -> bool:
    is_docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or isinstance(statement, (ast.Import, ast.ImportFrom))


def _imported(statement: ast.stmt, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each module that a statement imports, with the names imported from it. Raises _Unknown if Python fails."""
    if isinstance(statement, ast.Import):
        yield from ((alias.name, ()) for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        if statement.level:
            parts = package.split(".") if package else []
            if len(parts) < statement.level:
                raise _Unknown
            kept = parts[: len(parts) - statement.level + 1]
            module = ".".join((*kept, module) if module else kept)
        if module != "__future__":
            yield module, tuple(alias.name for alias in statement.names)


def _only_defines(statements: Sequence[ast.stmt], text: bytes) -> bool:
    """Whether these last statements of a file change only names of the module itself, as far as can be seen."""
    return not any(word in text for word in _SETS_VARIABLES) and all(map(_defines, statements))


def _defines(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(body=body, orelse=other):
            return all(map(_defines, (*body, *other)))
        case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=last):
            return all(map(_defines, (*body, *(each for one in handlers for each in one.body), *other, *last)))
        case ast.Assign(targets=targets):
            return all(isinstance(target, (ast.Name, ast.Tuple)) for target in targets)
        case ast.AnnAssign(target=target):
            return isinstance(target, ast.Name)
        case ast.Expr(value=value):
            return isinstance(value, ast.Constant)
    return isinstance(statement, _DEFINITIONS)
