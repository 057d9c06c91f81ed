"""Tells when the program first imports a module: also one that this process has imported already.

Python's import statement asks nobody for what it finds in sys.modules. So such a module, and those below it, are taken
out of it, as they would not be there yet under `python`; the first import puts them all back, the same objects.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportWatch(MetaPathFinder, Loader):
    """Calls `on_import(module)` when the module `name` is imported next; one that is there is hidden until then."""

    def __init__(self, name: str, on_import: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._on_import = on_import
        self._hidden: dict[str, ModuleType] = {}
        self._spec: ModuleSpec | None = None  # without the watch

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
        self._spec = self._hidden[name].__spec__ if name in self._hidden else self._find_elsewhere()
        if self._spec is None or self._spec.loader is None:
            return None
        spec = copy.copy(self._spec)
        spec.loader = self
        return spec

    def _find_elsewhere(self) -> ModuleSpec | None:
        sys.meta_path.remove(self)
        try:
            return importlib.util.find_spec(self._name)
        finally:
            sys.meta_path.insert(0, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self.stop()
        assert self._spec is not None and self._spec.loader is not None
        return self._hidden.get(self._name) or self._spec.loader.create_module(self._spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._spec is not None and self._spec.loader is not None
        module.__spec__, module.__loader__ = self._spec, self._spec.loader  # the import system has put the watch there
        if self._name not in self._hidden:
            self._spec.loader.exec_module(module)
        self._on_import(module)


def call_after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback` with the module `name` as soon as the program has imported it; at once if it has been already."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        ImportWatch(name, callback).start()
