"""Whether a function is meant for JAX: whether it, or what it calls of the user's, names something of JAX's.

Many a plain Python function can be traced, x * x and those that print or sleep among them, but compiled it does
something else: integers overflow, and what it does besides is done once. So a pool leaves it as it is.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_ROOTS = ("jax", "jaxlib")
_MOST = 1000  # things that are looked at
_PLAIN = (str, bytes, bool, int, float, complex, type(None), BuiltinFunctionType)


def uses_jax(function: Callable[..., Any]) -> bool:
    """Whether it names jax, or an object of JAX's; in itself, its closure, and the functions that it names."""
    todo: list[Any] = [function]
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        thing = todo.pop()
        if isinstance(thing, _PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if _is_of_jax(thing):
            return True
        todo += _named_by(thing)
    return False


def _is_of_jax(thing: Any) -> bool:
    if isinstance(thing, ModuleType):
        return _root(thing.__name__) in _ROOTS
    if isinstance(thing, FunctionType):
        imported = [name for code in _codes(thing.__code__) for name in _operands(code, "IMPORT_NAME")]
        if any(_root(name) in _ROOTS for name in imported):
            return True
    return _root(type(thing).__module__) in _ROOTS or _root(getattr(thing, "__module__", "")) in _ROOTS


def _named_by(thing: Any) -> Iterator[Any]:
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, FunctionType):
        yield from _named_by_function(thing)
    elif isinstance(thing, type):
        if _is_users(thing.__module__):
            yield from (part for part in vars(thing).values() if isinstance(part, FunctionType))
    elif not isinstance(thing, ModuleType):
        yield getattr(thing, "__wrapped__", None)
        yield type(thing)
        yield from getattr(thing, "__dict__", {}).values() if _is_users(type(thing).__module__) else ()


def _named_by_function(function: FunctionType) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    if not _is_users(function.__module__):
        return
    for code in _codes(function.__code__):
        for name in _operands(code, "LOAD_GLOBAL", "LOAD_NAME"):
            found = function.__globals__.get(name)
            yield found
            if isinstance(found, ModuleType) and _is_users(found.__name__):
                yield from (vars(found).get(attribute) for attribute in code.co_names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and those of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _operands(code: CodeType, *operations: str) -> list[str]:
    """What these operations of its bytecode name."""
    return [step.argval for step in dis.get_instructions(code) if step.opname in operations]


def _is_users(module: str | None) -> bool:
    """Whether it is worth a look: the standard library and numpy know nothing of JAX."""
    root = _root(module or "")
    return root not in sys.stdlib_module_names or root == "__main__"


def _root(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""
