"""Tells when the program first imports a package: also one that this process has imported already.

Python's import statement asks nobody for what it finds in sys.modules. So the package and its modules are taken out of
it, as they would not be there yet under `python`; the first import puts them all back, the same objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class ImportWatch(MetaPathFinder, Loader):
    """Hides the package `name`, and calls `on_import()` when it is imported next."""

    def __init__(self, name: str, on_import: Callable[[], None]) -> None:
        self._name = name
        self._on_import = on_import
        self._hidden: dict[str, ModuleType] = {}
        self._spec: ModuleSpec | None = None

    def start(self) -> None:
        """Hide the package, which must have been imported."""
        within = f"{self._name}."
        names = [name for name in sys.modules if name == self._name or name.startswith(within)]
        self._hidden = {name: sys.modules.pop(name) for name in names}
        self._spec = self._hidden[self._name].__spec__
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Put the modules back, and watch no longer. May be called again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in self._hidden.items():
            sys.modules.setdefault(name, module)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Answer for the package alone: its modules are asked for once it is there."""
        if name != self._name or self._spec is None:
            return None
        spec = ModuleSpec(name, self, origin=self._spec.origin, is_package=True)
        spec.submodule_search_locations = self._spec.submodule_search_locations
        spec.has_location = self._spec.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.stop()
        return self._hidden[self._name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of find_spec there
        self._on_import()


def call_after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback` with the module `name` as soon as the program has imported it; at once if it has been already."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))


class _AfterImport(MetaPathFinder):
    """Lets the other finders find the module `name`, and calls `callback` once it has been executed."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._callback(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
