"""The leading imports of this process's main file, which the ranks of its gangs will need as well."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

from jaxrun.protocol.forkserver_messages import ImportedName
from jaxrun.spec.job.leading_imports import find_leading_imports
from jaxrun.spec.job.preload_table import preloadable

_IMPORT = re.compile(r"^import ([\w., ]+)", re.MULTILINE)


def imports_of_main() -> list[ImportedName]:
    """Return the leading imports of the main file; in a notebook, the modules that its cells have imported so far."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None:
        modules = [value.__name__ for value in list(vars(main).values()) if isinstance(value, ModuleType)]
        modules += [name for name in _imported_by_cells(vars(main).get("In", ())) if name in sys.modules]
        return [ImportedName(name, in_table=True) for name in dict.fromkeys(modules) if preloadable(name)]
    program = ["-m", spec.name] if spec is not None else [file]
    found = find_leading_imports(program, _directory(), preloadable).imports
    return [line for line in found if line.name.partition(":")[0] in sys.modules]


def _imported_by_cells(cells: Iterable[str]) -> Iterator[str]:
    """Yield the names of modules in import statements such as `import orbax.checkpoint`, which binds only `orbax`."""
    for names in _IMPORT.findall("\n".join(cells)):
        yield from (name.split()[0] for name in names.split(",") if name.strip())


def folder_of_main() -> str:
    """Return the directory of the main file's own modules; empty if unknown."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file else ""


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been deleted
        return "/"
