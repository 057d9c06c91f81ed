"""Docstrings of jaxrun as reStructuredText: blocks of "name:  what it is" become lists of definitions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_FIRST = re.compile(r"^([\w, ]+): +(?=\S)")
_ALIGNED = re.compile(r"^[\w, ]+: {2,}\S")


def is_list(block: list[str]) -> bool:
    """Return whether each line begins with a name, or continues such a line, and the texts begin in one column."""
    if not _FIRST.match(block[0]) or not any(map(_ALIGNED.match, block)):
        return False
    return all(_FIRST.match(line) or line.startswith("    ") for line in block)


def to_definitions(block: list[str]) -> Iterator[str]:
    for line in block:
        if found := _FIRST.match(line):
            yield f"``{found[1]}``"
            line = line[found.end() :]
        yield f"    {line.strip()}"


def convert(lines: list[str]) -> list[str]:
    """Return the lines of a docstring, with its lists as reStructuredText has them."""
    converted: list[str] = []
    for block in "\n".join(lines).split("\n\n"):
        found = block.strip("\n").splitlines()
        converted += [*(to_definitions(found) if found and is_list(found) else block.splitlines()), ""]
    return converted


def on_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = convert(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", on_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
