"""Tells when the program first imports a package that this process has imported already.

Python's import statement asks nobody for what it finds in sys.modules. So the package and its modules are taken out of
it, as they would not be there yet under `python`; the first import puts them all back, the same objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
