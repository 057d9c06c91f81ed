"""Compares on after ranks have diverged: which later calls differ, once the ranks are in step again.

Histories are aligned like the lines of two files: a call that one rank makes alone is skipped there. What differs
before the ranks have made a common call again is a consequence, and a difference like an earlier one is not told again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxrun.analysis.lockstep.compare import Candidate, Flights, calls_by_number, make_divergence, sets_by_chain
from jaxrun.analysis.lockstep.divergence import CallKind, Divergence
from jaxrun.protocol.flight import AnyCall, Flight, ProgramInfo

_WINDOW = 16  # calls of each history that decide how it goes on
# What an alignment scores for each call: the best one is taken.
_SAME, _SAME_ELSEWHERE = 1.0, 0.2  # the same program, in the same line or in another
_OTHER_HERE, _OTHER_ELSEWHERE, _ALONE = -0.3, -0.7, -0.5  # another program in the same line or not; made by one alone
_MAX_EDITS = 256  # until two histories are given up that never come together again

_Edit = tuple[int, int]


class _Step(NamedTuple):
    """One call of a history."""

    call: AnyCall
    program: ProgramInfo
    place: str

    def may_be(self, other: _Step) -> bool:
        """Whether both run the same program, as far as that is known."""
        mine, theirs = self.program, other.program
        return mine.key in ("", theirs.key or mine.key) and mine.code in ("", theirs.code or mine.code)


def find_latest_sets(flights: Flights, group: str) -> Candidate | None:
    """Return the latest call of the group that is known of all ranks, and the ranks with equal histories up to it."""
    complete = {rank: flight for rank, flight in flights.items() if flight.complete and group in flight.call_counts}
    known = [
        {call.number for call in flight.calls_of(group)} | flight.marks.get(group, {}).keys()
        for flight in complete.values()
    ]
    common = set.intersection(*known) if known else set()
    return Candidate(group, max(common), sets_by_chain(complete, group, max(common))) if common else None


def find_further_divergences(first: Divergence, candidate: Candidate, histories: Flights) -> tuple[Divergence, ...]:
    """Return where ranks that were in step again after `first` diverged once more, each kind once.

    `histories` of one rank of each set of the candidate; nothing is found where they do not go back to `first`.
    """
    complete = {rank: histories[rank] for rank in candidate.representatives if histories.get(rank, Flight()).complete}
    reference, *others = complete or [-1]
    seen: set[frozenset[CallKind]] = set()
    pairs = ({rank: complete[rank] for rank in (reference, other)} for other in others)
    return tuple(divergence for pair in pairs for divergence in _walk(first, candidate, pair, seen))


def _walk(
    first: Divergence, candidate: Candidate, pair: Flights, seen: set[frozenset[CallKind]]
) -> Iterator[Divergence]:
    """Yield each call that differs between two histories which were in step just before it, and is not `seen` yet."""
    left, right = pair
    mine, theirs = (_steps_from(first, flight) for flight in pair.values())
    at, there, is_in_step, edits = 0, 0, False, 0
    while at < len(mine) and there < len(theirs) and edits < _MAX_EDITS:
        edit = (1, 1)
        if _score(mine[at], theirs[there]) < _SAME:
            edit = _find_edit(mine[at : at + _WINDOW], theirs[there : there + _WINDOW])
            edits += 1
        if edit == (1, 1) and mine[at].may_be(theirs[there]):
            is_in_step = True
        else:
            calls = {left: mine[at].call, right: theirs[there].call}
            made = make_divergence(candidate, mine[at].call.number, ((left,), (right,)), pair, calls)
            alone = {(1, 0): left, (0, 1): right}.get(edit)
            made = replace(made, extra_call_ranks=made.ranks_like(alone) if alone is not None else ())
            if is_in_step and made.kind not in seen:
                yield made
            seen.add(made.kind)
            is_in_step = False
        at, there = at + edit[0], there + edit[1]


def _steps_from(first: Divergence, flight: Flight) -> list[_Step]:
    """The calls from `first` on; none if that is not recorded any more."""
    calls = calls_by_number(flight, first.group)
    if first.number not in calls:
        return []
    later = [calls[number] for number in sorted(calls) if number >= first.number]
    return [_Step(call, flight.program(call), flight.place(call)) for call in later]


def _find_edit(mine: Sequence[_Step], theirs: Sequence[_Step]) -> _Edit:
    """Return how many calls of each to skip at a difference, as the best alignment of both does."""
    # Each cell has the score of aligning so many calls, and the first edit of that alignment.
    cells: dict[_Edit, tuple[float, _Edit]] = {(0, 0): (0.0, (0, 0))}
    for i in range(len(mine) + 1):
        for j in range(len(theirs) + 1):
            ways = []
            for skip in ((1, 0), (0, 1), (1, 1)):
                before = cells.get((i - skip[0], j - skip[1]))
                if before is not None:
                    score = _ALONE if skip != (1, 1) else _score(mine[i - 1], theirs[j - 1])
                    ways.append((before[0] + score, before[1] if before[1] != (0, 0) else skip))
            if ways:
                cells[i, j] = max(ways)
    ends = [cell for (i, j), cell in cells.items() if i == len(mine) or j == len(theirs)]
    return max(ends)[1]


def _score(mine: _Step, theirs: _Step) -> float:
    is_here = mine.place == theirs.place
    if mine.may_be(theirs):
        return _SAME if is_here else _SAME_ELSEWHERE
    return _OTHER_HERE if is_here else _OTHER_ELSEWHERE
