"""The command of a worker: `python …/jaxrun_runtime PROGRAM …`.

Python gets the runtime's directory and runs the `__main__.py` in it. `python -m` would search the current directory
first, for everything that the interpreter imports before the runtime's first line. -P would prevent that, but would
also set `sys.flags.safe_path` in the program, which coverage, multiprocessing and others react to.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence

from jaxrun.errors import UnavailableError

from .names import RUNTIME

_WORDS_BEFORE_PROGRAM = 2


def worker_argv(python: str, program: Sequence[str], *, is_module: bool = False) -> tuple[str, ...]:
    """Return the command that runs `program`, a file or with `is_module` a module, and its arguments."""
    return (python, runtime_directory(), *(("-m",) if is_module else ()), *program)


def program_of(argv: Sequence[str]) -> tuple[str, ...]:
    """Return `PROGRAM …`, as a worker gets it, from a worker's command."""
    return tuple(argv[_WORDS_BEFORE_PROGRAM:])


@functools.cache
def runtime_directory(package: str = "") -> str:
    """Return the directory with which Python runs the runtime, or a package within it. Raises UnavailableError."""
    spec = importlib.util.find_spec(RUNTIME)  # does not import it
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(f"the package {RUNTIME} is not installed beside jaxrun; install both: pip install .")
    return os.path.abspath(os.path.join(spec.submodule_search_locations[0], package))
