"""Checks the user's program without running or importing it: whether it exists, and whether it forbids a fork."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import stat
from collections.abc import Collection, Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from msgspec.structs import replace

from jaxrun.errors import ModuleMissingError, UsageError
from jaxrun.spec.job.job import Job

_NO_FORK_MARKER = re.compile(rb"\s*#\s*jaxrun:\s*no-fork\b")
_MARKER_LINES = 20
_LINE_LIMIT_BYTES = 4096
_BEGINNING_BYTES = 1024  # in which a file shows its language
# A pattern that is compiled only for a program that begins with #!, as that takes 4 ms.
_OTHER_SHEBANG = rb"#!.*[/ ](?:ba|z|da|k|c|tc|fi)?sh\b|#!.*[/ ](?:perl|ruby|node|Rscript|julia)\b"
_WORDS_FOR_RUN = ("run", "launch", "exec")
_EXECUTES_PYTHON = b"'''exec' "  # a script of pip's whose interpreter has a long path


def check_program(job: Job, cwd: str, commands: Collection[str] = ()) -> tuple[Job, Path | None]:
    """Return `job`, with `no_fork` set if its program forbids a fork, and the program's file if it is known.

    Raises UsageError if the program does not exist; `commands` are names that may have been meant instead.
    """
    name = job.program[0]
    source = find_module(name, cwd) if job.module else find_script(Path(name), commands)
    if not job.no_fork and source is not None and forbids_fork(source):
        return replace(job, no_fork=f"{name} asks for it (# jaxrun: no-fork)"), source
    return job, source


def working_directory() -> str:
    """Return the working directory. Raises UsageError if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory has been deleted; change to an existing one: cd DIRECTORY") from None


