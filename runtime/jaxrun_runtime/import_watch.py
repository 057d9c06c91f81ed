"""Calls a function when the program first imports a module, even if this process has already imported it.

An import statement asks no finder if the module is in sys.modules. So the module and its submodules are removed from
sys.modules, where they would not be yet under `python`. The first import puts the same objects back.

Until then, find_spec returns the spec and loader that the module has under `python`: runpy, pkgutil and inspect read a
module through its loader without importing it.
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
    """Calls `on_import(module)` at the next import of the module `name`, and hides the module until then."""

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
        """Put the modules back, and stop watching. May be called again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in self._hidden.items():
            sys.modules.setdefault(name, module)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for the watched module only. A caller that only looks for the module does not import it."""
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
        """Return the hidden module, or None to create a new one."""
        if self._name in self._hidden:
            self.stop()
        return self._hidden.get(self._name)

    def _execute(self, module: ModuleType, spec: ModuleSpec, found: ModuleSpec) -> None:
        """Execute the module unless it was hidden. `spec` is the copy that find_spec returned instead of `found`."""
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
    """A loader like another one, except for the functions that create and execute a module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _loader_with(
    loader: Any, create: Callable[[ModuleSpec], ModuleType | None], execute: Callable[[ModuleType], None]
) -> Any:
    """Return a loader like `loader`, except for these two functions; of the same type, if `loader` can be copied.

    If `create` returns None, `loader` creates the module.
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
    """Call `callback` with the module `name` once the program has imported it; at once if it is imported already."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        ImportWatch(name, callback).start()
