"""Gives exit handlers that are C functions a frame with their name, so that stacks show a handler that does not return.

`atexit.register(time.sleep, 1000)` registers a C function. It has no frame, and Python does not tell which handler is
running. So `register` wraps such functions, and no others, in a Python function whose code has their name.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from jaxrun.stack_frames import EXIT_HANDLER

_register, _unregister = atexit.register, atexit.unregister
_wrapped: list[tuple[Any, Callable[..., Any]]] = []  # each registered C function, and the function that wraps it


def name_native_handlers() -> None:
    """Replace atexit.register and atexit.unregister by the functions below."""
    atexit.register, atexit.unregister = register, unregister


def register(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Register a function to be called at exit, as atexit.register does."""
    if not callable(func) or _has_frame(func):
        return _register(func, *args, **kwargs)
    call = _in_frame_of(_name(func))
    _register(call, func, args, kwargs)
    _wrapped.append((func, call))
    return func


def unregister(func: Any, /) -> None:
    """Unregister a function, as atexit.unregister does: it is not called at exit, however often it was registered."""
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
    """Whether a call of `func` shows in a stack."""
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