def find_script(path: Path, commands: Collection[str] = ()) -> Path | None:
    """Return the source of the program at `path`, None for a zip file. Raises UsageError if Python cannot run it."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            main = path / "__main__.py"
            if not main.exists():
                raise UsageError(f"program {str(path)!r} is a directory without __main__.py; name the file to run")
            path = main
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"program {str(path)!r} is not a regular file; every process must be able to read it")
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
        _refuse_other_language(path, beginning)
        return None if beginning.startswith(b"PK\x03\x04") else path
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(_missing_message(path, commands)) from None
    except OSError as error:
        raise UsageError(f"program {str(path)!r} cannot be read: {error.strerror}") from None


def _refuse_other_language(path: Path, beginning: bytes) -> None:
    """Raise UsageError for a file that is clearly not a Python program."""
    first, _, second = beginning.partition(b"\n")
    has_shebang = first.startswith(b"#!")
    is_shell = path.suffix == ".sh" and not (has_shebang and b"python" in first)
    is_other = is_shell or (has_shebang and re.match(_OTHER_SHEBANG, first) is not None)
    if path.suffix == ".ipynb":
        hint = f"is a notebook; convert it to a program with: jupyter nbconvert --to script {path}"
    elif beginning.startswith(b"\x7fELF"):
        hint = "is a compiled program; a rank runs Python, and --wrap COMMAND puts a command around each"
    elif is_other and not second.startswith(_EXECUTES_PYTHON):
        hint = "is a script in another language; name the Python program that it starts: jaxrun [OPTIONS] PROGRAM.py"
    else:
        return
    raise UsageError(f"program {str(path)!r} {hint}")


def find_module(name: str, cwd: str) -> Path | None:
    """Return the source file that `-m name` would run in `cwd`; None if finding it would require importing a package.

    Raises UsageError if a part of `name` does not exist.
    """
    top, *rest = name.split(".")
    spec = _spec(top, [cwd]) or _installed_spec(top)
    if spec is None:
        raise ModuleMissingError(f"no module named {top!r} in {cwd} or among the installed packages", name)
    if rest and spec.submodule_search_locations is None:
        hint = f"; leave out -m to run the file {name}" if rest == ["py"] else ""
        raise UsageError(f"no module named {name!r}: {top!r} is not a package{hint}")
    for at, part in enumerate(rest, 1):
        package, spec = spec, _spec(part, spec.submodule_search_locations or ())
        if spec is None and _may_find_elsewhere(package):
            return None
        if spec is None:
            raise UsageError(_missing_module(name, ".".join((top, *rest[: at - 1])), part, package))
    if spec.submodule_search_locations is not None:
        package, spec = spec, _spec("__main__", spec.submodule_search_locations)
        if spec is None and not _may_find_elsewhere(package):
            raise UsageError(
                f"the package {name!r} cannot be run: it has no __main__; name one of its modules: -m {name}.MODULE"
            )
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def forbids_fork(source: Path) -> bool:
    """Whether one of the first lines of `source` is the comment "# jaxrun: no-fork"."""
    try:
        with source.open("rb") as file:
            lines = (file.readline(_LINE_LIMIT_BYTES) for _ in range(_MARKER_LINES))
            return any(_NO_FORK_MARKER.match(line) for line in itertools.takewhile(bool, lines))
    except OSError:
        return False


def _spec(part: str, folders: Iterable[str]) -> ModuleSpec | None:
    """Look for the last part of a module's name in the folders of the package before it.

    With the full name, Python would look for a package without `__init__.py` in sys.modules, which has none of it here.
    """
    return PathFinder.find_spec(part, list(folders))


def _installed_spec(top: str) -> ModuleSpec | None:
    if top == "__main__":  # this launcher itself
        return None
    try:
        return importlib.util.find_spec(top)
    except Exception:  # raised by an installed package's own finder
        return None


def _may_find_elsewhere(package: ModuleSpec) -> bool:
    """Whether a package may have modules outside its directory: its code may add some, and a namespace is open."""
    try:
        return package.origin is None or "__path__" in Path(package.origin).read_text(errors="replace")
    except OSError:
        return True


def _missing_module(name: str, parent: str, part: str, package: ModuleSpec) -> str:
    import difflib
    import pkgutil

    text = f"no module named {name!r}: the package {parent!r} has no {part!r}"
    known = [each.name for each in pkgutil.iter_modules(package.submodule_search_locations)]
    close = difflib.get_close_matches(part, known, n=1, cutoff=0.6)
    return f"{text}; did you mean -m {parent}.{close[0]}?" if close else text


def _is_python_script(path: str) -> bool:
    """Whether a command is a script of Python's, as pip makes one for an entry point."""
    try:
        with open(path, "rb") as file:
            first, _, rest = file.read(_BEGINNING_BYTES).partition(b"\n")
    except OSError:
        return False
    return first.startswith(b"#!") and (b"python" in first or rest.startswith(_EXECUTES_PYTHON))


def _missing_message(path: Path, commands: Collection[str]) -> str:
    import difflib
    import shutil

    message = f"program {str(path)!r} does not exist"
    is_word = path.parent == Path(".")
    if not path.parent.is_dir():
        return f"{message}: there is no directory {str(path.parent)!r}"
    if path.name in ("python", "python3") and is_word:
        return f"{message} here; leave out {path.name}: jaxrun [OPTIONS] PROGRAM [ARGS]..."
    if is_word and path.name in ("uv", "uvx", "poetry", "pdm", "hatch", "pixi"):
        return f"{message} here; it comes before jaxrun: {path.name} run jaxrun [OPTIONS] PROGRAM [ARGS]..."
    if is_word and path.name in _WORDS_FOR_RUN:
        return f"{message} here; leave out {path.name}: jaxrun [OPTIONS] PROGRAM [ARGS]..."
    if is_word and path.name.isidentifier() and _installed_spec(path.name) is not None:
        return f"{message} here; start the module with: jaxrun [OPTIONS] -m {path.name} [ARGS]..."
    script = shutil.which(path.name) if is_word else None
    if script is not None and _is_python_script(script):
        return f"{message} here; start the command of that name with: jaxrun [OPTIONS] {script} [ARGS]..."
    command = difflib.get_close_matches(str(path), commands, n=1, cutoff=0.6)
    if command:
        return f"{message}; did you mean the command jaxrun {command[0]}?"
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=3, cutoff=0.6)
    if close:
        return f"{message}; did you mean {' or '.join(str(path.parent / name) for name in close)}?"
    return f"{message}; a module is started with -m, anything else by its path from {os.getcwd()}"
