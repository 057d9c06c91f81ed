"""Runs the user's program exactly as `python` does: sys.argv, sys.path[0], `__main__`, `-m`, directories, zip files."""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import Any

from jaxrun.protocol.staging_messages import read_staged, staged_path
from jaxrun_runtime.import_watch import call_after_import

_LONG_MAX = 2**63 - 1  # Python converts an exit status to a C long


def split_argv(argv: list[str]) -> tuple[bool, str, list[str]]:
    """Split `["-m", "pkg.mod", "a"]` or `["train.py", "a"]` into (is it a module, its name or path, its arguments)."""
    if argv[0] == "-m":
        return True, argv[1], argv[2:]
    return False, argv[0], argv[1:]


def count_own_words(argv: list[str]) -> int:
    """Return how many words name the program; its arguments follow."""
    return len(argv) - len(split_argv(argv)[2])


def short_name(argv: list[str]) -> str:
    """Return the program's name for lists of processes: "train.py", "package.train", "gang"."""
    is_module, name, _ = split_argv(argv)
    if is_module:
        return "gang" if name == f"{__package__}.gang" else name
    return os.path.basename(name.rstrip(os.sep)) or name


def run(argv: list[str]) -> None:
    """Run the program to its end. Raises whatever the program raises, including SystemExit."""
    staged = read_staged(os.environ)
    sys.path[:] = [staged_path(folder, staged) for folder in sys.path]
    is_module, name, arguments = split_argv(argv)
    sys.orig_argv[:] = [sys.executable, *argv]
    main = _fresh_main()
    call_after_import("_pytest.assertion.rewrite", _forbid_rewriting)
    if is_module:
        sys.argv[:] = ["-m", *arguments]  # runpy replaces "-m" by the file's path when it has found the file
        _search_first(staged_path(os.getcwd(), staged))
        _run_as_main(name, alter_argv=True)
        return
    sys.argv[:] = [name, *arguments]
    path = os.path.join(os.getcwd(), name)
    if _is_importable(path):
        sys.path.insert(0, path)
        _run_as_main("__main__", alter_argv=False)
        return
    _search_first(os.path.dirname(os.path.realpath(path)))
    code, loader = _load(path)
    main.__dict__.update(__file__=path, __loader__=loader("__main__", path))
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    exec(code, main.__dict__)


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def exit_status(error: SystemExit) -> int:
    """Return Python's exit status for a SystemExit: 0 without a code, a number modulo 256, 1 for anything else."""
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    return error.code & 0xFF if -_LONG_MAX <= error.code <= _LONG_MAX else 0xFF


def _forbid_rewriting(_: types.ModuleType) -> None:
    """Mark jaxrun's packages so that pytest, in the program, does not warn that it cannot rewrite them any more."""
    for package in ("jaxrun", "jaxrun_runtime"):
        sys.modules[package].__doc__ = f"{sys.modules[package].__doc__}\nPYTEST_DONT_REWRITE"


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # an alias that multiprocessing has made, if it is already imported
        sys.modules["__mp_main__"] = main
    return main


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    # `python -m` itself calls this function. runpy.run_module would clear the module's globals while its threads and
    # exit handlers still use them.
    run_module_as_main: Any = getattr(runpy, "_run_module_as_main")  # noqa: B009
    run_module_as_main(name, alter_argv)


def _is_importable(path: str) -> bool:
    """Whether `path` is a directory or a zip file. Python runs the `__main__.py` in it."""
    return pkgutil.get_importer(path) is not None


def _load(path: str) -> tuple[types.CodeType, type[SourceFileLoader] | type[SourcelessFileLoader]]:
    """Return the code of a script or of a compiled file, and the class of its loader under Python."""
    with io.open_code(path) as file:
        if (compiled := pkgutil.read_code(file)) is not None:
            return compiled, SourcelessFileLoader
        file.seek(0)
        return compile(file.read(), path, "exec", dont_inherit=True), SourceFileLoader
