"""`--program NAME`: packages that the measured programs import first besides JAX, as users' programs do."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BARE = "bare"
IMPORTS = {
    BARE: (),
    "flax": ("flax.nnx", "optax", "orbax.checkpoint"),
    "netket": ("netket",),
    "keras": ("keras",),
}
# Importing netket makes JAX's backend, so plain processes must join before. So jax_sum.py imports it later, not in the
# leading block.
_IMPORTED_LATE = ("netket",)
ENVIRON = {"KERAS_BACKEND": "jax", "NETKET_NO_TIPS": "1"}


def why_not(program: str) -> str:
    """Return a line that names missing packages of this program; empty if all are installed."""
    packages = {name.partition(".")[0] for name in IMPORTS[program]}
    missing = sorted(name for name in packages if importlib.util.find_spec(name) is None)
    return (
        f"--program {program}: not installed; to have it: .venv/bin/pip install {' '.join(missing)}" if missing else ""
    )


def import_lines(program: str) -> str:
    """Return the import lines for the beginning of a program."""
    return "".join(f"import {name}\n" for name in IMPORTS[program] if name not in _IMPORTED_LATE)


def with_imports(text: str, program: str) -> str:
    """Return a program's text with these imports before its first statement, after docstring and `from __future__`."""
    at = 0
    for index, statement in enumerate(ast.parse(text).body):
        is_docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_docstring and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        at = statement.end_lineno or 0
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:at], import_lines(program), *lines[at:]])


@contextmanager
def importing(path: Path, program: str, directory: Path) -> Iterator[Path]:
    """Return the path of the program with these imports: a new file in `directory`, unless the program is bare."""
    if program == BARE:
        yield path
        return
    before = dict(os.environ)
    late = " ".join(name for name in IMPORTS[program] if name in _IMPORTED_LATE)
    os.environ.update(ENVIRON | {"BENCH_IMPORTS": late})
    made = directory / path.name
    made.write_text(with_imports(path.read_text(), program))
    try:
        yield made
    finally:
        os.environ.clear()
        os.environ.update(before)
