"""Compares the flights of all ranks: where ranks were out of step, and which ranks are behind. No I/O.

Usually only briefs are compared. If their chains differ, the histories of one rank of each set show which call
differed first. A chain may also differ because a rank does not know a program's code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.lockstep.divergence import (
    CallGroup,
    Divergence,
    largest_first,
    partition_by_program,
)
from jaxrun.analysis.lockstep.progress import find_progress
from jaxrun.protocol.flight import AnyCall, DispatchedCall, Flight, PendingCall, parse_group
from jaxrun.text import group_alike

Flights = Mapping[int, Flight]  # by rank


class Candidate(Struct, frozen=True):
    """A call at which, or before which, ranks seem to have been out of step; the histories decide.

    rank_sets:  ranks with equal histories, the largest set first; without ranks of which nothing is known
    """

    group: str
    number: int
    rank_sets: tuple[tuple[int, ...], ...]

    @property
    def representatives(self) -> tuple[int, ...]:
        """One rank of each set; the histories of these ranks are to read."""
        return tuple(ranks[0] for ranks in self.rank_sets)


class Compilation(Struct, frozen=True):
    """A call for which some ranks compile a program, while the ranks `before` it seem to do something else.

    It may also be a call that all ranks have entered, whose program only the ranks `compiling` show.

    compiling:  the compiling ranks, in sets whose programs may be the same
    before:     ranks that have made all calls of the group before this one, and compile nothing
    """

    group: str
    number: int
    compiling: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]


class Lag(Struct, frozen=True):
    """A call of a group that the ranks `ahead` have made or entered, and the ranks `behind` have not.

    reached:  by rank, the number of the last call that the rank has made or entered
    """

    group: str
    number: int
    ahead: tuple[int, ...]
    behind: tuple[int, ...]
    name: str
    place: str
    reached: Mapping[int, int]


def find_candidates(flights: Flights) -> tuple[Candidate, ...]:
    """Return, for each group whose ranks show different calls, the lowest number at which they differ."""
    complete = {rank: flight for rank, flight in flights.items() if flight.complete}
    lowest = _differing_chains(complete.values())
    found = {
        group: Candidate(group, number, _sets_by_chain(complete, group, number)) for group, number in lowest.items()
    }
    for entered in _differing_entries(complete):
        known = found.get(entered.group)
        if known is None or entered.number < known.number:
            found[entered.group] = entered
    return tuple(found[group] for group in sorted(found))


def find_divergence(candidate: Candidate, histories: Flights) -> Divergence | None:
    """Return the first call that really differs in the histories of one rank or more of each set.

    None if no call differs: the programs have equal keys, and equal codes if these are known; or one of them is still
    being compiled, and other ranks have lowered it too.
    """
    group = candidate.group
    complete = {rank: flight for rank, flight in histories.items() if flight.complete}
    calls = {rank: _calls_by_number(flight, group) for rank, flight in complete.items()}
    numbers = sorted({number for table in calls.values() for number in table})
    oldest = None
    for number in numbers:
        held = {rank: table[number] for rank, table in calls.items() if number in table}
        if len(held) < 2:
            continue
        oldest = oldest or number
        programs = {rank: complete[rank].program(call) for rank, call in held.items()}
        if len({program[1:3] for program in programs.values()}) == 1:
            continue
        found = partition_by_program({rank: (program.key, program.code) for rank, program in programs.items()})
        if len(found) > 1 and not _may_fail_to_compile(found, held, complete):
            return _make_divergence(candidate, number, found, complete, held)
    return _before(candidate, oldest, complete, calls) if oldest is not None else None


def find_compilations(flights: Flights) -> tuple[Compilation, ...]:
    """Return the calls for which some ranks compile a program and others do not."""
    complete = {rank: flight for rank, flight in flights.items() if flight.complete}
    compiling: dict[tuple[str, int], dict[int, tuple[str, str]]] = defaultdict(dict)
    for rank, flight in complete.items():
        call = flight.compiled_for
        if call is not None:
            program = flight.program(call)
            compiling[call.group, call.number][rank] = (program.key, program.code)
    found = []
    for (group, number), identities in sorted(compiling.items()):
        ranks = parse_group(group, max(complete) + 1) & complete.keys()
        before = (rank for rank in sorted(ranks) if _is_before(complete[rank], group, number))
        found.append(Compilation(group, number, partition_by_program(identities), tuple(before)))
    return tuple(compilation for compilation in found if compilation.before)


def find_entered(flights: Flights, size: int) -> tuple[Compilation, ...]:
    """Return the calls that all ranks of a group have entered and not left, if the programs of some are not known.

    size:  the number of the job's ranks
    """
    complete = {rank: flight for rank, flight in flights.items() if flight.complete}
    found = []
    for group in sorted({group for flight in complete.values() for group in flight.call_counts}):
        ranks = parse_group(group, size)
        numbers = {complete[rank].call_counts.get(group, 0) + 1 for rank in ranks & complete.keys()}
        if not ranks <= complete.keys() or len(numbers) != 1:
            continue
        (number,) = numbers
        known = {rank: call for rank in ranks if (call := complete[rank].pending) and call.group == group}
        before = tuple(rank for rank in sorted(ranks - known.keys()) if _is_before(complete[rank], group, number))
        if before and len(before) + len(known) == len(ranks) and all(complete[rank].entered for rank in before):
            programs = {rank: complete[rank].program(call) for rank, call in known.items()}
            identities = {rank: (program.key, program.code) for rank, program in programs.items()}
            found.append(Compilation(group, number, partition_by_program(identities), before))
    return tuple(found)


def calls_one_program(flight: Flight, site: int) -> bool:
    """Whether all known calls from this site have had the same program, so that the next one most likely has, too."""
    return len({call.program for call in flight.calls if call.site == site}) == 1


def enter_standing_call(flight: Flight, candidate: Candidate, site: int) -> Flight:
    """Return the flight of a rank that stands in a call at this site, with that call entered.

    The call's program is the one that the site called last. The flight is returned unchanged if that program belongs to
    another group, or if the rank has come further meanwhile.
    """
    last = next((call for call in reversed(flight.calls) if call.site == site), None)
    group, number = candidate.group, candidate.number
    if last is None or last.group != group or not _is_before(flight, group, number):
        return flight
    return replace(flight, pending=PendingCall(group, number, last.program, site, last.time))


def find_lags(flights: Flights) -> tuple[Lag, ...]:
    """Return, for each group whose ranks have come unequally far, the first call that not all have reached."""
    complete = {rank: flight for rank, flight in flights.items() if flight.complete}
    found = []
    size = max(complete, default=-1) + 1
    for group in sorted({group for flight in complete.values() for group in flight.call_counts}):
        progress = find_progress(complete, group, size)
        number = progress.next_number
        ahead = progress.ahead(number)
        if ahead:
            name, place = _shown(number, group, [complete[rank] for rank in ahead])
            found.append(Lag(group, number, ahead, progress.behind(number), name, place, progress.reached))
    return tuple(found)


def _is_before(flight: Flight, group: str, number: int) -> bool:
    """Whether this call is the next one of a rank that compiles nothing."""
    is_free = flight.pending is None and flight.compiling is None
    return is_free and flight.call_counts.get(group, 0) == number - 1


def _may_fail_to_compile(found: Iterable[tuple[int, ...]], calls: Mapping[int, AnyCall], flights: Flights) -> bool:
    """Whether a rank of these sets compiles a program for this call that a rank of another set has lowered as well.

    Then the compilation may fail, as it may have failed on the other rank, and both ranks may make the same call after
    all.
    """
    for ranks in found:
        for rank in ranks:
            call = flights[rank].compiled_for
            if call is None or calls[rank] != call:
                continue
            code = flights[rank].program(call).code
            others = (other for other in calls if other not in ranks)
            if any(code == program.code for other in others for program in flights[other].programs.values()):
                return True
    return False


def _differing_chains(flights: Iterable[Flight]) -> dict[str, int]:
    """Return by group the lowest number at which two flights have different chains."""
    chains: dict[str, dict[int, int]] = defaultdict(dict)
    lowest: dict[str, int] = {}
    for flight in flights:
        for call in flight.calls:
            if chains[call.group].setdefault(call.number, call.chain) != call.chain:
                lowest[call.group] = min(call.number, lowest.get(call.group, call.number))
        for group, marks in flight.marks.items():
            for number, chain in marks.items():
                if chains[group].setdefault(number, chain) != chain:
                    lowest[group] = min(number, lowest.get(group, number))
    return lowest


def _sets_by_chain(flights: Flights, group: str, number: int) -> tuple[tuple[int, ...], ...]:
    chains: dict[int, int] = {}
    for rank, flight in flights.items():
        chain = flight.marks.get(group, {}).get(number)
        if chain is None:
            chain = next((call.chain for call in flight.calls if call.number == number and call.group == group), None)
        if chain is not None:
            chains[rank] = chain
    return tuple(ranks for _, ranks in group_alike(chains))


def _differing_entries(flights: Flights) -> list[Candidate]:
    """Return calls that ranks have entered, made or compile for, with different programs."""
    coming = (call for flight in flights.values() for call in (flight.pending, flight.compiled_for))
    entered = {(call.group, call.number) for call in coming if call is not None}
    if not entered:
        return []
    shown: dict[tuple[str, int], dict[int, tuple[str, str]]] = {call: {} for call in entered}
    for rank, flight in flights.items():
        for call in flight.coming_calls:
            if (call.group, call.number) in shown:
                program = flight.program(call)
                shown[call.group, call.number][rank] = (program.key, program.code)
    found = [(group, number, partition_by_program(identities)) for (group, number), identities in sorted(shown.items())]
    return [Candidate(group, number, parts) for group, number, parts in found if len(parts) > 1]


def _calls_by_number(flight: Flight, group: str) -> dict[int, AnyCall]:
    return {call.number: call for call in flight.coming_calls if call.group == group}


def _make_divergence(
    candidate: Candidate,
    number: int,
    found: tuple[tuple[int, ...], ...],
    histories: Flights,
    calls: Mapping[int, AnyCall],
    before: bool = False,
) -> Divergence:
    """Return a divergence of these representatives, each of which stands for its set."""
    call_groups = []
    for representatives in found:
        known = set(representatives)
        ranks = known.union(*(part for part in candidate.rank_sets if known & set(part)))
        recorded_by = max(representatives, key=lambda rank: histories[rank].program(calls[rank])[1:3] > ("", ""))
        flight, call = histories[recorded_by], calls[recorded_by]
        program = flight.program(call)
        call_groups.append(
            CallGroup(
                tuple(sorted(ranks)),
                *program,
                place=flight.place(call),
                recorded_by=recorded_by,
                program=call.program,
            )
        )
    return Divergence(candidate.group, number, largest_first(call_groups), before)


def _before(
    candidate: Candidate,
    number: int,
    histories: Flights,
    calls: Mapping[int, Mapping[int, AnyCall]],
) -> Divergence | None:
    """Return a divergence before `number`, the first recorded call; chains show it if all programs are known."""
    held = {rank: table[number] for rank, table in calls.items() if number in table}
    chains = {
        rank: call.chain
        for rank, call in held.items()
        if isinstance(call, DispatchedCall) and not histories[rank].unknown_programs and not histories[rank].trouble
    }
    found = tuple(ranks for _, ranks in group_alike(chains))
    if len(found) < 2 or number == 1:
        return None
    return _make_divergence(candidate, number, found, histories, held, before=True)


def _shown(number: int, group: str, flights: Iterable[Flight]) -> tuple[str, str]:
    """Return name and place of this call from the first flight that still has it; empty texts if none has."""
    for flight in flights:
        call = _calls_by_number(flight, group).get(number)
        if call is not None:
            return flight.program(call).name, flight.place(call)
    return "", ""
