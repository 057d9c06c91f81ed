"""The lines of a notebook's cells, for the ranks that run functions from them, as no file holds these lines.

There a cell has the name that the notebook shows, `In[3]`, in tracebacks and wherever else a place is named.
"""

from __future__ import annotations

import copy
import linecache
import sys
from types import CodeType
from typing import Any


class NotebookSources:
    """Given to a pickler, renames code that comes from cells; `lines` has the cells by their new names."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.lines: dict[str, str] = {}

    def reduce(self, value: Any) -> Any:
        """As pickle's reducer_override."""
        if not isinstance(value, CodeType):
            return NotImplemented
        known = linecache.cache.get(value.co_filename)
        if known is None or len(known) < 4 or known[1] is not None:  # a file's
            return NotImplemented
        named = self._shell.compile.format_code_name(value.co_filename)
        name = named[1] if named is not None else value.co_filename
        self.lines[name] = "".join(known[2])
        if name == value.co_filename:
            return NotImplemented
        return copy.copy, (value.replace(co_filename=name),)


def find_sources() -> NotebookSources | None:
    """None where there are no cells, which is outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return NotebookSources(shell) if shell is not None else None
