"""Run the user's program exactly as `python` would: sys.argv, sys.path[0], `__main__`, `-m`, directories and zip files."""

from __future__ import annotations

import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from typing import Any


def split(argv: list[str]) -> tuple[bool, str, list[str]]:
    """`["-m", "pkg.mod", "a"]` or `["train.py", "a"]` → (is it a module, its name or path, its arguments)."""
    if argv[0] == "-m":
        return True, argv[1], argv[2:]
    return False, argv[0], argv[1:]


def run(argv: list[str]) -> None:
    """Run the program to its end; whatever it raises, SystemExit too, reaches the caller."""
    is_module, program, arguments = split(argv)
    main = _fresh_main()
    if is_module:
        sys.argv[:] = [program, *arguments]
        sys.path.insert(0, os.getcwd())
        _run_as_main(program, alter_argv=True)
        return
    sys.argv[:] = [program, *arguments]
    if _is_importable(program):
        sys.path.insert(0, program)
        _run_as_main("__main__", alter_argv=False)
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
    code = _read_code(program)
    main.__dict__.update(
        __file__=program,
        __cached__=None,
        __package__=None,
        __spec__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", program),
    )
    exec(code, main.__dict__)


def exit_status(error: SystemExit) -> int:
    """The status that Python gives a SystemExit: none is 0, a number is itself modulo 256, anything else is 1."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    # What `python -m` itself calls, as do pdb, trace and cProfile's kin; runpy.run_module would throw the module's
    # globals away while its threads and exit handlers still use them.
    run_module_as_main: Any = getattr(runpy, "_run_module_as_main")  # noqa: B009
    run_module_as_main(name, alter_argv)


def _is_importable(path: str) -> bool:
    """Whether `path` is a directory or a zip file, which Python runs by their `__main__.py`."""
    return pkgutil.get_importer(path) is not None


def _read_code(path: str) -> types.CodeType:
    with io.open_code(os.path.abspath(path)) as file:
        code = pkgutil.read_code(file) if path.endswith(".pyc") else None
        if code is None:
            file.seek(0)
            code = compile(file.read(), path, "exec", dont_inherit=True)
    return code
