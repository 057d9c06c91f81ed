"""What the flight recorders in a run directory tell, of a job that ended in any way: from these files alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from jaxrun.lockstep import compare, report
from jaxrun.lockstep.divergence import Divergence
from jaxrun.lockstep.progress import format_progress
from jaxrun.lockstep.reader import FlightReader
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import flight_file_name
from jaxrun.text import UNKNOWN_HOST, format_columns, format_ranks_on_hosts, plural

_NAME = re.compile(r"rank-(\d+)\.flight")


def format_recorders(run_dir: Path, hosts: Mapping[int, str], *, in_step: bool) -> str:
    """The calls of all ranks and, with `in_step`, where they were out of step; empty without recorders.

    `hosts` as far as they are known.
    """
    with ExitStack() as stack:
        readers = {rank: _open(run_dir, rank, stack) for rank in _ranks(run_dir)}
        flights = {rank: reader.history() for rank, reader in readers.items()}
        flights = {rank: flight for rank, flight in flights.items() if flight.call_counts or flight.compiling}
        if not flights:
            return ""
        known = {rank: hosts.get(rank, UNKNOWN_HOST) for rank in readers}
        parts = [_table(flights, known)]
        if in_step:
            parts += [report.format_divergence(found, known) for found in _divergences(flights, readers)[:1]]
        return "\n\n".join(parts)


def _table(flights: Mapping[int, Flight], hosts: Mapping[int, str]) -> str:
    """One line for each group of ranks that had come equally far."""
    alike: dict[str, list[int]] = {}
    for rank, flight in flights.items():
        alike.setdefault(f"{format_progress({rank: flight}, len(hosts))}  {_place(flight)}".strip(), []).append(rank)
    rows = [
        (format_ranks_on_hosts(ranks, hosts), text) for text, ranks in sorted(alike.items(), key=lambda group: group[1])
    ]
    rows += [
        (format_ranks_on_hosts([rank], hosts), flight.trouble) for rank, flight in flights.items() if flight.trouble
    ]
    silent = [rank for rank in hosts if rank not in flights]
    rows += [(format_ranks_on_hosts(silent, hosts), "no cross-process call")] if silent else []
    heading = f"cross-process calls, as the flight recorders of {plural(len(hosts), 'rank')} show them at their end:"
    return "\n".join([heading, *(f"  {line}" for line in format_columns(rows))])


def _place(flight: Flight) -> str:
    call = flight.known_calls[-1] if flight.known_calls else None
    place = flight.place(call) if call else ""
    return f"at {place}" if place else ""


def _divergences(flights: Mapping[int, Flight], readers: Mapping[int, FlightReader]) -> list[Divergence]:
    found = (compare.find_divergence(suspicion, flights) for suspicion in compare.find_candidates(flights))
    return [_described(divergence, readers) for divergence in found if divergence is not None]


def _described(divergence: Divergence, readers: Mapping[int, FlightReader]) -> Divergence:
    callers = [party for party in divergence.call_groups if party.recorded_by in readers]
    return divergence.with_program_details(
        {party.recorded_by: readers[party.recorded_by].program_details(party.program) for party in callers}
    )


def _ranks(run_dir: Path) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in run_dir.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _open(run_dir: Path, rank: int, stack: ExitStack) -> FlightReader:
    file = os.open(run_dir / flight_file_name(rank), os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, file)
    return FlightReader(file)
