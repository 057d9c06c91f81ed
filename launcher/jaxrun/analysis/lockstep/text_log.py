"""Reads the lines of text in a flight recorder as they are appended: groups, sites, programs, stages, troubles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from jaxrun.analysis.lockstep.stage_times import StageTimes
from jaxrun.protocol.flight import CompilationStage, ProgramInfo

_NS_PER_S = 1e9
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class TextLog:
    """The content of the lines. For a program's lines, which may be long, only their positions are kept.

    stage_times:    how long its stages took
    end_offset:     where the first line begins that has not been read, in bytes
    program_lines:  (offset, size) in bytes of each program's lines: one, or one before and one after its compilation
    """

    def __init__(self) -> None:
        self.end_offset = 0
        self.groups: dict[int, str] = {}
        self.calls_before: dict[int, int] = {}  # by group, of an earlier process of the rank
        self.sites: dict[int, tuple[str, ...]] = {}
        self.programs: dict[int, ProgramInfo] = {}
        self._not_compiled: set[int] = set()
        self.program_lines: dict[int, list[tuple[int, int]]] = {}
        self.compiling = ""
        self.compiling_ranks = ""
        self.trouble = ""
        self.stage_times = StageTimes()

    @property
    def unknown(self) -> int:
        """Number of programs that lack a key or a code, except those that are not compiled yet."""
        compiled = (program for number, program in self.programs.items() if number not in self._not_compiled)
        return sum(not (program.key and program.code) for program in compiled)

    def append(self, data: bytes) -> None:
        """Read bytes from `end_offset` on; an incomplete line waits for the next call, a malformed one is skipped."""
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
            self.program_lines.setdefault(number, []).append((self.end_offset, size))
            if "key" in content:
                self._not_compiled.discard(number)
            else:
                self._not_compiled.add(number)
        elif "group" in content:
            self.groups[int(content["group"])] = str(content["ranks"])
            self.calls_before[int(content["group"])] = int(content.get("before", 0))
        elif "site" in content:
            self.sites[int(content["site"])] = tuple(map(str, content["stack"]))
        elif "compiling" in content:
            self.compiling = str(content["compiling"])
            self.compiling_ranks = str(content.get("ranks", ""))
        elif "stage" in content:
            self.stage_times.add(_stage(content))
        elif "trouble" in content:
            self.trouble = str(content["trouble"])


def parse_stages(data: bytes) -> tuple[CompilationStage, ...]:
    """Parse the compilation stages among the lines, which TextLog does not keep; malformed lines are skipped."""
    stages = []
    for line in data.splitlines():
        if line.startswith(b'{"stage":'):
            with contextlib.suppress(*_UNREADABLE):
                stages.append(_stage(json.loads(line)))
    return tuple(stages)


def _stage(content: Mapping[str, Any]) -> CompilationStage:
    since, until = int(content["since"]) / _NS_PER_S, int(content["until"]) / _NS_PER_S
    return CompilationStage(str(content["stage"]), str(content["name"]), since, until)
