"""A notebook's cells on a rank: each runs in the namespace that the ones before have left, which is `__main__` here."""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from types import ModuleType
from typing import Any

_RICH = (  # what objects may offer besides their repr, and what it is
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
)
_main: ModuleType | None = None


def run(source: str, name: str) -> dict[str, str]:
    """Run a cell; how to show its last expression, by MIME type: empty if there is none, or it is None."""
    cache_source(source, name)
    tree = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # not ast.parse, for its frame
    assert isinstance(tree, ast.Module)
    *statements, last = tree.body or [ast.Pass(lineno=1, col_offset=0)]
    expression = None
    if isinstance(last, ast.Expr):
        expression = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
    else:
        statements.append(last)
    body = compile(ast.Module(statements, []), name, "exec", dont_inherit=True)
    namespace = _namespace()
    exec(body, namespace)
    value = eval(expression, namespace) if expression is not None else None
    return {} if value is None else _shown(value)


def get(name: str) -> Any:
    """The value of a variable of the cells. NameError."""
    try:
        return _namespace()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined in the cells of this gang") from None


def put(name: str, value: Any) -> None:
    """Make it a variable of the cells."""
    _namespace()[name] = value


def cache_source(source: str, name: str) -> None:
    """For tracebacks: the lines of code that is in no file."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name


def _namespace() -> dict[str, Any]:
    global _main
    if _main is None:
        _main = ModuleType("__main__")
        vars(_main)["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = _main  # where dataclasses, pickle and others look for what is defined in cells
    return vars(_main)


def _shown(value: Any) -> dict[str, str]:
    shown = {"text/plain": repr(value)}
    if not isinstance(value, type):
        for method, mime in _RICH:
            with contextlib.suppress(Exception):  # as a notebook does: its repr is there in any case
                found = getattr(value, method)()
                if isinstance(found, str):
                    shown[mime] = found
    return shown
