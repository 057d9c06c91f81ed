"""Tells when the program first imports a module: also one that this process has imported already.

Python's import statement asks nobody for what it finds in sys.modules. So such a module, and those below it, are taken
out of it, as they would not be there yet under `python`; the first import puts them all back, the same objects.

Until then, whoever looks for the module finds the spec and the loader that it has under `python`: runpy, pkgutil and
inspect read a module by its loader without importing it.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch(MetaPathFinder):
    """Calls `on_import(module)` when the module `name` is imported next; one that is there is hidden until then."""

    def __init__(self, name: str, on_import: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._on_import = on_import
        self._hidden: dict[str, ModuleType] = {}

    def start(self) -> None:
        within = f"{self._name}."
        names = [name for name in sys.modules if name == self._name or name.startswith(within)]
        self._hidden = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Put the modules back, and watch no longer. May be called again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in self._hidden.items():
            sys.modules.setdefault(name, module)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Answer for the module itself; who only looks for it does not import it yet."""
        if name != self._name:
            return None
        found = self._hidden[name].__spec__ if name in self._hidden else self._find_elsewhere()
        if found is None or found.loader is None:
            return None
        spec = copy.copy(found)
        spec.loader = _loader_with(found.loader, self._create, lambda module: self._execute(module, spec, found))
        return spec

    def _find_elsewhere(self) -> ModuleSpec | None:
        sys.meta_path.remove(self)
        try:
            return importlib.util.find_spec(self._name)
        finally:
            sys.meta_path.insert(0, self)

    def _create(self, spec: ModuleSpec) -> ModuleType | None:
        """The hidden module, or None for a new one."""
        if self._name in self._hidden:
            self.stop()
        return self._hidden.get(self._name)

    def _execute(self, module: ModuleType, spec: ModuleSpec, found: ModuleSpec) -> None:
        """Execute the module unless it was hidden. `spec` was given out for it in the place of the spec `found`."""
        watched, spec.loader = spec.loader, found.loader
        if module.__loader__ is watched:
            module.__loader__ = found.loader
        if self._name not in self._hidden:
            assert found.loader is not None
            found.loader.exec_module(module)
            self.stop()
        elif module.__spec__ is spec:
            module.__spec__ = found
        self._on_import(module)


class _OtherLoader:
    """A loader with other functions to create and to execute a module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _loader_with(
    loader: Any, create: Callable[[ModuleSpec], ModuleType | None], execute: Callable[[ModuleType], None]
) -> Any:
    """A loader of the same type, if it can be copied, that is `loader` but for these two functions.

    `create` returns None where `loader` itself is to create the module.
    """
    made: Any
    try:
        made = _OtherLoader(loader) if isinstance(loader, type) else copy.copy(loader)
        made.create_module = made.exec_module = None
    except (AttributeError, TypeError, NotImplementedError):
        made = _OtherLoader(loader)
    made.create_module = lambda spec: create(spec) or loader.create_module(spec)
    made.exec_module = execute
    return made


def call_after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback` with the module `name` as soon as the program has imported it; at once if it has been already."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        ImportWatch(name, callback).start()
