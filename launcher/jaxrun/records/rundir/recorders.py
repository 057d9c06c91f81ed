"""Reads the flight recorders in a run directory: they are complete however the job ended."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jaxrun.analysis.lockstep import compare, divergence_text
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.analysis.lockstep.progress import format_progress
from jaxrun.analysis.lockstep.reader import FlightReader
from jaxrun.files.regular_files import open_regular
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import flight_file_name
from jaxrun.text import UNKNOWN_HOST, format_columns, format_ranks_on_hosts, group_alike, plural

_NAME = re.compile(r"rank-(\d+)\.flight")


@contextmanager
def open_recorder(directory: Path, rank: int) -> Iterator[FlightReader | None]:
    """Open the recorder of a rank in the directory of an attempt's logs; None if it cannot be read."""
    try:
        file = open_regular(directory / flight_file_name(rank))
    except OSError:
        yield None
        return
    try:
        yield FlightReader(file)
    finally:
        os.close(file)


def format_recorders(run_dir: Path, hosts: Mapping[int, str], *, divergences: bool) -> str:
    """The calls of all ranks, and with `divergences` where the ranks diverge; empty without recorders.

    `hosts` maps ranks to their hosts as far as these are known.
    """
    if not run_dir.is_dir():  # no attempt's logs could be kept there
        return ""
    with ExitStack() as stack:
        opened = {rank: stack.enter_context(open_recorder(run_dir, rank)) for rank in _ranks(run_dir)}
        readers = {rank: reader for rank, reader in opened.items() if reader is not None}
        flights = {rank: reader.history() for rank, reader in readers.items()}
        flights = {rank: flight for rank, flight in flights.items() if flight.call_counts or flight.compiling}
        if not flights:
            return ""
        known = {rank: hosts.get(rank, UNKNOWN_HOST) for rank in readers}
        parts = [_table(flights, known)]
        if divergences:
            parts += [divergence_text.format_divergence(found, known) for found in _divergences(flights, readers)[:1]]
        return "\n\n".join(parts)


def _table(flights: Mapping[int, Flight], hosts: Mapping[int, str]) -> str:
    """One line for each group of ranks whose last call is the same."""
    calls = {
        rank: f"{format_progress({rank: flight}, len(hosts))}  {_place(flight)}".strip()
        for rank, flight in flights.items()
    }
    lines = sorted((ranks, text) for text, ranks in group_alike(calls))
    lines += [((rank,), flight.trouble) for rank, flight in flights.items() if flight.trouble]
    without = tuple(rank for rank in hosts if rank not in flights)
    lines += [(without, "no cross-process call")] if without else []
    rows = [(format_ranks_on_hosts(ranks, hosts), text) for ranks, text in lines]
    heading = f"cross-process calls, as the flight recorders of {plural(len(hosts), 'rank')} show them at their end:"
    return "\n".join([heading, *(f"  {line}" for line in format_columns(rows))])


def _place(flight: Flight) -> str:
    call = flight.known_calls[-1] if flight.known_calls else None
    place = flight.place(call) if call else ""
    return f"at {place}" if place else ""


def _divergences(flights: Mapping[int, Flight], readers: Mapping[int, FlightReader]) -> list[Divergence]:
    found = (compare.find_divergence(candidate, flights) for candidate in compare.find_candidates(flights))
    return [_with_details(divergence, readers) for divergence in found if divergence is not None]


def _with_details(divergence: Divergence, readers: Mapping[int, FlightReader]) -> Divergence:
    groups = [group for group in divergence.call_groups if group.recorded_by in readers]
    return divergence.with_program_details(
        {group.recorded_by: readers[group.recorded_by].program_details(group.program) for group in groups}
    )


def _ranks(run_dir: Path) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in run_dir.iterdir())
    return sorted(int(match[1]) for match in found if match)
