"""The faults of --chaos: what happens to which ranks, and when.

    kill:1@2s            SIGKILL to rank 1, 2 s after the program has started on all ranks
    pause:0-3,7@1.5s     SIGSTOP to ranks 0-3 and 7
    kill:any@1s-4s       SIGKILL to some rank, at some moment between the two

Each fault is injected once: with --max-restarts, faults that were not due in one attempt are left for the next.

The head times them (head/fault_injection.py), the agents carry them out.
"""

from __future__ import annotations

import re
from itertools import chain

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.protocol import bounds
from jaxrun.text import Ranks, format_ranges, parse_ranks

CHAOS_OPTION = "--chaos"
FAULT_KINDS = bounds.FAULT_KINDS
KILL, PAUSE = FAULT_KINDS
_FAULT_SEPARATOR = re.compile(r",(?=\s*[a-z]+\s*:)")  # a comma before a kind; other commas separate ranks
_TIME = r"([0-9]+|[0-9]*\.[0-9]+)(ms|s)"
_FAULT_PATTERN = re.compile(rf"\s*([^:@]*):([^:@]*)@\s*{_TIME}(?:-{_TIME})?\s*", re.ASCII)
_EXPECTED_FORM = "a fault is KIND:RANKS@TIME, such as kill:1@2s, pause:0-3@1.5s or kill:any@1s-4s"
_ANY = "any"


class FaultSpec(Struct, frozen=True):
    """One fault; `after` is in seconds after the program has started on all ranks.

    ranks:  empty for any one of the ranks that are alive then
    """

    kind: str
    ranks: Ranks
    after: float

    def __str__(self) -> str:
        return f"{self.kind}:{format_ranges(chain(*self.ranks), ',') or _ANY}@{self.after:g}s"


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Parse faults separated by commas. Raises UsageError that names the wrong part."""
    return tuple(_parse_fault(part) for part in _FAULT_SEPARATOR.split(text))


def _parse_fault(text: str) -> FaultSpec:
    match = _FAULT_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(f"{CHAOS_OPTION} {text!r}: {_EXPECTED_FORM}")
    kind, ranks = match[1].strip(), match[2].strip()
    first = _seconds(match[3], match[4])
    last = _seconds(match[5], match[6]) if match[5] else first
    if last < first:
        raise UsageError(f"{CHAOS_OPTION} {text!r}: {last:g} s is before {first:g} s; write the earlier one first")
    if kind not in FAULT_KINDS:
        raise UsageError(
            f"{CHAOS_OPTION} {text!r}: the kind of a fault is one of {', '.join(FAULT_KINDS)}, not {kind!r}"
        )
    return FaultSpec(kind, () if ranks == _ANY else parse_ranks(ranks, CHAOS_OPTION), _draw(first, last))


def _draw(first: float, last: float) -> float:
    """Return a random time between the two."""
    if first == last:
        return first
    import random  # takes 5 ms

    return random.uniform(first, last)


def _seconds(number: str, unit: str) -> float:
    return float(number) / 1000 if unit == "ms" else float(number)
