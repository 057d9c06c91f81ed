"""Runs a notebook's cells on a rank, in the namespace that earlier cells have left, which is `__main__` there."""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from types import ModuleType
from typing import Any

_RICH_DISPLAYS = (  # IPython's methods of objects, and the MIME types of what they return
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
)
_main: ModuleType | None = None


def run_cell(source: str, name: str) -> dict[str, str]:
    """Run a cell. Returns its last expression's display by MIME type; empty if there is none, or it is None."""
    cache_source(source, name)
    tree = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # ast.parse would add a frame
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
    return {} if value is None else _display(value)


def get_variable(name: str) -> Any:
    """The value of a variable of the cells. Raises NameError."""
    try:
        return _namespace()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined in the cells of this gang") from None


def set_variable(name: str, value: Any) -> None:
    """Set a variable of the cells."""
    _namespace()[name] = value


def cache_source(source: str, name: str) -> None:
    """Let tracebacks show the lines of code that is in no file."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name


def _namespace() -> dict[str, Any]:
    global _main
    if _main is None:
        _main = ModuleType("__main__")
        vars(_main)["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = _main  # where dataclasses, pickle and others look for what cells define
    return vars(_main)


def _display(value: Any) -> dict[str, str]:
    display = {"text/plain": repr(value)}
    if not isinstance(value, type):
        for method, mime_type in _RICH_DISPLAYS:
            with contextlib.suppress(Exception):  # as in a notebook, the repr is enough
                content = getattr(value, method)()
                if isinstance(content, str):
                    display[mime_type] = content
    return display
