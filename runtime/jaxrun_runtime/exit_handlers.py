"""Gives exit handlers that are no Python code a frame with their name: a stack then shows which one does not return.

`atexit.register(time.sleep, 1000)` calls a function of C, which has no frame, and Python does not tell which handler it
is in. So `register` wraps such functions, and no others, in one whose code has their name.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from jaxrun.stack_frames import EXIT_HANDLER

_register, _unregister = atexit.register, atexit.unregister
_wrapped: list[tuple[Any, Callable[..., Any]]] = []  # the functions that were registered, and what calls them


def name_native_handlers() -> None:
    """Replace atexit.register and atexit.unregister by functions that do the same."""
    atexit.register, atexit.unregister = register, unregister


def register(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Register a function that is called at the exit, as atexit.register does."""
    if not callable(func) or _has_frame(func):
        return _register(func, *args, **kwargs)
    call = _in_frame_of(_name(func))
    _register(call, func, args, kwargs)
    _wrapped.append((func, call))
    return func


def unregister(func: Any, /) -> None:
    """Do not call this function at the exit, however often it was registered."""
    _unregister(func)
    for wrapped in [pair for pair in _wrapped if pair[0] == func]:
        _wrapped.remove(wrapped)
        _unregister(wrapped[1])


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    func(*args, **kwargs)


def _in_frame_of(name: str) -> Callable[..., None]:
    code = _call.__code__.replace(co_filename=EXIT_HANDLER, co_name=name, co_qualname=name)
    return FunctionType(code, globals(), name)


def _has_frame(func: Any) -> bool:
    """Whether a call of it shows in a stack."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, MethodType):
        func = func.__func__
    in_python = any(isinstance(kind.__dict__.get("__call__"), FunctionType) for kind in type(func).__mro__)
    return in_python or isinstance(func, (FunctionType, type))


def _name(func: Any) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", type(func).__qualname__)
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else str(name)
