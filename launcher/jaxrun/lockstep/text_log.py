"""The lines of text in a flight recorder, read as they are appended: groups, sites, programs, troubles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from jaxrun.protocol.flight import ProgramInfo

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class TextLog:
    """What the lines say. Of a program's line, which may be long, only its position is kept.

    end_offset:     where the first line begins that has not been read, in bytes
    program_lines:  offset and size in bytes of each program's line
    """

    def __init__(self) -> None:
        self.end_offset = 0
        self.groups: dict[int, str] = {}
        self.sites: dict[int, tuple[str, ...]] = {}
        self.programs: dict[int, ProgramInfo] = {}
        self.program_lines: dict[int, tuple[int, int]] = {}
        self.compiling = ""
        self.trouble = ""

    @property
    def unknown(self) -> int:
        """How many programs lack a key or a code."""
        return sum(not (program.key and program.code) for program in self.programs.values())

    def append(self, data: bytes) -> None:
        """Read bytes from `end_offset` on: an incomplete line is left for the next call, a malformed one skipped."""
        complete = data[: data.rfind(b"\n") + 1]
        for line in complete.splitlines(keepends=True):
            with contextlib.suppress(*_UNREADABLE):
                self._add(json.loads(line), len(line))
            self.end_offset += len(line)

    def _add(self, content: Mapping[str, Any], size: int) -> None:
        if "program" in content:
            number = int(content["program"])
            known = (str(content.get(name) or "") for name in ("name", "key", "code", "source"))
            self.programs[number] = ProgramInfo(*known)
            self.program_lines[number] = (self.end_offset, size)
        elif "group" in content:
            self.groups[int(content["group"])] = str(content["ranks"])
        elif "site" in content:
            self.sites[int(content["site"])] = tuple(map(str, content["stack"]))
        elif "compiling" in content:
            self.compiling = str(content["compiling"])
        elif "trouble" in content:
            self.trouble = str(content["trouble"])
