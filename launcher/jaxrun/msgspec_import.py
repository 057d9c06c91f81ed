"""Imports msgspec in a process that runs no code of users: a launcher or an agent, before their other modules.

msgspec prefers typing_extensions to typing, where that is installed, for what both have since Python 3.11. Importing
it takes 4 ms of CPU and, in an agent, which needs inspect for nothing else, 15.
"""

from __future__ import annotations

import sys

_UNNEEDED = "typing_extensions"


def import_msgspec() -> None:
    """Import msgspec as if typing_extensions were not installed; later imports find that as usual."""
    if _UNNEEDED in sys.modules:
        return
    sys.modules[_UNNEEDED] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules[_UNNEEDED]
