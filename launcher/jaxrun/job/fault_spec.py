"""The faults that --chaos asks for: what happens to which ranks, and when.

    kill:1@2s            SIGKILL to rank 1, 2 s after the program has started on all ranks
    pause:0-3,7@1.5s     SIGSTOP to ranks 0-3 and 7
    cut:2@500ms          all TCP connections of rank 2 break

The head times them (head/fault_injection.py), the agents carry them out (agent/faults.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from jaxrun.errors import UsageError
from jaxrun.text import Ranks, format_ranges, parse_ranks

CHAOS_OPTION = "--chaos"
KILL, PAUSE, CUT = FAULT_KINDS = ("kill", "pause", "cut")
_FAULT_SEPARATOR = re.compile(r",(?=\s*[a-z]+\s*:)")  # a comma before a kind: others are within the ranks
_FAULT_PATTERN = re.compile(r"\s*([^:@]*):([^:@]*)@\s*([0-9]+|[0-9]*\.[0-9]+)(ms|s)\s*", re.ASCII)
_EXPECTED_FORM = "a fault is KIND:RANKS@TIME, such as kill:1@2s, pause:0-3@1.5s or cut:2@500ms"


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One fault; `after` is in seconds from when the program has started on all ranks."""

    kind: str
    ranks: Ranks
    after: float

    def __str__(self) -> str:
        return f"{self.kind}:{format_ranges(chain(*self.ranks), ',')}@{self.after:g}s"


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Parse faults with commas between them. Raises UsageError that names the part that is wrong."""
    return tuple(_parse_fault(part) for part in _FAULT_SEPARATOR.split(text))


def _parse_fault(text: str) -> FaultSpec:
    match = _FAULT_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(f"{CHAOS_OPTION} {text!r}: {_EXPECTED_FORM}")
    kind, ranks, number, unit = match[1].strip(), match[2], float(match[3]), match[4]
    if kind not in FAULT_KINDS:
        raise UsageError(
            f"{CHAOS_OPTION} {text!r}: the kind of a fault is one of {', '.join(FAULT_KINDS)}, not {kind!r}"
        )
    return FaultSpec(kind, parse_ranks(ranks, CHAOS_OPTION), number / 1000 if unit == "ms" else number)
