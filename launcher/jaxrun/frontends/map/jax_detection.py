"""Whether a function uses JAX: whether it, or a function of the user's that it names, names something of JAX's.

JAX could trace many a plain Python function, such as x * x or one that prints or sleeps. But compiled, it would do
something else: integers overflow, and side effects happen once. So a pool runs it as plain Python.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_JAX_PACKAGES = ("jax", "jaxlib")
_MAX_OBJECTS = 1000  # that are examined
_PLAIN = (str, bytes, bool, int, float, complex, type(None), BuiltinFunctionType)


def uses_jax(function: Callable[..., Any]) -> bool:
    """Whether the function, its closure, or a function that it names, names jax or an object of JAX's."""
    todo: list[Any] = [function]
    seen: set[int] = set()
    while todo and len(seen) < _MAX_OBJECTS:
        thing = todo.pop()
        if isinstance(thing, _PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if _belongs_to_jax(thing):
            return True
        todo += _named_by(thing)
    return False


def _belongs_to_jax(thing: Any) -> bool:
    if isinstance(thing, ModuleType):
        return _top_package(thing.__name__) in _JAX_PACKAGES
    if isinstance(thing, FunctionType):
        imported = [name for code in _codes(thing.__code__) for name in _operands(code, "IMPORT_NAME")]
        if any(_top_package(name) in _JAX_PACKAGES for name in imported):
            return True
    return (
        _top_package(type(thing).__module__) in _JAX_PACKAGES
        or _top_package(getattr(thing, "__module__", "")) in _JAX_PACKAGES
    )


def _named_by(thing: Any) -> Iterator[Any]:
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, FunctionType):
        yield from _named_by_function(thing)
    elif isinstance(thing, type):
        if _may_use_jax(thing.__module__):
            yield from (part for part in vars(thing).values() if isinstance(part, FunctionType))
    elif not isinstance(thing, ModuleType):
        yield getattr(thing, "__wrapped__", None)
        yield type(thing)
        yield from getattr(thing, "__dict__", {}).values() if _may_use_jax(type(thing).__module__) else ()


def _named_by_function(function: FunctionType) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    if not _may_use_jax(function.__module__):
        return
    for code in _codes(function.__code__):
        for name in _operands(code, "LOAD_GLOBAL", "LOAD_NAME"):
            found = function.__globals__.get(name)
            yield found
            if isinstance(found, ModuleType) and _may_use_jax(found.__name__):
                yield from (vars(found).get(attribute) for attribute in code.co_names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code of all functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _operands(code: CodeType, *operations: str) -> list[str]:
    """Return what these operations of the bytecode name."""
    return [step.argval for step in dis.get_instructions(code) if step.opname in operations]


def _may_use_jax(module: str | None) -> bool:
    """Whether a module may use JAX: the standard library does not."""
    root = _top_package(module or "")
    return root not in sys.stdlib_module_names or root == "__main__"


def _top_package(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""
