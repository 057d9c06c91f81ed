"""Everything that jaxrun uses of IPython: its shell, display outputs, and the source lines of cells.

This module does not import IPython: if IPython has not been imported, there is no shell.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any

from jaxrun.protocol.payload import reduce_code


def find_shell() -> Any:
    """IPython's shell in this process; None outside IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def find_kernel_shell() -> Any:
    """IPython's shell, if this process is the kernel of a notebook; else None."""
    shell = find_shell()
    return shell if getattr(shell, "kernel", None) is not None else None


def publish(shell: Any, bundle: Mapping[str, str], name: str = "", *, again: bool = False) -> None:
    """Show `bundle` (by MIME type) as an output of the running cell; `again` replaces the output of the same name."""
    shell.display_pub.publish(dict(bundle), {}, transient={"display_id": name} if name else {}, update=again)


def to_python(shell: Any, cell: str) -> str:
    """Return the cell with its magics and !commands as calls of `get_ipython()`; other lines keep their line numbers.

    A cell that IPython cannot parse is returned unchanged: Python will report the error.
    """
    blank_lines = len(cell) - len(cell.lstrip("\n"))  # IPython drops them, but tracebacks count them
    try:
        return "\n" * blank_lines + str(shell.transform_cell(cell))
    except SyntaxError:
        return cell


def cell_name(shell: Any, filename: str) -> str | None:
    """Return `In[3]` for the file name that IPython gives the code of a cell; None for other file names."""
    named = shell.compile.format_code_name(filename)
    return str(named[1]) if named else None


class NotebookSources:
    """The cells whose code is pickled; ranks need their lines, because no file has them.

    In the pickle a cell is named as the notebook shows it, `In[3]`, and so in the ranks' tracebacks.

    lines: source text by cell name
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.lines: dict[str, str] = {}

    def reduce(self, value: Any) -> Any:
        """A pickler's reducer_override."""
        if not isinstance(value, CodeType):
            return NotImplemented
        cached = linecache.cache.get(value.co_filename)
        # With a modification time, it is code from a file.
        if cached is None or len(cached) < 4 or cached[1] is not None:
            return NotImplemented
        name = cell_name(self._shell, value.co_filename) or value.co_filename
        self.lines[name] = "".join(cached[2])
        if name == value.co_filename:
            return NotImplemented
        return reduce_code(value, name)


def find_sources() -> NotebookSources | None:
    """Return an object that collects cells for a pickle; None outside IPython, where there are no cells."""
    shell = find_shell()
    return NotebookSources(shell) if shell is not None else None
