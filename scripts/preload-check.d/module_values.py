"""Reads every plain value that a module keeps: in globals, in classes, in objects and containers, to some depth.

The values show what a module remembers from its import: a process id, a time, a random id, a directory, a variable.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

_DEPTH = 4
_MOST_MEMBERS = 400  # of one container or class
_MOST_CHARS = 300
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LEFT_OUT = ("module_values", "process_state", "__main__", "sys")  # process_state reads parts of the last two
# Attributes that Python itself keeps, and that say nothing about what the module did.
_SKIPPED = frozenset(
    (
        "__builtins__",
        "__cached__",
        "__doc__",
        "__firstlineno__",
        "__loader__",
        "__slotnames__",
        "__spec__",
        "__warningregistry__",
        "__dict__",
        "__weakref__",
    )
)

Values = dict[str, str]


def read_values() -> tuple[Values, list[str], list[str]]:
    """Return the values by name, as text; the locks that are held; the names of integers equal to the process id."""
    reader = _Reader()
    for module_name, module in sorted(sys.modules.items()):
        if isinstance(module, types.ModuleType) and module_name not in _LEFT_OUT:
            reader.read(f"{module_name}:", vars(module), 0)
    return reader.values, reader.held_locks, reader.process_ids


class _Reader:
    def __init__(self) -> None:
        self.values: Values = {}
        self.held_locks: list[str] = []
        self.process_ids: list[str] = []
        self._seen: set[int] = {id(self.__dict__)}
        self._alive: list[Any] = []  # keeps temporary objects alive, so that their addresses are not reused
        self._pid = os.getpid()

    def read(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._note(name, value)
        elif isinstance(value, _LOCKS):
            if "unlocked" not in repr(value):
                self.held_locks.append(name)
        elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
            self.values[name] = f"function {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        elif isinstance(value, types.ModuleType):
            self.values[name] = f"module {value.__name__}"
        elif depth < _DEPTH and id(value) not in self._seen:
            self._seen.add(id(value))
            self._alive.append(value)
            for member, inner in _members(value, name):
                self.read(f"{name}{member}", inner, depth + 1)

    def _note(self, name: str, value: Any) -> None:
        self.values[name] = repr(value)[:_MOST_CHARS]
        if type(value) is int and value == self._pid:
            self.process_ids.append(name)


def _members(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Return the members of a container, of a class of this module, or of an object, as far as they can be read."""
    try:
        if isinstance(value, dict):
            pairs = list(value.items())[:_MOST_MEMBERS]
            members = [(f".{key}" if isinstance(key, str) else f"[{_key_text(key)}]", one) for key, one in pairs]
        elif isinstance(value, list | tuple) and all(isinstance(one, _PLAIN) for one in value):
            members = [("[]", " ".join(sorted(map(repr, value))))]  # their order is not compared
        elif isinstance(value, list | tuple):
            members = [(f"[{index}]", one) for index, one in enumerate(list(value)[:_MOST_MEMBERS])]
        elif isinstance(value, set | frozenset):
            texts = sorted(repr(one) for one in value if isinstance(one, str | int))
            members = [("{}", " ".join(texts))]
        elif isinstance(value, type):
            is_own = name.startswith(f"{value.__module__}:")
            members = [(f".{key}", one) for key, one in list(vars(value).items())[:_MOST_MEMBERS]] if is_own else []
        else:
            members = [(f".{key}", one) for key, one in list(vars(value).items())[:_MOST_MEMBERS]]
    except Exception:  # an object without a __dict__, or with another kind of __dict__
        return
    for member, one in members:
        if member.lstrip(".") not in _SKIPPED:
            yield member, one


def _key_text(key: Any) -> str:
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return repr(key) if isinstance(key, bytes) else type(key).__name__
