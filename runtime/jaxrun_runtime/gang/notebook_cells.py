"""Runs a notebook's cells on a rank, in the namespace that earlier cells have left, which is `__main__` there."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import linecache
import sys
from collections.abc import Collection, Coroutine, Sequence
from types import CodeType, ModuleType
from typing import Any

import jaxrun_runtime
from jaxrun.protocol.notebook_messages import CellOutput
from jaxrun_runtime.gang import notebook_shell

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

_RICH_DISPLAYS = (  # IPython's methods of objects, and the MIME types of what they return
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
)
_main: ModuleType | None = None
_event_loop: asyncio.AbstractEventLoop | None = None  # of the cells that await


def run_cell(code: str, name: str, source: str = "", ranks: Collection[int] | None = None) -> CellOutput:
    """Run a cell on this rank, if that is one of `ranks`; None for all.

    code:    Python, in which magics and !commands are calls of `get_ipython()`, and which may await
    source:  the cell as it was typed, for tracebacks; empty if it is the same
    """
    if ranks is not None and jaxrun_runtime.rank not in ranks:
        return CellOutput()
    cache_source(source or code, name)
    tree = compile(code, name, "exec", ast.PyCF_ONLY_AST | _AWAIT, dont_inherit=True)  # ast.parse would add a frame
    assert isinstance(tree, ast.Module)
    *statements, last = tree.body or [ast.Pass(lineno=1, col_offset=0)]
    expression = None
    if isinstance(last, ast.Expr):
        expression = compile(ast.Expression(last.value), name, "eval", _AWAIT, dont_inherit=True)
    else:
        statements.append(last)
    body = compile(ast.Module(statements, []), name, "exec", _AWAIT, dont_inherit=True)
    parts = [body] if expression is None else [body, expression]
    awaits = any(part.co_flags & inspect.CO_COROUTINE for part in parts)
    value = _run_coroutine(_evaluate_awaiting(parts)) if awaits else _evaluate(parts)
    return CellOutput({} if value is None else _display(value), notebook_shell.pop_displays())


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
        main = _main = ModuleType("__main__")
        vars(main)["__builtins__"] = sys.modules["builtins"]
        vars(main)["get_ipython"] = lambda: notebook_shell.get_shell(main)
        vars(main)["display"] = _show
        sys.modules["__main__"] = main  # where dataclasses, pickle and others look for what cells define
    return vars(_main)


def _show(*values: Any, **options: Any) -> None:
    """IPython's `display`."""
    _namespace()["get_ipython"]()
    import IPython.display

    show: Any = IPython.display.display
    show(*values, **options)


def _evaluate(parts: Sequence[CodeType]) -> Any:
    """The value of the last part."""
    return [eval(part, _namespace()) for part in parts][-1]


async def _evaluate_awaiting(parts: Sequence[CodeType]) -> Any:
    value = None
    for part in parts:
        value = eval(part, _namespace())
        if part.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run what a cell awaits, in an event loop that lasts from cell to cell, as its tasks do in a notebook."""
    global _event_loop
    _event_loop = _event_loop or asyncio.new_event_loop()
    task = _event_loop.create_task(coroutine)
    try:
        return _event_loop.run_until_complete(task)
    except KeyboardInterrupt:
        if task.cancel():  # it was waiting, and has not ended by the interrupt itself
            with contextlib.suppress(asyncio.CancelledError):
                _event_loop.run_until_complete(task)
        raise


def _display(value: Any) -> dict[str, str]:
    formatted = notebook_shell.format_value(value)
    if formatted is not None:
        return formatted
    display = {"text/plain": repr(value)}
    if not isinstance(value, type):
        for method, mime_type in _RICH_DISPLAYS:
            with contextlib.suppress(Exception):  # as in a notebook, the repr is enough
                content = getattr(value, method)()
                if isinstance(content, str):
                    display[mime_type] = content
    return display
