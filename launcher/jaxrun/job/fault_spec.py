"""Faults on order: which ranks are to suffer what, and when, as --chaos says it.

    kill:1@2s            SIGKILL to rank 1, 2 s after the program has started on all ranks
    pause:0-3,7@1.5s     SIGSTOP to these
    cut:2@500ms          all TCP connections of rank 2 break

What they mean to the job is decided in head/chaos.py, how they are done in agent/faults.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxrun.errors import UsageError
from jaxrun.text import Ranks, parse_ranks

CHAOS_OPTION = "--chaos"
KILL, PAUSE, CUT = FAULT_KINDS = ("kill", "pause", "cut")
_FAULT_SEPARATOR = re.compile(r",(?=\s*[a-z]+\s*:)")  # the ranks of a fault may have commas, too
_FAULT_PATTERN = re.compile(r"\s*([^:@]*):([^:@]*)@\s*([0-9]+|[0-9]*\.[0-9]+)(ms|s)\s*", re.ASCII)
_EXPECTED_FORM = "a fault is KIND:RANKS@TIME, such as kill:1@2s, pause:0-3@1.5s or cut:2@500ms"


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One of them; `after`: seconds from when the program starts on all ranks."""

    kind: str
    ranks: Ranks
    after: float

    def __str__(self) -> str:
        spans = (str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in self.ranks)
        return f"{self.kind}:{','.join(spans)}@{self.after:g}s"


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Faults as people write them, with commas between. UsageError names the part that is wrong."""
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
