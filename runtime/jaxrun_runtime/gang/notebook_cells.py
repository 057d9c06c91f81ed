"""Runs a notebook's cells on a rank, all in one namespace, which is the rank's `__main__`."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import inspect
import linecache
import os
import selectors
import subprocess
import sys
from collections.abc import Collection, Coroutine, Mapping, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any

import jaxrun_runtime
from jaxrun.protocol.gang_messages import CellOutput

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

_RICH_DISPLAYS = (  # methods of objects that IPython calls, and the MIME types of their results
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_latex_", "text/latex"),
    ("_repr_svg_", "image/svg+xml"),
)
_LOOP_FILES = (os.path.dirname(asyncio.__file__) + os.sep, selectors.__file__, __file__)
_MAX_COMPLETIONS = 500
_main: ModuleType | None = None
_event_loop: asyncio.AbstractEventLoop | None = None  # of the cells that await
_shell: Any = None  # made when a cell first uses it: importing IPython takes 0.3 s
_displays: list[dict[str, str]] = []  # of the running cell


def run_cell(code: str, name: str, source: str = "", ranks: Collection[int] | None = None) -> CellOutput:
    """Run a cell on this rank, if it is one of `ranks`.

    code:    Python that may await; magics and !commands are calls of `get_ipython()`
    source:  the cell as it was typed, for tracebacks; empty if it equals `code`
    ranks:   None for all
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
    return CellOutput({} if value is None else _display(value), pop_displays())


def get_variable(name: str) -> Any:
    """Return the value of a variable of the cells. Raises NameError."""
    try:
        return _namespace()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined in the cells of this gang") from None


def set_variable(name: str, value: Any) -> None:
    _namespace()[name] = value


def list_variables() -> list[str]:
    """Return the names that cells have defined, except modules."""
    given = ("get_ipython", "display")
    return sorted(
        name
        for name, value in _namespace().items()
        if not name.startswith("_") and name not in given and not isinstance(value, ModuleType)
    )


def complete_name(name: str) -> list[str]:
    """Return the names that begin with `name`, which may have dots. No property is evaluated for that."""
    *path, last = name.split(".")
    names: Collection[str] = _namespace()
    if path:
        value: Any = _namespace().get(path[0])
        for attribute in path[1:]:
            value = _plain_attribute(value, attribute)
        names = []
        if value is not None:
            with contextlib.suppress(Exception):  # its class may define what dir() returns
                names = dir(value)
    before = "".join(f"{part}." for part in path)
    hidden = () if last.startswith("_") else ("_",)
    found = (each for each in names if each.startswith(last) and not each.startswith(hidden))
    return [f"{before}{each}" for each in sorted(found)[:_MAX_COMPLETIONS]]


def _plain_attribute(value: Any, name: str) -> Any:
    """Return an attribute that is no property; None for any other."""
    if isinstance(value, ModuleType):
        return vars(value).get(name)
    try:
        found = inspect.getattr_static(value, name)
    except Exception:
        return None
    return None if hasattr(type(found), "__get__") else found


def cache_source(source: str, name: str) -> None:
    """Let tracebacks show the lines of code that is in no file."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name


def _namespace() -> dict[str, Any]:
    global _main
    if _main is None:
        main = _main = ModuleType("__main__")
        vars(main)["__builtins__"] = sys.modules["builtins"]
        vars(main)["get_ipython"] = lambda: get_shell(main)
        vars(main)["display"] = _show
        sys.modules["__main__"] = main  # dataclasses, pickle and others look there for what cells define
    return vars(_main)


def _show(*values: Any, **options: Any) -> None:
    """Show values, as IPython's `display` does."""
    _namespace()["get_ipython"]()
    import IPython.display

    show: Any = IPython.display.display
    show(*values, **options)


def _evaluate(parts: Sequence[CodeType]) -> Any:
    return [eval(part, _namespace()) for part in parts][-1]


async def _evaluate_awaiting(parts: Sequence[CodeType]) -> Any:
    value = None
    for part in parts:
        value = eval(part, _namespace())
        if part.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell that awaits, in an event loop that all cells share, so that tasks outlive their cell."""
    global _event_loop
    _event_loop = _event_loop or asyncio.new_event_loop()
    task = _event_loop.create_task(coroutine)
    try:
        return _event_loop.run_until_complete(task)
    except KeyboardInterrupt as interrupt:
        frames = interrupt.__traceback__
        if task.cancel():  # the task was waiting; the interrupt itself did not end it
            try:
                _event_loop.run_until_complete(task)
            except asyncio.CancelledError as cancelled:
                frames = cancelled.__traceback__  # the cell's, where it waited
        raise interrupt.with_traceback(_without_loop(frames)) from None
    except BaseException as error:
        raise error.with_traceback(_without_loop(error.__traceback__))  # noqa: B904


def _without_loop(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the outer frames of the event loop and of this module."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_LOOP_FILES):
        frames = frames.tb_next
    return frames


def _display(value: Any) -> dict[str, str]:
    formatted = format_value(value)
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


# ---- IPython's shell, for magics, !commands, displays and figures


def get_shell(main: ModuleType) -> Any:
    """Return the shell, which uses the namespace of `main`. Raises ImportError if IPython is not installed."""
    global _shell
    if _shell is None:
        _shell = _make_shell(main)
    return _shell


def pop_displays() -> tuple[dict[str, str], ...]:
    """Return the displays of the cell that has ended, including its open figures."""
    if _shell is not None:
        _shell.events.trigger("post_execute")  # %matplotlib inline then shows figures
    displays = tuple(_displays)
    _displays.clear()
    return displays


def format_value(value: Any) -> dict[str, str] | None:
    """Return the display of a value with the formatters of the shell; None if there is no shell yet."""
    return None if _shell is None else to_text(_shell.display_formatter.format(value)[0])


def to_text(display: Mapping[str, Any]) -> dict[str, str]:
    """Return the display's content as texts: bytes, such as images, in base64; without JSON and other objects."""
    texts = {}
    for mime_type, content in display.items():
        if isinstance(content, bytes):
            texts[mime_type] = base64.b64encode(content).decode()
        elif isinstance(content, str):
            texts[mime_type] = content
    return texts


def _make_shell(main: ModuleType) -> Any:
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Publisher(DisplayPublisher):
        def publish(self, data: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            _displays.append(to_text(data))

    class RankShell(InteractiveShell):
        def enable_gui(self, gui: str | None = None) -> None:
            """A rank has no event loop of a window system."""

        def system(self, cmd: str) -> None:
            """Run a `!command` and print its output as it comes.

            IPython would fork, to give the command a terminal, and JAX warns of each fork on every rank.
            """
            expand: Any = self.var_expand
            self.user_ns["_exit_code"] = _run_command(expand(cmd, depth=1))

    config = Config({"HistoryManager": {"enabled": False}})  # all ranks would share its database
    return RankShell.instance(
        config=config, display_pub_class=Publisher, user_module=main, user_ns=vars(main), colors="NoColor"
    )


def _run_command(command: str) -> int:
    """Run a command of the shell, and return its exit status. An interrupt ends it."""
    with subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
        except BaseException:
            process.terminate()
            raise
    return process.returncode
