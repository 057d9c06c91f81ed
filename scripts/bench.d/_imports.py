"""`--program NAME`: what the measured programs import at their beginning besides JAX, as programs of users do."""

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
# netket makes JAX's backend when it is imported: plain processes must have joined before. So it is imported by
# jax_sum.py after that, and stands in no leading block.
_IMPORTED_LATE = ("netket",)
ENVIRON = {"KERAS_BACKEND": "jax", "NETKET_NO_TIPS": "1"}


def why_not(program: str) -> str:
    """What is missing for this program; empty if all is there."""
    packages = {name.partition(".")[0] for name in IMPORTS[program]}
    missing = sorted(name for name in packages if importlib.util.find_spec(name) is None)
    return (
        f"--program {program}: not installed; to have it: .venv/bin/pip install {' '.join(missing)}" if missing else ""
    )


def import_lines(program: str) -> str:
    """The lines that stand at the beginning of a program."""
    return "".join(f"import {name}\n" for name in IMPORTS[program] if name not in _IMPORTED_LATE)


def with_imports(text: str, program: str) -> str:
    """A program's text with these imports before its first statement, behind docstring and `from __future__`."""
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
    """The program of this path, with these imports; a new file in `directory` unless it is bare."""
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
